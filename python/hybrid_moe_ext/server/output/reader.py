"""A model's text as it comes, to reasoning, content and calls: of models that put their reasoning between tags.

Text goes out as soon as it can be no part of a mark. From the first mark of a call on everything is held: at the end all of it is
calls of offered tools, or it is text."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from ...engine.text import overlap
from .call_format import CallFormat
from .calls import Call, Tools
from .cursor import Cursor

_MOST_SPACE = 64  # characters of white space that are held

# Whether an answer begins inside the reasoning, behind it, or the model is free to reason.
Thinking = Literal["open", "closed", "free"]


class Piece(NamedTuple):
    text: str
    is_reasoning: bool = False


class Tags(NamedTuple):
    begin: str
    end: str


class Reader(Protocol):
    def add(self, text: str, control: str = "") -> list[Piece]:
        """What goes out now. `control`: a control token behind the text; those that are no marks are not shown."""

    def end(self) -> tuple[list[Piece], list[Call]]:
        """What is left."""


class Trimmed:
    """Text between marks, without the white space next to them: it is theirs."""

    def __init__(self, is_reasoning: bool, drops_first: bool, holds_last: bool):
        self.drops_first = drops_first
        self._is_reasoning = is_reasoning
        self._holds_last = holds_last
        self._has_begun = False
        self._space = ""

    def add(self, text: str) -> list[Piece]:
        text, self._space = self._space + text, ""
        if not self._has_begun and self.drops_first:
            text = text.lstrip()
        if not text:
            return []
        if self._holds_last or not self._has_begun:
            said = text.rstrip()
            if len(text) - len(said) <= _MOST_SPACE:
                text, self._space = said, text[len(said) :]
        self._has_begun = self._has_begun or bool(text)
        return [Piece(text, self._is_reasoning)] if text else []

    def end(self, before_mark: bool) -> list[Piece]:
        text, self._space = self._space, ""
        return [] if before_mark or not text else [Piece(text, self._is_reasoning)]


class TaggedReader:
    def __init__(
        self,
        tags: Tags | None,
        calls: CallFormat | None,
        tools: Tools | None,
        thinking: Thinking,
        apart: bool,
        is_forced: bool,
    ):
        self._tags, self._calls, self._tools, self._apart, self._is_forced = tags, calls, tools, apart, is_forced
        self._state = "reasoning" if thinking == "open" and tags else "start"
        self._held = ""  # what may become a mark
        self._block: list[tuple[str, bool]] = []  # from a call's first mark on; True: a control token
        self._is_early = False  # that mark stands in the reasoning
        self._may_be_early = calls is not None and calls.ends_reasoning
        self._known = {*(tags or ()), *((*calls.begins, *calls.marks, *calls.parts) if calls is not None else ())}
        self._parts: set[str] = set()  # control tokens that are parts of marks, and have come
        self._reasoning = Trimmed(True, drops_first=True, holds_last=True)
        self._content = Trimmed(False, drops_first=apart and thinking == "closed", holds_last=calls is not None)

    def add(self, text: str, control: str = "") -> list[Piece]:
        out = self._feed(text) if text else []
        if not control:
            return out
        if self._state == "calls":
            if control in self._known:
                self._block.append((control, True))
        elif self._calls is not None and control in self._calls.parts:
            self._parts.add(control)
            out += self._feed(control)
        elif control in self._marks():
            if self._state != "start" or self._held.strip() or not self._apart:
                out += self._say(self._held)
            self._held = ""
            out += self._pass(control, is_control=True)
        return out

    def end(self) -> tuple[list[Piece], list[Call]]:
        out: list[Piece] = []
        while self._state == "calls":
            if calls := self._read():
                return [*out, *self._content.end(before_mark=True)], calls
            block, self._block = self._block, []
            if self._is_early:  # the reasoning went on; real calls may follow its end
                self._state, self._may_be_early, self._is_early = "reasoning", False, False
                for text, is_control in block:
                    out += self.add("", text) if is_control else self._feed(text)
            else:
                self._state = "content"
                out += self._say("".join(text for text, is_control in block if not is_control))
        out += self._say(self._held)
        self._held = ""
        return [*out, *self._reasoning.end(self._state != "reasoning"), *self._content.end(before_mark=False)], []

    # --- marks

    def _marks(self) -> tuple[str, ...]:
        """Those that mean something here."""
        begins = self._calls.begins if self._calls is not None else ()
        if self._tags is not None and self._state == "reasoning":
            return (self._tags.end, *begins) if self._may_be_early else (self._tags.end,)
        return (self._tags.begin, *begins) if self._tags is not None and self._state == "start" else begins

    def _feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        while text:
            if self._state == "calls":
                self._block.append((text, False))
                return out
            text, self._held = self._held + text, ""
            if self._state == "start" and self._tags is not None:
                begin, first = self._tags.begin, text.lstrip()
                if first != begin and begin.startswith(first) and len(text) <= _MOST_SPACE:
                    self._held = text
                    return out
                if first.startswith(begin):
                    if not self._apart:
                        out.append(Piece(text[: len(text) - len(first)]))
                    out += self._pass(begin)
                    text = first[len(begin) :]
                    continue
            if self._state == "start":
                self._state = "content"
            found = [(at, mark) for mark in self._marks() if (at := text.find(mark)) >= 0]
            if not found:
                n = max((overlap(text, mark) for mark in self._marks()), default=0)
                self._held = text[len(text) - n :]
                return out + self._say(text[: len(text) - n])
            at, mark = min(found)
            out += self._say(text[:at]) + self._pass(mark)
            text = text[at + len(mark) :]
        return out

    def _pass(self, mark: str, is_control: bool = False) -> list[Piece]:
        """To the state behind a mark."""
        shown = [] if self._apart or is_control else [Piece(mark)]
        if self._tags is not None and mark == self._tags.begin:
            self._state = "reasoning"
            return shown
        if self._tags is not None and mark == self._tags.end:
            self._state = "content"
            self._content.drops_first = self._apart
            return [*self._reasoning.end(before_mark=True), *shown] if self._apart else shown
        self._is_early = self._state == "reasoning"
        self._state = "calls"
        self._block.append((mark, is_control))
        return []

    # --- text

    def _say(self, text: str) -> list[Piece]:
        for part in self._parts:
            text = text.replace(part, "")
        if not text:
            return []
        if self._state == "reasoning":
            return self._reasoning.add(text) if self._apart else [Piece(text)]
        if self._state == "start":
            self._state = "content"
        return self._content.add(text)

    def _read(self) -> list[Call]:
        assert self._calls is not None
        text, (end, all_end) = "".join(text for text, _ in self._block), self._calls.ends
        calls = self._read_all(text)
        if not calls and self._is_forced and (at := text.rfind(end)) >= 0:
            return self._read_all(text[: at + len(end)] + all_end)
        return calls

    def _read_all(self, text: str) -> list[Call]:
        assert self._calls is not None and self._tools is not None
        try:
            return self._calls.read(Cursor(text), self._tools)
        except (ValueError, RecursionError):  # NoCall, or numbers that Python does not take
            return []
