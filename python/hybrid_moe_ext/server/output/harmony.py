"""gpt-oss's messages, each for a channel; the prompt ends behind the first <|start|>assistant:

    <|channel|>analysis<|message|>The weather is wanted.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

`analysis` is reasoning, what is addressed to a function a call, and everything else content. llama.cpp ends a text at
<|call|> and <|return|>, which are not in it then."""

from __future__ import annotations

import re

from ...engine.text import overlap
from .call_format import CallFormat, has_all, some
from .calls import Call, NoCall, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal
from .reader import Piece

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MOST_HEADER = 400  # characters
_STARTS = (_START, _CHANNEL, "assistant", "to=")  # of headers, behind white space
_TO_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


def _is_header(text: str) -> bool:
    text = text.lstrip()
    return not text or (len(text) <= _MOST_HEADER and text.startswith(_STARTS))


def _may_become_header(text: str) -> bool:
    """With its <|message|>."""
    text = text.lstrip()
    is_begun = text.startswith(_STARTS) and len(text) < _MOST_HEADER + len(_MESSAGE)
    return is_begun or any(start.startswith(text) for start in (*_STARTS, _MESSAGE))


class HarmonyReader:
    """`tools` None: no calls are looked for. Not `apart`: everything but calls is content, as it was written."""

    def __init__(self, tools: Tools | None, apart: bool):
        self._tools, self._apart = tools, apart
        self._header: str | None = ""  # what has come of it; None: its message has begun
        self._held = ""  # of the message, what may become a mark
        self._call: list[str] | None = None  # the message from its header on, when it is for a function
        self._is_reasoning = False
        self._n_messages = 0
        self._said_in: dict[bool, int] = {}  # reasoning or not -> the message that had some last
        self._calls: list[Call] = []

    def add(self, text: str, control: str = "") -> list[Piece]:
        out = self._feed(text)
        if control in (_START, _CHANNEL, _MESSAGE, _CONSTRAIN):
            out += self._feed(control)
        elif control in _ENDS and self._header is None:
            out += self._say_held() + self._end_message()
        return out

    def end(self) -> tuple[list[Piece], list[Call]]:
        out: list[Piece] = []
        if self._header is not None:
            # A header without its message says nothing; what only looked like one does.
            text = self._header
            if not self._apart or not text.lstrip().startswith((_START, _CHANNEL)):
                out += self._begin_message("") + self._say(text)
        else:
            out += self._say_held() + self._end_message()
        return out, self._calls

    def _feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        while text:
            if self._header is not None:
                text, self._header = self._header + text, None
                header, mark, rest = text.partition(_MESSAGE)
                if mark and _is_header(header):
                    text = rest
                    out += self._begin_message(header + mark)
                elif not mark and _may_become_header(header):
                    self._header = text
                    return out
                else:
                    out += self._begin_message("")
            text, self._held = self._held + text, ""
            found = [(at, mark) for mark in _ENDS if (at := text.find(mark)) >= 0]
            if not found:
                n = max(overlap(text, mark) for mark in _ENDS)
                self._held = text[len(text) - n :]
                return out + self._say(text[: len(text) - n])
            at, mark = min(found)
            out += self._say(text[:at]) + self._end_message(mark)
            text = text[at + len(mark) :]
        return out

    def _begin_message(self, header: str) -> list[Piece]:
        self._n_messages += 1
        self._header = None
        self._is_reasoning = self._apart and "analysis" in header and "to=" not in header
        if self._tools is not None and _TO_FUNCTION.search(header):
            self._call = [header]
            return []
        # What goes to tools that nobody offered is shown with its address.
        return self._say(header) if header and ("to=" in header or not self._apart) else []

    def _say_held(self) -> list[Piece]:
        text, self._held = self._held, ""
        return self._say(text)

    def _say(self, text: str) -> list[Piece]:
        if self._call is not None:
            self._call.append(text)
            return []
        if not text:
            return []
        before = self._said_in.get(self._is_reasoning, self._n_messages)
        self._said_in[self._is_reasoning] = self._n_messages
        between = "\n\n" if self._apart and before != self._n_messages else ""
        return [Piece(between + text, self._is_reasoning)]

    def _end_message(self, mark: str = "") -> list[Piece]:
        """`mark`: its end, where that came as text."""
        out: list[Piece] = []
        if self._call is not None:
            message, self._call = "".join(self._call), None
            assert self._tools is not None
            try:
                self._calls += _read(Cursor(message), self._tools)
            except (ValueError, RecursionError):  # NoCall, or numbers that Python does not take
                out += self._say(message + mark)
        elif not self._apart:
            out += self._say(mark)
        self._header, self._is_reasoning = "", False
        return out


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    """One message."""
    address = _TO_FUNCTION.search(cursor.until(_MESSAGE))
    if address is None:
        raise NoCall("for no function")
    arguments = cursor.json()
    cursor.end()
    return [tools.call(address[1], arguments)]


def thought(grammar: Grammar) -> str:
    """The rule for reasoning in front, which may be left out."""
    return f"({literal(f'{_CHANNEL}analysis{_MESSAGE}')} {grammar.until(_ENDS[0])} {literal(f'{_START}assistant')})?"


def final() -> str:
    """The rule for the header of an answer in JSON."""
    return f"{literal(f'{_CHANNEL}final')} {literal(f' {_CONSTRAIN}json')}? {literal(_MESSAGE)}"


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    """Never many: a text ends with the first."""
    calls = []
    for tool in tools:
        to = literal(f" to=functions.{tool.name}")
        channel = literal(f"{_CHANNEL}commentary")
        kind = f"{literal(' ')} {literal(_CONSTRAIN)}? {literal('json' + _MESSAGE)}"
        # The model writes the first, its template shows the second.
        calls.append(f"({channel} {to} | {to} {channel}) {kind} {grammar.arguments(tool)}")
    return some(calls, "", many=False)


FORMAT = CallFormat(
    "harmony",
    has_all(_START, _CHANNEL, _MESSAGE, "analysis", "final"),
    (_CHANNEL, _START),
    _read,
    _write,
    marks=(_MESSAGE, _CONSTRAIN, *_ENDS),
)
