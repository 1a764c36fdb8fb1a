"""The bytes of a token."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as C


def piece(vocab: Any, token: int, control: bool = False) -> bytes:
    """Empty for control tokens, unless `control`. llama-cpp-python's detokenize() loses those of more than 32 bytes."""
    if C.llama_vocab_type(vocab) == C.LLAMA_VOCAB_TYPE_NONE:
        return b""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = C.llama_token_to_piece(vocab, token, buffer, size, 0, control)
        if n >= 0:
            return buffer.raw[:n]
        size = -n
