"""Logits of GGUF files in llama-cpp-python, first stock and then with the plug-in, in one process:

python architectures.py FILE...       prints one JSON object per file, see `Told`
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import NamedTuple

import llama_cpp
import numpy as np

N_PROMPT, N_DECODE = 40, 4
N_PASSES = 1 + N_DECODE


class Told(NamedTuple):
    path: str
    nmse: float  # of the plug-in's logits, the host's being the reference
    n_wrong: int  # logits that are not finite
    layers: float  # blocks that ran as one step, per pass
    matmuls: float  # products by experts, per pass


def logits(path: str) -> np.ndarray:
    """[tokens, vocabulary]: a prompt in one pass, then single tokens. KV cache in F32: rounding it hides nothing."""
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    assert model, f"{path} does not load"
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads, options.n_threads_batch = 256, 64, 64, 2, 2
    options.type_k = options.type_v = 0
    context = llama_cpp.llama_init_from_model(model, options)
    assert context, f"{path}: no context"
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens = np.random.default_rng(0).integers(0, n_vocab, N_PROMPT + N_DECODE)
    rows = []
    for first, n in [(0, N_PROMPT), *((N_PROMPT + i, 1) for i in range(N_DECODE))]:
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(tokens[first + i]), first + i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(context, batch) == 0, f"{path}: llama_decode failed"
        at = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        rows.append(np.ctypeslib.as_array(at, (n, n_vocab)).astype(np.float64))
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.concatenate(rows)


def main(paths: list[str]) -> None:
    llama_cpp.llama_backend_init()
    stock = [logits(path) for path in paths]
    from hybrid_moe_ext import counters, register

    assert counters().n_matmuls == 0
    register()
    for path, reference in zip(paths, stock, strict=True):
        before = counters()
        ours = logits(path)
        after = counters()
        wrong = int((~np.isfinite(reference) | ~np.isfinite(ours)).sum())
        nmse = float(((ours - reference) ** 2).sum() / (reference**2).sum())
        n_layers, n_matmuls = after.n_layers - before.n_layers, after.n_matmuls - before.n_matmuls
        print(json.dumps(Told(path, nmse, wrong, n_layers / N_PASSES, n_matmuls / N_PASSES)._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
