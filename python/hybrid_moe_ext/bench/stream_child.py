"""The same chain of layers without streaming, in a process of its own: options of streaming hold for a process.

    python -m hybrid_moe_ext.bench.stream_child SHAPE KIND N_LAYERS MEMORY_BYTES N_TOKENS ROUTING THREADS

SHAPE is n_embd,n_ff,n_expert,n_used. Says when it is ready, then answers every line of standard
input with the seconds per layer of one run."""

from __future__ import annotations

import json
import sys
import time

from ..options import ENV_PREFIX, Options
from .child import Child
from .graph import Shape

IDLE_S = 0.1  # teams of threads spin for some milliseconds when their work has ended
SLOW_S = 1.0  # a layer that takes longer is timed once, by itself


class CpuChain:
    """Used as a context. `options`: those of the streaming process; here nothing streams."""

    def __init__(self, arguments: list[object], options: Options):
        here = {ENV_PREFIX + "SLP": "off", ENV_PREFIX + "DEVICES": "none"}
        without = ("GGML_BACKEND_PATH", "HYBRID_MOE_TRACE")
        self._child = Child(__name__, arguments, options, "the CPU-only process", here, without)
        try:
            self._child.answer()  # it is ready: nothing of it runs while others are timed
        except BaseException:
            self._child.close()
            raise
        time.sleep(IDLE_S)

    def layer_s(self) -> float:
        """Returns when the child is idle again."""
        seconds = float(self._child.ask("run")["layer_s"])
        time.sleep(IDLE_S)
        return seconds

    def __enter__(self) -> CpuChain:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()


def main() -> None:
    shape, kind, *numbers, routing, threads = sys.argv[1:]
    n_layers, memory_bytes, n_tokens = map(int, numbers)
    from .. import _native
    from .stream_chain import Chain, random_batch
    from .stream_experts import StreamExperts

    _native.register(Options.resolve())
    of = Shape(*map(int, shape.split(",")))
    experts = StreamExperts(of, kind, n_layers, memory_bytes)
    chain = Chain(experts, random_batch(of, n_layers, n_tokens, routing), int(threads))
    is_slow = chain.run_layer_s() > SLOW_S
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"layer_s": chain.run_layer_s() if is_slow else chain.run().layer_s}), flush=True)


if __name__ == "__main__":
    main()
