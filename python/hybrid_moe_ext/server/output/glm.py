"""Calls of GLM-4.5 to 4.7, and of Ling 3, Laguna and Spark 2.5, which differ in where lines end:

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from __future__ import annotations

from .call_format import CallFormat, has_all, some
from .calls import Call, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal
from .values import typed

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    calls = []
    while not cursor.is_at_end:
        cursor.expect(_BEGIN)
        tool = tools.named(cursor.before("<").strip())
        arguments = {}
        while cursor.take(_KEY[0]):
            name = cursor.until(_KEY[1])
            cursor.expect(_VALUE[0])
            arguments[name] = typed(cursor.until(_VALUE[1]), tool.parameter(name), tool.parameters)
            cursor.space()
        cursor.expect(_END)
        cursor.space()
        calls.append(tools.call(tool.name, arguments))
    return calls


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    line = f"{literal(chr(10))}?"  # some of these models write it, some do not
    calls = []
    for tool in tools:

        def parameter(name: str, schema: object, tool: Tool = tool) -> str:
            value = grammar.typed(tool, schema, _VALUE[1])
            return f"{literal(_KEY[0] + name + _KEY[1])} {line} {literal(_VALUE[0])} {value} {line}"

        calls.append(
            f"{literal(_BEGIN + tool.name)} {line} {grammar.parameters(tool, parameter)} {line} {literal(_END)}"
        )
    return some(calls, line, many)


FORMAT = CallFormat(
    "GLM",
    has_all(_BEGIN, _END, *_KEY, *_VALUE),
    (_BEGIN,),
    _read,
    _write,
    ends=(_END, ""),
    marks=(_END, *_KEY, *_VALUE),
)
