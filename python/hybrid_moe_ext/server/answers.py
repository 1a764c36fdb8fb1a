"""The engine's tokens in OpenAI's shapes: whole answers and the chunks of a stream, of chats and of plain completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from .. import __version__
from ..engine import Engine, Finish, Token
from .output.calls import Call
from .output.reader import Piece, Reader
from .tool_choice import Offer

FINGERPRINT = f"hybrid-moe-ext-{__version__}"


def usage(finish: Finish) -> dict[str, Any]:
    m = finish.metrics
    return {
        "prompt_tokens": m.n_prompt,
        "completion_tokens": m.n_generated,
        "total_tokens": m.n_prompt + m.n_generated,
        "prompt_tokens_details": {"cached_tokens": m.n_reused},
    }


class Shape:
    """Of one answer. `wants_logprobs`: they were asked for."""

    object = ""
    chunk_object = ""
    prefix = ""

    def __init__(self, model: str, engine: Engine, wants_logprobs: bool):
        self._engine = engine
        self._wants_logprobs = wants_logprobs
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, events: list[Token], finish: Finish) -> dict[str, Any]:
        told = self._choice(events, finish)
        choice = {"index": 0} | told | {"logprobs": self._logprobs(events)}
        return self._head | {"object": self.object, "choices": [choice], "usage": usage(finish)}

    def first(self) -> dict[str, Any] | None:
        """The chunk before any text."""
        return None

    def chunks(self, event: Token) -> list[dict[str, Any]]:
        """Empty: there is nothing to say."""
        deltas = self._deltas(event)
        if not deltas and event.logprob is not None:
            deltas = [self._silence()]
        told = self._logprobs([event])
        return [self._chunk(delta, told if i == 0 else self._logprobs([])) for i, delta in enumerate(deltas)]

    def last(self, finish: Finish) -> list[dict[str, Any]]:
        return [self._chunk(self._silence(), reason=finish.reason)]

    def usage_chunk(self, finish: Finish) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object, "choices": [], "usage": usage(finish)}

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0} | delta | {"logprobs": logprobs, "finish_reason": reason}
        return self._head | {"object": self.chunk_object, "choices": [choice]}

    def _logprobs(self, events: list[Token]) -> dict[str, Any] | None:
        told = [event for event in events if event.logprob is not None]
        return self._logprobs_of(told) if self._wants_logprobs else None

    def _choice(self, events: list[Token], finish: Finish) -> dict[str, Any]:
        """Of a whole answer, `finish_reason` too."""
        raise NotImplementedError

    def _deltas(self, event: Token) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _silence(self) -> dict[str, Any]:
        """A delta without text."""
        raise NotImplementedError

    def _logprobs_of(self, events: list[Token]) -> dict[str, Any]:
        raise NotImplementedError


class ChatShape(Shape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: str, engine: Engine, wants_logprobs: bool, reader: Reader | None, offer: Offer):
        super().__init__(model, engine, wants_logprobs)
        self._reader = reader  # None: the text is the content
        self._offer = offer

    def first(self) -> dict[str, Any]:
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def last(self, finish: Finish) -> list[dict[str, Any]]:
        pieces, calls = self._end()
        deltas = [_delta(piece) for piece in pieces]
        if calls:
            deltas.append({"delta": {"tool_calls": [{"index": i} | call.told() for i, call in enumerate(calls)]}})
        reason = self._reason(finish, calls)
        return [*(self._chunk(delta) for delta in deltas), self._chunk(self._silence(), reason=reason)]

    def _choice(self, events: list[Token], finish: Finish) -> dict[str, Any]:
        pieces = [piece for event in events for piece in self._pieces(event)]
        rest, calls = self._end()
        pieces += rest
        content = "".join(piece.text for piece in pieces if not piece.is_reasoning)
        reasoning = "".join(piece.text for piece in pieces if piece.is_reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": content or None, "tool_calls": [call.told() for call in calls]}
        return {"message": message, "finish_reason": self._reason(finish, calls)}

    def _deltas(self, event: Token) -> list[dict[str, Any]]:
        return [_delta(piece) for piece in self._pieces(event)]

    def _silence(self) -> dict[str, Any]:
        return {"delta": {}}

    def _pieces(self, event: Token) -> list[Piece]:
        if self._reader is not None:
            return self._reader.add(event.text, event.control)
        return [Piece(event.text)] if event.text else []

    def _end(self) -> tuple[list[Piece], list[Call]]:
        pieces, calls = self._reader.end() if self._reader is not None else ([], [])
        return pieces, calls if self._offer.many else calls[:1]

    def _reason(self, finish: Finish, calls: list[Call]) -> str:
        """As at OpenAI: a call of the tool that the request named is an ordinary end."""
        if not calls or (self._offer.forced and finish.reason == "length"):
            return finish.reason
        return "stop" if self._offer.is_named else "tool_calls"

    def _logprobs_of(self, events: list[Token]) -> dict[str, Any]:
        content = []
        for event in events:
            top = [self._token(token, logprob) for token, logprob in event.top_logprobs]
            content.append(self._token(event.token, event.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int | None, logprob: float | None) -> dict[str, Any]:
        data = b"" if token is None else self._engine.detokenize([token])
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class TextShape(Shape):
    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, engine: Engine, wants_logprobs: bool):
        super().__init__(model, engine, wants_logprobs)
        self._offset = 0  # characters before the next token

    def _choice(self, events: list[Token], finish: Finish) -> dict[str, Any]:
        return {"text": "".join(event.text for event in events), "finish_reason": finish.reason}

    def _deltas(self, event: Token) -> list[dict[str, Any]]:
        return [{"text": event.text}] if event.text else []

    def _silence(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs_of(self, events: list[Token]) -> dict[str, Any]:
        texts = [self._text(event.token) for event in events]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [event.logprob for event in events],
            "top_logprobs": [{self._text(token): logprob for token, logprob in event.top_logprobs} for event in events],
            "text_offset": offsets,
        }

    def _text(self, token: int | None) -> str:
        return "" if token is None else self._engine.detokenize([token]).decode("utf-8", "replace")


def _delta(piece: Piece) -> dict[str, Any]:
    return {"delta": {"reasoning_content" if piece.is_reasoning else "content": piece.text}}
