"""A block of calls, each between <invoke name="..."> and its end, its arguments one after the other: MiniMax's and DeepSeek's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .calls import Call, Tool, Tools
from .cursor import Cursor


class Marks(NamedTuple):
    begin: str  # of the block
    end: str
    invoke: str  # up to the name
    invoke_end: str
    parameter: str  # up to the name


def read_invocations(
    cursor: Cursor, tools: Tools, marks: Marks, argument: Callable[[Cursor, Tool], tuple[str, Any]]
) -> list[Call]:
    """`argument` takes one from its name on. Raises NoCall."""
    cursor.expect(marks.begin)
    cursor.space()
    calls = []
    while cursor.take(marks.invoke):
        tool = tools.named(cursor.until('">'))
        arguments = {}
        cursor.space()
        while cursor.take(marks.parameter):
            name, value = argument(cursor, tool)
            arguments[name] = value
            cursor.space()
        cursor.expect(marks.invoke_end)
        cursor.space()
        calls.append(tools.call(tool.name, arguments))
    cursor.expect(marks.end)
    cursor.end()
    return calls
