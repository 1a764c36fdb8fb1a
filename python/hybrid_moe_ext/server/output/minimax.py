"""Calls of MiniMax-M2:

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from typing import Any

from .call_format import CallFormat, has_all, some
from .calls import Call, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal
from .invocations import Marks, read_invocations
from .values import typed

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"


def _argument(cursor: Cursor, tool: Tool) -> tuple[str, Any]:
    name = cursor.until('">')
    return name, typed(cursor.until(_PARAMETER_END), tool.parameter(name), tool.parameters)


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    return read_invocations(cursor, tools, Marks(_BEGIN, _END, _INVOKE, _INVOKE_END, _PARAMETER), _argument)


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    calls, back, line = [], literal(f"{_INVOKE_END}\n"), literal("\n")
    for tool in tools:

        def parameter(name: str, schema: object, tool: Tool = tool) -> str:
            front = literal(f'{_PARAMETER}{name}">')
            return f"{front} {grammar.typed(tool, schema, _PARAMETER_END)} {line}"

        front = literal(f'{_INVOKE}{tool.name}">\n')
        calls.append(f"{front} {grammar.parameters(tool, parameter)} {back}")
    front = literal(f"{_BEGIN}\n")
    return f"{front} {some(calls, '', many)} {literal(_END)}"


FORMAT = CallFormat(
    "MiniMax-M2", has_all(_BEGIN, _END, _INVOKE), (_BEGIN,), _read, _write, ends=(_INVOKE_END, _END), marks=(_END,)
)
