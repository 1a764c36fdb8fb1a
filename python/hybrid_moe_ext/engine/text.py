"""Tokens to text: characters that span tokens, stop strings that span tokens. One per request."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextOut:
    """Gives out text as soon as it can be neither half a character nor the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self.stopped: str | None = None  # the stop string that was found; nothing comes after it
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes) -> str:
        self._held += self._decoder.decode(data)
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the first; of those that begin there, the longest
            at, _, self.stopped = min(found)
            text, self._held = self._held[:at], ""
            return text
        n_held = max((overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - n_held], self._held[len(self._held) - n_held :]
        return text

    def flush(self) -> str:
        """All that is held: what comes next is a control token, which no stop string and no character spans."""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        self._decoder.reset()
        return text

    def end(self) -> str:
        """What is left when no more tokens come."""
        if self.stopped is not None:
            return ""
        return self.flush()


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
