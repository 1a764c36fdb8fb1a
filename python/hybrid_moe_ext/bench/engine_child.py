"""The engine of the engine benchmark, in a process of its own.

    python -m hybrid_moe_ext.bench.engine_child MODEL OPTIONS_AS_JSON

Reads commands from standard input, a line each, and answers each with a JSON object: "resolve IN OUT SEED" makes a trace of
token ids from one of any kind, "play TRACE" plays one. Ends with its input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from ..engine import Engine
from .engine_load import Arrival, arrivals, read_trace, write_trace
from .engine_play import play, to_engine

WARM_PROMPT, WARM_OUTPUT = 256, 8


class Host:
    def __init__(self, engine: Engine):
        self._engine = engine
        vocab = C.llama_model_get_vocab(engine.llama.model)
        special = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN | C.LLAMA_TOKEN_ATTR_UNUSED
        has_text = C.llama_vocab_type(vocab) != C.LLAMA_VOCAB_TYPE_NONE
        self._ordinary = [
            t for t in range(engine.n_vocab) if not has_text or not C.llama_vocab_get_attr(vocab, t) & special
        ]

    def resolve(self, source: str, target: str, seed: str) -> dict[str, Any]:
        e = self._engine
        load = arrivals(read_trace(Path(source)), self._ordinary, e.tokenize, e.n_vocab, e.n_ctx, int(seed))
        write_trace(Path(target), load)
        return {"n_prompt": [len(a.tokens) for a in load]}

    def play(self, trace: str) -> dict[str, Any]:
        e = self._engine
        load = arrivals(read_trace(Path(trace)), self._ordinary, e.tokenize, e.n_vocab, e.n_ctx, 0)
        send = to_engine(e)
        play(warm_up(load), send)
        before = e.metrics()
        served = play(load, send)
        after = e.metrics()
        told = {
            "steps": after.steps - before.steps,
            "decode_seconds": after.decode_seconds - before.decode_seconds,
            "prefill_tokens": after.prefill_tokens - before.prefill_tokens,
            "prefill_seconds": after.prefill_seconds - before.prefill_seconds,
        }
        return {"served": [asdict(s) for s in served], "engine": told}


def warm_up(load: list[Arrival]) -> list[Arrival]:
    """Two requests of the load, cut: weights are read, threads are there, the engine knows how long a step takes."""
    longest = max(load, key=lambda a: len(a.tokens))
    tokens = longest.tokens[-WARM_PROMPT:]
    return [Arrival(0.0, tokens, WARM_OUTPUT), Arrival(0.0, tokens[::-1], WARM_OUTPUT)]


def main() -> None:
    path, options = sys.argv[1:]
    with Engine(path, **json.loads(options)) as engine:
        host = Host(engine)
        commands: dict[str, Callable[..., dict[str, Any]]] = {"resolve": host.resolve, "play": host.play}
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(commands[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
