"""One host of the model benchmark, in a process of its own: llama.cpp through llama-cpp-python, with or without the plug-in.

    python -m hybrid_moe_ext.bench.model_child FILE stock|plugin THREADS N_PROMPT N_GENERATED

Reads commands from standard input, a line each, and answers each with a JSON object: "pp" and "tg" run once, "check PATH" writes
the logits of a prompt. Ends with its input."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray


def _errors_only(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode("utf-8", "replace"))


_log = C.llama_log_callback(_errors_only)  # lives as long as ggml may call it


class Host:
    def __init__(self, path: str, n_threads: int, n_prompt: int, n_generated: int):
        self.n_prompt, self.n_generated = n_prompt, n_generated
        self._model = C.llama_model_load_from_file(path.encode(), C.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"{path} does not load")
        options = C.llama_context_default_params()
        options.n_ctx = max(n_prompt, n_generated) + 64
        options.n_batch = options.n_ubatch = n_prompt
        options.n_threads = options.n_threads_batch = n_threads
        self._context = C.llama_init_from_model(self._model, options)
        if not self._context:
            raise SystemExit(f"{path}: no memory for a context")
        self._n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self._model))
        self._tokens = np.random.default_rng(0).integers(0, self._n_vocab, max(n_prompt, n_generated)).tolist()

    def _decode(self, first: int, n: int) -> None:
        """Tokens [first, first + n) in one pass; logits of the last."""
        batch = C.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = self._tokens[first + i], first + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == n - 1
        status = C.llama_decode(self._context, batch)
        C.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")

    def run(self, test: str) -> float:
        """Seconds, from an empty context on."""
        C.llama_memory_clear(C.llama_get_memory(self._context), True)
        start = time.perf_counter()
        if test == "pp":
            self._decode(0, self.n_prompt)
        else:
            for i in range(self.n_generated):
                self._decode(i, 1)
        C.llama_synchronize(self._context)
        return time.perf_counter() - start

    def logits(self) -> NDArray[np.float32]:
        self.run("pp")
        at = ctypes.cast(C.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(at, (self._n_vocab,)).copy()


def main() -> None:
    path, which, *numbers = sys.argv[1:]
    C.llama_log_set(_log, None)
    C.llama_backend_init()
    from .. import _native
    from ..options import Options

    isa = _native.register(Options.resolve()).isa if which == "plugin" else ""
    host = Host(path, *map(int, numbers))
    for line in sys.stdin:
        command, *argument = line.split(maxsplit=1)
        before = _native.counters().n_layers
        if command == "check":
            np.save(argument[0].rstrip("\n"), host.logits())
            told: dict[str, Any] = {"isa": isa}
        else:
            told = {"seconds": host.run(command)}
        print(json.dumps(told | {"layers": _native.counters().n_layers - before}), flush=True)


if __name__ == "__main__":
    main()
