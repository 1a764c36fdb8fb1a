"""The engine where experts stream to GPU devices: the prefill worker has the context that placement chose. On the simulated GPU,
in a process of its own, since devices are loaded once."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_solo
import models

N_LONG, N_SHORT, N_TOKENS = 200, 9, 8


def _serve(library: str, model: str) -> dict[str, Any]:
    """A long and a short prompt, by the engine and by Llama alone."""
    sys.path.insert(0, str(Path(__file__).parent / "simgpu"))
    import host

    assert host.load(library.encode()), "the simulated GPU did not load"
    from hybrid_moe_ext import Llama, streamed

    prompts = [engine_solo.prompt(N_LONG, seed=1, n_vocab=250), engine_solo.prompt(N_SHORT, seed=2, n_vocab=250)]
    exact = {name: models.OPTIONS[name] for name in ("type_k", "type_v")} | {"slp": "on", "verbose": False}
    exact["dense_type"] = "f32"
    start = streamed.report()
    llm = Llama(model, n_ctx=512, n_threads=1, n_threads_batch=1, **exact)
    alone = [[t for t, _ in zip(llm.generate(p, temp=0.0), range(N_TOKENS), strict=False)] for p in prompts]
    llm.close()
    before = streamed.report()
    with engine_solo.Engine(model, n_ctx=512, n_parallel=2, n_batch=32, n_threads=1, prefill_from=64, **exact) as e:
        streams = [e.submit(engine_solo.greedy(p, N_TOKENS)) for p in prompts]
        results = [s.result(200) for s in streams]
        return {
            "alone": alone,
            "prompts": prompts,
            "tokens": [r.tokens for r in results],
            "via": [r.finish.metrics.via for r in results],
            "placement": asdict(e.llama.placement),
            "passes_alone": asdict(streamed.between(start, before)),
            "passes": asdict(streamed.between(before, streamed.report())),
            "n_batch": [c.n_batch for c in e._contexts],
        }


def test_a_long_prompt_streams_and_moves(simgpu: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HYBRID_MOE_", "SIMGPU_"))}
    environment |= {name: os.environ[name] for name in ("HYBRID_MOE_LIBRARY", "HYBRID_MOE_ISA") if name in os.environ}
    done = subprocess.run(
        [sys.executable, __file__, simgpu, models.fp8_directory()],
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["placement"]["devices"] and seen["via"] == ["prefill", "decode"]
    assert seen["n_batch"] == [512, 32]
    for prompt, tokens, alone in zip(seen["prompts"], seen["tokens"], seen["alone"], strict=True):
        for text in (tokens, alone):  # streamed sums differ in their last bits, and these tokens may be near a tie
            engine_solo.assert_solo("fp8", prompt, text, N_TOKENS)
    # In one pass, as Llama would have: the last token's, the short prompt's and decode's few rows stay on the CPU.
    assert seen["passes"]["layers"] == seen["passes_alone"]["layers"] > 0
    assert seen["passes"]["devices"] and not seen["passes"]["troubles"]


if __name__ == "__main__":
    print(json.dumps(_serve(*sys.argv[1:])))
