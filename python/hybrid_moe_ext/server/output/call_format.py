"""What one format of calls consists of. Each is a file of its own; in which order they are looked for says formats.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .calls import Call, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar


@dataclass(frozen=True)
class CallFormat:
    """`read` takes what a model wrote from the first of `begins` on, and raises NoCall unless all of it is calls of tools that
    were offered. `write` is the grammar's root for one call of one of these tools, or with `many` for one or more."""

    name: str
    is_taught_by: Callable[[str], bool]  # a chat template's text
    begins: tuple[str, ...]
    read: Callable[[Cursor, Tools], list[Call]]
    write: Callable[[Grammar, list[Tool], bool], str]
    marks: tuple[str, ...] = ()  # those besides `begins` that may be control tokens
    ends: tuple[str, str] = ("", "")  # of one call, and behind the last one
    parts: tuple[str, ...] = ()  # control tokens that are a part of a mark only
    ends_reasoning: bool = False  # a call may come without the reasoning's end


def has_all(*marks: str) -> Callable[[str], bool]:
    """Of a template."""
    return lambda template: all(mark in template for mark in marks)


def some(calls: list[str], between: str, many: bool) -> str:
    """One of these rules, or with `many` one or more."""
    one = f"({' | '.join(calls)})"
    return f"{one} ({between} {one})*" if many else one
