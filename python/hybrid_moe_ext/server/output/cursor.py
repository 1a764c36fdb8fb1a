"""Reading a call's text from left to right: once, without going back, so that hostile text costs no more than its length."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from .calls import NoCall

_SPACE = re.compile(r"\s*")


def refuse(constant: str) -> NoReturn:
    """json.loads takes NaN and Infinity, which JSON does not have."""
    raise NoCall(constant)


_JSON = json.JSONDecoder(parse_constant=refuse)


class Cursor:
    def __init__(self, text: str):
        self._text = text
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def take(self, mark: str) -> bool:
        """Whether it comes next; then it is behind."""
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def expect(self, *marks: str) -> None:
        """In this order, white space before each."""
        for mark in marks:
            self.space()
            if not self.take(mark):
                raise NoCall(f"no {mark!r}")

    def comes(self, mark: str) -> bool:
        """Behind white space."""
        self.space()
        return self._text.startswith(mark, self._at)

    def end(self) -> None:
        """Raises NoCall when more than white space is left."""
        self.space()
        if not self.is_at_end:
            raise NoCall("text behind the calls")

    def before(self, mark: str) -> str:
        """The text before it, which comes next then."""
        text = self.until(mark)
        self._at -= len(mark)
        return text

    def until(self, mark: str) -> str:
        """The text before it; it is behind then."""
        at = self._text.find(mark, self._at)
        if at < 0:
            raise NoCall(f"no {mark!r}")
        text, self._at = self._text[self._at : at], at + len(mark)
        return text

    def json(self) -> Any:
        """The JSON value that comes next. May raise RecursionError."""
        self.space()
        try:
            value, self._at = _JSON.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise NoCall(error.msg) from error
        return value
