"""A stock llama.cpp host for tests, through llama-cpp-python's C functions: load, logits, nothing else. No plug-in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import numpy as np
import pytest

llama = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


@llama.llama_log_callback
def _silent(level: int, text: bytes, user_data: int) -> None:
    pass


llama.llama_log_set(_silent, None)
llama.llama_backend_init()
_load_ptr: Callable[..., Any] = llama.llama_cpp._lib.llama_model_load_from_file_ptr
_load_ptr.restype = ctypes.c_void_p
_load_ptr.argtypes = [ctypes.c_void_p, llama.llama_model_params]


def params() -> Any:
    p = llama.llama_model_default_params()
    p.n_gpu_layers = 0
    p.load_mode = llama.LLAMA_LOAD_MODE_NONE
    p.use_extra_bufts = False  # on CPUs with AMX llama.cpp stops at DeepSeek's Q8_0 attention in its layouts
    return p


def load_path(path: os.PathLike | str) -> Any:
    return llama.llama_model_load_from_file(str(path).encode(), params())


def load_file(file: ctypes.c_void_p | None) -> Any:
    """NULL on failure."""
    return _load_ptr(file, params())


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """[n_tokens, n_vocab] float32; float32 KV cache, two threads. Frees the model."""
    p = llama.llama_context_default_params()
    p.n_ctx, p.n_threads, p.n_threads_batch = 128, 2, 2
    p.type_k = p.type_v = 0  # F32: an F16 cache alone costs 4e-7
    p.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, p)
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama.llama_decode(context, batch) == 0
    result = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), n_vocab)).copy()
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return result
