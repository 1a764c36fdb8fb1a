"""Calls of Qwen3-Coder, and of Qwen3.5, Nemotron 3 and StepFun 3.5:

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from .call_format import CallFormat, has_all, some
from .calls import Call, NoCall, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal
from .values import typed

_BEGIN, _END, _LINE = "<tool_call>", "</tool_call>", "\n"
_FUNCTION = "<function="


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    """The first mark may be missing, which is a habit of Qwen3-Coder's."""
    calls = []
    while not cursor.is_at_end:
        cursor.space()
        has_begin = cursor.take(_BEGIN)
        cursor.expect(_FUNCTION)
        tool = tools.named(cursor.until(">"))
        arguments = {}
        cursor.space()
        while cursor.take("<parameter="):
            name = cursor.until(">")
            # The line ends next to the marks are theirs; an empty value may have one for both.
            text = cursor.until("</parameter>").removeprefix("\n").removesuffix("\n")
            arguments[name] = typed(text, tool.parameter(name), tool.parameters)
            cursor.space()
        cursor.expect("</function>")
        cursor.space()
        if not cursor.take(_END) and has_begin:
            raise NoCall(f"no {_END!r}")
        cursor.space()
        calls.append(tools.call(tool.name, arguments))
    return calls


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    calls, back = [], literal(f"</function>\n{_END}")
    for tool in tools:

        def parameter(name: str, schema: object, tool: Tool = tool) -> str:
            value = grammar.typed(tool, schema, "</parameter>", _LINE)
            return f"{literal(f'<parameter={name}>' + _LINE)} {value} {literal(_LINE)}"

        front = literal(f"{_BEGIN}\n<function={tool.name}>\n")
        calls.append(f"{front} {grammar.parameters(tool, parameter)} {back}")
    return some(calls, f"{literal(_LINE)}?", many)


FORMAT = CallFormat(
    "Qwen3-Coder",
    has_all(_BEGIN, _FUNCTION, "<parameter="),
    (_BEGIN, _FUNCTION),
    _read,
    _write,
    ends=(_END, ""),
    marks=(_END,),
)
