"""Calls of DeepSeek V3.1, and of V3 and R1 before it:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from .call_format import CallFormat, has_all, some
from .calls import Call, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _LINE = "```", literal("\n")


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    """Of both ways. The last mark may be missing: R1's distilled models leave it out."""
    calls = []
    cursor.expect(_ALL_BEGIN)
    cursor.space()
    while cursor.take(_BEGIN):
        name = cursor.until(_SEPARATOR).strip()
        if name == "function" and not (name in tools.all and cursor.comes("{")):
            name = cursor.until(_FENCE + "json").strip()
            arguments = cursor.json()
            cursor.expect(_FENCE)
        else:
            arguments = cursor.json()
        cursor.expect(_END)
        cursor.space()
        calls.append(tools.call(name, arguments))
    cursor.take(_ALL_END)
    cursor.end()
    return calls


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    calls = [f"{literal(_BEGIN + tool.name + _SEPARATOR)} {grammar.arguments(tool)} {literal(_END)}" for tool in tools]
    return f"{literal(_ALL_BEGIN)} {some(calls, '', many)} {literal(_ALL_END)}"


def _write_fenced(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    calls, back = [], literal(f"\n{_FENCE}{_END}")
    for tool in tools:
        front = literal(f"{_BEGIN}function{_SEPARATOR}{tool.name}\n{_FENCE}json\n")
        calls.append(f"{front} {grammar.arguments(tool)} {back}")
    return f"{literal(_ALL_BEGIN)} {some(calls, _LINE, many)} {literal(_ALL_END)}"


_is_either = has_all(_ALL_BEGIN, _BEGIN, _SEPARATOR)
_MARKS = (_ALL_END, _BEGIN, _SEPARATOR, _END)

V3_1 = CallFormat(
    "DeepSeek V3.1",
    lambda template: _is_either(template) and _FENCE + "json" not in template,
    (_ALL_BEGIN,),
    _read,
    _write,
    ends=(_END, _ALL_END),
    marks=_MARKS,
)
V3 = CallFormat(
    "DeepSeek V3",
    lambda template: _is_either(template) and _FENCE + "json" in template,
    (_ALL_BEGIN,),
    _read,
    _write_fenced,
    ends=(_END, _ALL_END),
    marks=_MARKS,
)
