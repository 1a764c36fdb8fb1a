"""One llama_context: its batch, and the moves of keys and values that the workers make. For one thread at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from ..errors import EngineError
from ..loading import take_failure
from .sampling import Logits

Tokens = npt.NDArray[np.int32]
State = npt.NDArray[np.uint8]
NO_TOKENS: Tokens = np.empty(0, np.int32)


class NoRoom(Exception):
    """llama.cpp found no cells for a batch; nothing was computed."""


@dataclass(frozen=True)
class Memory:
    """What can be done with a part of a sequence."""

    recurrent: bool  # all layers or some: the state is that after the last token, and of no earlier one
    window: int  # tokens that sliding-window layers look back; 0: no such layers
    keeps_all: bool  # sliding-window layers have a cell for every token (swa_full)

    @classmethod
    def of(cls, model: Any, params: Any) -> Memory:
        recurrent = bool(C.llama_model_is_recurrent(model) or C.llama_model_is_hybrid(model))
        return cls(recurrent, int(C.llama_model_n_swa(model)), bool(params.swa_full))

    @property
    def goes_in_pieces(self) -> bool:
        """llama.cpp leaves out of a sequence's state what its last token does not see, so a piece would lose tokens."""
        return not self.recurrent and self.window == 0

    @property
    def has_prefixes(self) -> bool:
        return self.recurrent or self.window == 0 or self.keeps_all

    def __str__(self) -> str:
        if self.recurrent:
            return "recurrent: only whole sequences are reused, a prompt moves as a whole"
        if self.window:
            reuse = "prefixes are reused while their window is there" if self.keeps_all else "no prefixes are reused"
            return f"sliding window of {self.window}: {reuse}, a prompt moves as a whole"
        return "attention: any prefix is reused, a prompt moves in pieces"


class Context:
    """`ctx` stays the caller's to free."""

    def __init__(self, ctx: Any, memory: Memory):
        self.ctx = ctx
        self.memory = memory
        self.n_ctx = int(C.llama_n_ctx(ctx))
        self.n_batch = int(C.llama_n_batch(ctx))
        self.n_tokens = 0  # in the batch
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(C.llama_get_model(ctx)))
        self._mem = C.llama_get_memory(ctx)
        self._batch = C.llama_batch_init(self.n_batch, 0, 1)
        self._token, self._pos, self._n_seq, self._wanted = (
            np.ctypeslib.as_array(column, (self.n_batch,))
            for column in (self._batch.token, self._batch.pos, self._batch.n_seq_id, self._batch.logits)
        )
        self._n_seq[:] = 1
        self._n_threads = 0  # not set yet

    def free_batch(self) -> None:
        C.llama_batch_free(self._batch)

    def add(self, tokens: Sequence[int] | Tokens, pos: int, seq: int, logits: bool) -> int:
        """Puts tokens of a sequence into the batch. `logits`: of the last one. Returns its place."""
        begin, end = self.n_tokens, self.n_tokens + len(tokens)
        self._token[begin:end] = tokens
        self._pos[begin:end] = np.arange(pos, pos + len(tokens))
        self._wanted[begin:end] = 0
        self._wanted[end - 1] = int(logits)
        for i in range(begin, end):
            self._batch.seq_id[i][0] = seq
        self.n_tokens = end
        return end - 1

    def decode(self, n_threads: int) -> None:
        """Computes the batch and empties it."""
        if n_threads != self._n_threads:
            self._n_threads = n_threads
            C.llama_set_n_threads(self.ctx, n_threads, n_threads)
        self._batch.n_tokens, self.n_tokens = self.n_tokens, 0
        take_failure()  # an older one of this thread
        code = C.llama_decode(self.ctx, self._batch)
        C.llama_synchronize(self.ctx)
        if code == 1:
            raise NoRoom
        if code != 0:
            raise EngineError(take_failure() or f"llama.cpp could not compute a batch (llama_decode returned {code})")

    def logits(self, place: int) -> Logits:
        """[n_vocab], valid until the next decode."""
        return np.ctypeslib.as_array(C.llama_get_logits_ith(self.ctx, place), (self.n_vocab,))

    # --- sequences

    def copy(self, source: int, target: int, begin: int = -1, end: int = -1) -> None:
        C.llama_memory_seq_cp(self._mem, source, target, begin, end)

    def remove(self, seq: int, begin: int = -1) -> bool:
        """Tokens from `begin` on, or all. False: this memory cannot forget a part."""
        return bool(C.llama_memory_seq_rm(self._mem, seq, begin, -1))

    def clear(self) -> None:
        C.llama_memory_clear(self._mem, True)

    def first(self, seq: int) -> int:
        """The first position that all layers still have, -1: none."""
        return int(C.llama_memory_seq_pos_min(self._mem, seq))

    def state_bytes(self, seq: int) -> int:
        return int(C.llama_state_seq_get_size_ext(self.ctx, seq, 0))

    def state(self, seq: int) -> State:
        data = np.empty(self.state_bytes(seq), np.uint8)
        n = C.llama_state_seq_get_data_ext(self.ctx, _bytes(data), len(data), seq, 0)
        if n != len(data):
            raise EngineError(f"llama.cpp wrote {n} of {len(data)} bytes of a sequence's state")
        return data

    def set_state(self, seq: int, data: State) -> None:
        """Replaces the sequence."""
        n = C.llama_state_seq_set_data_ext(self.ctx, _bytes(data), len(data), seq, 0)
        if n != len(data):
            raise EngineError(
                f"llama.cpp read {n} of {len(data)} bytes of a sequence's state: the two contexts do not agree"
            )


def _bytes(data: State) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
