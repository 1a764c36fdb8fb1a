"""One request inside the engine, from submit() to its end. Only the decode worker changes it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C

from ..errors import DeadlinePassed, EngineError
from ..token_text import piece
from .cache import Sequence
from .context import Tokens
from .metrics import RequestMetrics
from .request import Request
from .sampling import Logits, Sampler, log_probabilities
from .store import Lease
from .stream import Finish, Stream, Token
from .text import TextOut

if TYPE_CHECKING:
    from .mailbox import Job


class Running:
    def __init__(self, request: Request, prompt: Tokens, max_tokens: int, sampler: Sampler, stream: Stream):
        self.stream = stream
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.lane: int | None = None  # the decode worker it is for; None while it waits: whoever has room first
        self.is_assigned = False
        self.sequence: Sequence | None = None
        self.job: Job | None = None  # while the prefill worker has it
        self.lease: Lease | None = None  # what the store has of its prompt, while somebody needs it
        self.is_restoring = False  # from there into the decode context
        self.n_found: tuple[int, int] = (-1, 0)  # while it waits: the store's version, tokens that it had
        self.next_token: int | None = None  # chosen, not computed yet
        self.metrics = RequestMetrics(n_prompt=len(prompt))
        self.submitted_at = time.monotonic()
        self.deadline = math.inf if request.deadline_s is None else self.submitted_at + request.deadline_s
        self._request = request
        self._sampler = sampler
        self._text = TextOut(request.stop)
        self._last_at = 0.0

    @property
    def id(self) -> int:
        return self.stream.id

    @property
    def n_left(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return len(self.prompt) - self.sequence.n if self.sequence else len(self.prompt)

    def admitted(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.metrics.via = "decode"
        self.metrics.n_reused = sequence.n_shared
        self.metrics.queue_s = time.monotonic() - self.submitted_at

    def choose(self, ctx: Any, place: int, logits: Logits, vocab: Any) -> str | None:
        """The next token: it goes to the stream, and is to be computed next. Returns why it was the last one, or None."""
        token = self._sampler.choose(ctx, place, logits)
        now = time.monotonic()
        if self.metrics.ttft_s is None:
            self.metrics.ttft_s = now - self.submitted_at
        else:
            self.metrics.tpot_ms.append((now - self._last_at) * 1e3)
        self._last_at = now
        if C.llama_vocab_is_eog(vocab, token) and not self._request.sampling.ignore_eos:
            return "stop"
        self.metrics.n_generated += 1
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if self._request.logprobs is not None:
            logprob, top = log_probabilities(logits, token, self._request.logprobs)
        data = piece(vocab, token)
        text, control = self._text.add(data), ""
        if self._request.control_tokens and not data and not C.llama_vocab_is_eog(vocab, token):
            text += self._text.flush()
            control = piece(vocab, token, control=True).decode("utf-8", "replace")
        is_last = self._text.stopped is not None or self.metrics.n_generated >= self.max_tokens
        if is_last:
            text += self._text.end()
        self.stream.put(Token(token, text, logprob, top, control))
        self.next_token = token
        if self._text.stopped is not None:
            return "stop"
        return "length" if is_last else None

    # --- ends; the sequence is the worker's to close

    def end(self, reason: str) -> None:
        self._close()
        rest = self._text.end()
        if rest:
            self.stream.put(Token(None, rest))
        self.stream.end(Finish(reason, self._text.stopped, self.metrics))

    def fail(self, error: EngineError) -> None:
        self._close()
        self.stream.fail(error)

    def expire(self) -> None:
        if self.metrics.n_generated:
            self.end("deadline")
        else:
            given = self._request.deadline_s
            self.fail(
                DeadlinePassed(f"no token within the deadline of {given} s: give more time, or try when less is queued")
            )

    def _close(self) -> None:
        self.metrics.total_s = time.monotonic() - self.submitted_at
        self._sampler.free()
