"""The engine's tokens in OpenAI's shapes: whole answers and the chunks of a stream, of chats and of plain completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

from .. import __version__
from ..engine import Engine, Finish, Token
from .tools import ToolText

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

    def whole(self, text: str, events: list[Token], finish: Finish) -> dict[str, Any]:
        choice = self._choice(text) | {"logprobs": self._logprobs(events), "finish_reason": finish.reason}
        return self._head | {"object": self.object, "choices": [choice], "usage": usage(finish)}

    def first(self) -> dict[str, Any] | None:
        """The chunk before any text."""
        return None

    def chunk(self, event: Token) -> dict[str, Any] | None:
        """None: there is nothing to say."""
        if not event.text and event.logprob is None:
            return None
        return self._chunk(self._delta(event.text) | {"logprobs": self._logprobs([event]), "finish_reason": None})

    def last(self, finish: Finish) -> list[dict[str, Any]]:
        return [self._chunk(self._end() | {"logprobs": None, "finish_reason": finish.reason})]

    def usage_chunk(self, finish: Finish) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object, "choices": [], "usage": usage(finish)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object, "choices": [choice]}

    def _logprobs(self, events: list[Token]) -> dict[str, Any] | None:
        told = [event for event in events if event.logprob is not None]
        return self._logprobs_of(told) if self._wants_logprobs else None

    def _choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _end(self) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs_of(self, events: list[Token]) -> dict[str, Any]:
        raise NotImplementedError


class ChatShape(Shape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: str, engine: Engine, wants_logprobs: bool, tools: ToolText | None = None):
        super().__init__(model, engine, wants_logprobs)
        self._tools = tools  # None: no call is looked for

    def whole(self, text: str, events: list[Token], finish: Finish) -> dict[str, Any]:
        answer = super().whole(text, events, finish)
        if self._tools is not None:
            said = self._tools.add(text)
            _, calls = self._tools.end()
            if calls:
                choice = answer["choices"][0]
                choice["message"] |= {"content": said.strip() or None, "tool_calls": calls}
                choice["finish_reason"] = "tool_calls"
        return answer

    def chunk(self, event: Token) -> dict[str, Any] | None:
        if self._tools is not None:
            event = replace(event, text=self._tools.add(event.text))
        return super().chunk(event)

    def last(self, finish: Finish) -> list[dict[str, Any]]:
        chunks = super().last(finish)
        rest, calls = self._tools.end() if self._tools is not None else ("", [])
        if calls:
            numbered = [{"index": i} | call for i, call in enumerate(calls)]
            chunks.insert(
                0, self._chunk({"index": 0, "delta": {"tool_calls": numbered}, "logprobs": None, "finish_reason": None})
            )
            chunks[-1]["choices"][0]["finish_reason"] = "tool_calls"
        elif rest:
            chunks.insert(0, self._chunk(self._delta(rest) | {"logprobs": None, "finish_reason": None}))
        return chunks

    def first(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text}}

    def _end(self) -> dict[str, Any]:
        return {"index": 0, "delta": {}}

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

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text}

    _delta = _choice

    def _end(self) -> dict[str, Any]:
        return {"index": 0, "text": ""}

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
