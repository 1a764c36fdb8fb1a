"""One request's sampler: a chain of llama.cpp's, and its grammar. Chooses a token from the logits of a computed batch."""

from __future__ import annotations

import ctypes
import math
import secrets
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from ..errors import EngineError
from .grammar import grammar_sampler
from .request import Sampling

Logits = npt.NDArray[np.float32]
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class GrammarExhausted(Exception):
    """The grammar allows no token of this model here: the text ends."""


class Sampler:
    """Created and checked by the caller's thread, used and freed by the decode worker."""

    def __init__(self, vocab: Any, sampling: Sampling, eog_tokens: list[int], prompt: list[int], n_ctx: int):
        self._n_vocab = C.llama_vocab_n_tokens(vocab)
        self._vocab = vocab
        self._grammar = grammar_sampler(vocab, sampling)
        self._chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        bias = dict(sampling.logit_bias)
        if sampling.ignore_eos:
            bias.update(dict.fromkeys(eog_tokens, -math.inf))
        # The likeliest token, and nothing else: llama.cpp would copy the whole vocabulary for that.
        self._is_argmax = (
            sampling.temperature == 0 and not bias and not sampling.has_penalties and self._grammar is None
        )
        last_n = sampling.penalty_last_n if 0 <= sampling.penalty_last_n < n_ctx else n_ctx
        for part in _parts(sampling, bias, self._n_vocab, last_n):
            C.llama_sampler_chain_add(self._chain, part)
        if sampling.has_penalties:  # they count the prompt; the grammar does not
            for token in prompt[len(prompt) - min(last_n, len(prompt)) :]:
                C.llama_sampler_accept(self._chain, token)

    def free(self) -> None:
        for sampler in (self._chain, self._grammar):
            if sampler is not None:
                C.llama_sampler_free(sampler)
        self._chain = self._grammar = None

    def choose(self, ctx: Any, i_batch: int, logits: Logits) -> int:
        """The next token. `i_batch`: its place in the batch that was computed; `logits` are that place's."""
        if self._is_argmax:
            return int(np.argmax(logits))
        if self._grammar is None:
            return int(C.llama_sampler_sample(self._chain, ctx, i_batch))
        token = self._apply(_Candidates(logits), self._chain)
        if not self._allows(token):
            candidates = _Candidates(logits)
            C.llama_sampler_apply(self._grammar, candidates.ref)
            if not candidates.has_any():
                raise GrammarExhausted
            token = self._apply(candidates, self._chain)
            if not self._allows(token):
                raise GrammarExhausted  # what is allowed is forbidden by the bias
        C.llama_sampler_accept(self._chain, token)
        C.llama_sampler_accept(self._grammar, token)
        return token

    @staticmethod
    def _apply(candidates: _Candidates, chain: Any) -> int:
        C.llama_sampler_apply(chain, candidates.ref)
        return candidates.selected()

    def _allows(self, token: int) -> bool:
        one = _Candidates(np.zeros(1, np.float32), first=token)
        C.llama_sampler_apply(self._grammar, one.ref)
        return one.has_any()


class _Candidates:
    """A llama_token_data_array over all tokens, or over one."""

    def __init__(self, logits: Logits, first: int = 0):
        self._data = np.empty(len(logits), _CANDIDATE)
        self._data["id"] = np.arange(first, first + len(logits), dtype=np.int32)
        self._data["logit"] = logits
        self._data["p"] = 0
        data = ctypes.cast(self._data.ctypes.data, ctypes.POINTER(C.llama_token_data))
        self._array = C.llama_token_data_array(data, len(logits), -1, False)
        self.ref = ctypes.byref(self._array)

    def has_any(self) -> bool:
        return bool(np.isfinite(self._data["logit"][: self._array.size]).any())

    def selected(self) -> int:
        if not 0 <= self._array.selected < self._array.size:
            raise EngineError("llama.cpp's samplers chose no token")
        return int(self._array.data[self._array.selected].id)


def _parts(s: Sampling, bias: dict[int, float], n_vocab: int, last_n: int) -> list[Any]:
    """In llama.cpp's own order."""
    parts = []
    if bias:
        array = (C.llama_logit_bias * len(bias))(*[C.llama_logit_bias(t, b) for t, b in bias.items()])
        parts.append(C.llama_sampler_init_logit_bias(n_vocab, len(bias), array))
    if s.has_penalties:
        parts.append(
            C.llama_sampler_init_penalties(n_vocab, last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
        )
    if s.temperature == 0:
        return [*parts, C.llama_sampler_init_greedy()]
    if s.top_k > 0:
        parts.append(C.llama_sampler_init_top_k(s.top_k))
    if s.top_p < 1:
        parts.append(C.llama_sampler_init_top_p(s.top_p, 1))
    if s.min_p > 0:
        parts.append(C.llama_sampler_init_min_p(s.min_p, 1))
    seed = secrets.randbits(32) if s.seed is None else s.seed % 2**32
    # llama.cpp takes this seed for "a random one".
    seed = seed - 1 if seed == C.LLAMA_DEFAULT_SEED else seed
    return [*parts, C.llama_sampler_init_temp(s.temperature), C.llama_sampler_init_dist(seed)]


def log_probabilities(logits: Logits, token: int, n_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Of the model itself, before any sampler: the token's, and the likeliest ones'."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= math.log(np.exp(x).sum())
    top = np.argpartition(-x, n_top - 1)[:n_top] if n_top else np.empty(0, np.intp)
    return float(x[token]), tuple((int(t), float(x[t])) for t in top[np.argsort(-x[top], kind="stable")])
