"""Scenarios of test_placement.py and test_gpu_commands.py, each in a process of its own: devices are loaded once, and options
hold for the process.

python placement_child.py SIMGPU SCENARIO ARGUMENTS(JSON); prints what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "simgpu"))

import host as h

# One thread: on a busy machine, teams that wait for each other at every node take most of the time.
THREADS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


def opened(model: str, **options: Any) -> Any:
    import hybrid_moe_ext

    return hybrid_moe_ext.Llama(model, **THREADS | options)


def seen(llm: Any) -> dict[str, Any]:
    """What was chosen, and whether llama.cpp's own parameters say the same."""
    params = llm.context_params
    return {
        "placement": asdict(llm.placement),
        "text": str(llm.placement),
        "n_batch": [llm.n_batch, params.n_batch],
        "n_ubatch": params.n_ubatch,
        "n_outputs_max": params.n_outputs_max,
        "flash": params.flash_attn_type,
        "scores": list(llm.scores.shape),
    }


def logits(model: str, out: str, n_tokens: int, n_times: int = 1, **options: Any) -> dict[str, Any]:
    """Logits of all tokens in `out`; memory of the devices before anything was computed."""
    import models
    from hybrid_moe_ext import streamed

    llm = opened(
        model, **{name: models.OPTIONS[name] for name in ("logits_all", "type_k", "type_v", "n_ctx")} | options
    )
    used = [device["memory"]["used"] for device in h.stats()["devices"]]
    before = streamed.report()
    for _ in range(n_times):
        values = models.logits(llm, models.prompt(n_tokens))
    np.save(out, values)
    did = streamed.between(before, streamed.report())
    return seen(llm) | {"streamed": asdict(did), "words": str(did), "used": used}


def choose(model: str, **options: Any) -> dict[str, Any]:
    """What is chosen, and whether a prompt as long as a pass, and a text, can be computed by that."""
    from hybrid_moe_ext import streamed

    llm = opened(model, **options)
    n = min(llm.context_params.n_ubatch, llm.n_ctx() - 8)
    tokens = [0] + [3 + i % 200 for i in range(n - 1)]
    text = [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(3), strict=False)]
    return seen(llm) | {"report": streamed.report(), "text_tokens": text}


def refused(model: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of each case, then what a model gets that is opened in the same process after all."""
    errors = []
    for options in cases:
        try:
            opened(model, **options)
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    return {"errors": errors, "after": choose(model)}


def twice(model: str, first: dict[str, Any], others: list[dict[str, Any]]) -> list[Any]:
    """Further models in the process of a first one: what was chosen, or the error."""
    kept, out = [opened(model, **first)], []
    for options in others:
        try:
            kept.append(opened(model, **options))
            out.append(asdict(kept[-1].placement))
        except Exception as error:
            out.append([type(error).__name__, str(error)])
    return out


def state(model: str, **options: Any) -> dict[str, Any]:
    """What pickling keeps, and what comes back."""
    import pickle

    llm = opened(model, **options)
    kept = llm.__getstate__()
    return {"kept": sorted(kept), "before": seen(llm), "after": seen(pickle.loads(pickle.dumps(llm)))}


def embedding(model: str, **options: Any) -> dict[str, Any]:
    llm = opened(model, embedding=True, **options)
    return seen(llm) | {"embedding": llm.embed("the licence of this")}


def stock(model: str, out: str, n_tokens: int, plugin: str) -> dict[str, Any]:
    """A host that knows nothing of us but the plug-in's path: a stock llama_cpp.Llama, options by variables only."""
    import llama_cpp

    import models

    assert h.load(plugin.encode()), "the plug-in did not load"
    llm = llama_cpp.Llama(model, **models.OPTIONS | THREADS | {"n_gpu_layers": 99})
    np.save(out, models.logits(llm, models.prompt(n_tokens)))
    from hybrid_moe_ext import streamed

    return {"report": streamed.report()}


def command(arguments: list[str]) -> None:
    from hybrid_moe_ext.cli import main

    main(arguments)


if __name__ == "__main__":
    library, name, arguments = sys.argv[1:]
    assert library == "none" or h.load(library.encode()), "the simulated GPU did not load"
    scenarios = {f.__name__: f for f in (logits, choose, refused, twice, state, embedding, stock, command)}
    print(json.dumps(scenarios[name](**json.loads(arguments))))
