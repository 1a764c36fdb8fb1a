"""The same chain of layers without streaming, in a process of its own: options of streaming hold for a process.

    python -m hybrid_moe_ext.bench.stream_child SHAPE KIND N_LAYERS MEMORY_BYTES N_TOKENS ROUTING THREADS

SHAPE is n_embd,n_ff,n_expert,n_used. Says when it is ready, then answers every line of standard
input with the seconds per layer of one run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from ..errors import PluginError
from ..options import ENV_PREFIX, Options
from .graph import Shape

IDLE_S = 0.1  # teams of threads spin for some milliseconds when their work has ended
SLOW_S = 1.0  # a layer that takes longer is timed once, by itself


class CpuChain:
    """Used as a context. `options`: those of the streaming process; here nothing streams."""

    def __init__(self, arguments: list[object], options: Options):
        env = {
            name: value for name, value in os.environ.items() if name not in ("GGML_BACKEND_PATH", "HYBRID_MOE_TRACE")
        }
        env |= {ENV_PREFIX + name.upper(): str(getattr(options, name)) for name in Options.names()}
        env |= {ENV_PREFIX + "SLP": "off", ENV_PREFIX + "DEVICES": "none"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env,
        )  # fmt: skip
        try:
            self._answer()  # it is ready: nothing of it runs while others are timed
        except BaseException:
            self.__exit__()
            raise
        time.sleep(IDLE_S)

    def layer_s(self) -> float:
        """Returns when the child is idle again."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        seconds = float(self._answer()["layer_s"])
        time.sleep(IDLE_S)
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            reason = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-3:]
            raise PluginError(f"the CPU-only process ended with {self._process.returncode}: {' / '.join(reason)}")
        told: dict[str, Any] = json.loads(answer)
        return told

    def __enter__(self) -> CpuChain:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


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
