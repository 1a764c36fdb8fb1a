"""Calls of Kimi K2. A call's id is the model's, which its templates want back:

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from .call_format import CallFormat, has_all, some
from .calls import Call, NoCall, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal

_ALL_BEGIN, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+):\d{1,9}", re.DOTALL)


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    calls: dict[str, Call] = {}
    cursor.expect(_ALL_BEGIN)
    cursor.space()
    while cursor.take(_BEGIN):
        told = cursor.until(_ARGUMENTS).strip()
        id = _ID.fullmatch(told)
        arguments = cursor.json()
        cursor.expect(_END)
        cursor.space()
        if id is None or told in calls:
            raise NoCall(f"{told!r} is no id of a call, or that of two")
        calls[told] = tools.call(id[1], arguments, told)
    cursor.expect(_ALL_END)
    cursor.end()
    return list(calls.values())


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    """Their numbers go on from the conversation's, which only the model knows."""
    calls = []
    for tool in tools:
        front = literal(f"{_BEGIN}functions.{tool.name}:")
        calls.append(f"{front} [0-9] [0-9]? {literal(_ARGUMENTS)} {grammar.arguments(tool)} {literal(_END)}")
    return f"{literal(_ALL_BEGIN)} {some(calls, '', many)} {literal(_ALL_END)}"


FORMAT = CallFormat(
    "Kimi K2",
    has_all(_ALL_BEGIN, _BEGIN, _ARGUMENTS),
    (_ALL_BEGIN,),
    _read,
    _write,
    ends=(_END, _ALL_END),
    marks=(_ALL_END, _BEGIN, _ARGUMENTS, _END),
    ends_reasoning=True,
)
