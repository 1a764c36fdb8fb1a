"""What a caller asks for, and the check that it can be had. No model is touched here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError

MAX_TOP_LOGPROBS = 100


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; by llama.cpp's samplers, in its order: bias, penalties, top_k, top_p, min_p, temperature."""

    temperature: float = 1.0  # 0: always the likeliest
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0  # 1: none; penalties look at the last `penalty_last_n` tokens, -1: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None  # None: another one every time
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> what is added to its logit
    grammar: str | None = None  # GBNF
    json_schema: Mapping[str, Any] | str | None = None
    ignore_eos: bool = False  # goes on to max_tokens

    @property
    def has_penalties(self) -> bool:
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def check(self, n_vocab: int) -> None:
        _in_range("temperature", self.temperature, 0, 100)
        _in_range("top_k", self.top_k, 0, 2**31 - 1, whole=True)
        _in_range("top_p", self.top_p, 0, 1)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("repeat_penalty", self.repeat_penalty, 1e-3, 100)
        _in_range("presence_penalty", self.presence_penalty, -100, 100)
        _in_range("frequency_penalty", self.frequency_penalty, -100, 100)
        _in_range("penalty_last_n", self.penalty_last_n, -1, 2**31 - 1, whole=True)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**64 - 1, whole=True)
        for token, bias in self.logit_bias.items():
            _in_range("a token of logit_bias", token, 0, n_vocab - 1, whole=True)
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                raise RequestError(
                    f"logit_bias of token {token} is {bias!r}: give a number, or -inf to forbid the token"
                )
        if self.grammar is not None and self.json_schema is not None:
            raise RequestError("grammar and json_schema are both given: choose one")


@dataclass(frozen=True)
class Request:
    """`prompt`: token ids, or text (tokenized with the model's special tokens, BOS first where the model wants it)."""

    prompt: str | Sequence[int]
    max_tokens: int | None = None  # None: the engine's default_max_tokens; never more than fits the context
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    logprobs: int | None = None  # log probabilities of the chosen token (0) and of so many of the likeliest
    deadline_s: float | None = None  # seconds from submit() on
    control_tokens: bool = False  # events name control tokens (Token.control); the text never has them

    def check(self, n_vocab: int) -> None:
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"sampling is a {type(self.sampling).__name__}: give a Sampling")
        self.sampling.check(n_vocab)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 2**31 - 1, whole=True)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop={self.stop!r}: give a list of texts that are not empty")
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, min(MAX_TOP_LOGPROBS, n_vocab), whole=True)
        if self.deadline_s is not None:
            _in_range("deadline_s", self.deadline_s, 0, 1e9)


def check_prompt(tokens: Sequence[int], n_vocab: int, n_ctx: int) -> None:
    if len(tokens) == 0:
        raise RequestError("the prompt has no tokens: give at least one")
    if len(tokens) >= n_ctx:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, the context holds {n_ctx} with at least one more: shorten the prompt or "
            "start the engine with a larger n_ctx"
        )
    for token in tokens:
        _in_range("a token of the prompt", token, 0, n_vocab - 1, whole=True)


def _in_range(name: str, value: Any, least: float, most: float, whole: bool = False) -> None:
    is_number = isinstance(value, int) or (not whole and isinstance(value, float))
    if not is_number or isinstance(value, bool) or not least <= value <= most:
        kind = "an integer" if whole else "a number"
        raise RequestError(f"{name} is {value!r}: give {kind} from {least} to {most}")
