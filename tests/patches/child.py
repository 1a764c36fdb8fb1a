"""Logits of one model in many situations, in a process of its own: the environment names the libraries and the switches.

    python child.py MODEL.gguf OUT.npz

Keys are SITUATION/ATTENTION; each array is [n_rows, n_vocab], float32. Used by tests/test_patches.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

N_CTX = 1024
F32 = 0  # GGML_TYPE_F32: rounding the KV cache to F16 turns differences of 1e-14 into 1e-10

Token = tuple[int, int, int]  # token, position, sequence


def prompt(n: int, seed: int, n_vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, n)]


def sequence(n: int, seed: int, n_vocab: int, seq: int = 0, first: int = 0) -> list[Token]:
    return [(t, first + i, seq) for i, t in enumerate(prompt(n, seed, n_vocab))]


class Situations:
    def __init__(self, path: str):
        C.llama_backend_init()
        C.llama_log_set(_quiet, None)
        self._model = C.llama_model_load_from_file(path.encode(), C.llama_model_default_params())
        assert self._model, f"{path} cannot be loaded"
        self._n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self._model))

    def all(self, flash: bool) -> Iterator[tuple[str, np.ndarray]]:
        n = self._n_vocab
        long = sequence(600, 1, n)
        with self._context(1024, flash) as run:  # one ubatch, a ragged last tile
            yield "whole", run(long)
            yield "then-decode", np.concatenate([run([(5 + i, 600 + i, 0)]) for i in range(4)])
        with self._context(256, flash) as run:  # ubatches of 256, 256 and 88 tokens
            yield "ubatches", run(long)
        with self._context(50, flash) as run:  # short ones, which no switch but that for few tokens concerns
            yield "short-ubatches", run(long)
        with self._context(1024, flash) as run:  # the cache starts with 37 tokens
            yield "after-37", np.concatenate([run(long[:37]), run(long[37:])])
        two = [sequence(300, 2, n, 0), sequence(300, 3, n, 1)]
        mixed = [token for pair in zip(*two, strict=True) for token in pair]
        for name, unified in (("unified", True), ("streams", False)):
            with self._context(1024, flash, n_seq=2, unified=unified) as run:
                yield f"two-{name}", run(two[0] + two[1])
            with self._context(1024, flash, n_seq=2, unified=unified) as run:
                yield f"mixed-{name}", run(mixed)
                more = sequence(200, 4, n, 1, first=300)
                yield f"mixed-{name}-more", run(more)
        with self._context(400, flash) as run:  # a sliding window's cache has to use its cells again
            yield "wrapped", np.concatenate([run(long[:400]), run(long[400:500]), run(sequence(300, 5, n, 0, 500))])

    @contextmanager
    def _context(self, n_ubatch: int, flash: bool, n_seq: int = 1, unified: bool = True) -> Iterator[Any]:
        options = C.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = N_CTX * n_seq, N_CTX, n_ubatch
        options.n_seq_max, options.kv_unified, options.n_threads = n_seq, unified, 1
        options.n_threads_batch = 1
        options.type_k = options.type_v = F32
        options.flash_attn_type = int(flash)
        context = C.llama_init_from_model(self._model, options)
        assert context, "no context"
        try:
            yield lambda tokens: self._run(context, tokens)
        finally:
            C.llama_free(context)

    def _run(self, context: Any, tokens: list[Token]) -> np.ndarray:
        batch = C.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = seq
        status = C.llama_decode(context, batch)
        C.llama_batch_free(batch)
        assert status == 0, f"llama_decode gave {status}"
        rows = [np.ctypeslib.as_array(C.llama_get_logits_ith(context, i), (self._n_vocab,)) for i in range(len(tokens))]
        return np.array(rows)


def _ignore(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode("utf-8", "replace"))


_quiet = C.llama_log_callback(_ignore)  # C keeps a pointer to it


def main(model: str, out: str) -> None:
    situations = Situations(model)
    arrays = {
        f"{name}/{'flash' if flash else 'plain'}": rows
        for flash in (False, True)
        for name, rows in situations.all(flash)
    }
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
