"""Calls of DeepSeek V3.2 and V4, whose blocks have different names:

<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .call_format import CallFormat, some
from .calls import Call, NoCall, Tool, Tools
from .cursor import Cursor, refuse
from .gbnf import Grammar, literal
from .invocations import Marks, read_invocations
from .values import kinds_of

_DSML = "｜DSML｜"
_INVOKE, _INVOKE_END = f'<{_DSML}invoke name="', f"</{_DSML}invoke>"
_PARAMETER, _PARAMETER_END = f'<{_DSML}parameter name="', f"</{_DSML}parameter>"


def _format(name: str, block: str) -> CallFormat:
    begin, end = f"<{_DSML}{block}>", f"</{_DSML}{block}>"

    def is_taught_by(template: str) -> bool:
        """Templates put the marks together from a variable."""
        return _DSML in template and f"{block}>" in template and 'invoke name="' in template

    def read(cursor: Cursor, tools: Tools) -> list[Call]:
        return read_invocations(cursor, tools, Marks(begin, end, _INVOKE, _INVOKE_END, _PARAMETER), _argument)

    return CallFormat(name, is_taught_by, (begin,), read, _writer(begin, end), ends=(_INVOKE_END, end), parts=(_DSML,))


def _argument(cursor: Cursor, tool: Tool) -> tuple[str, Any]:
    name = cursor.until('" string="')
    kind, text = cursor.until('">'), cursor.until(_PARAMETER_END)
    if kind not in ("true", "false"):
        raise NoCall(f"string={kind!r}")
    return name, text if kind == "true" else json.loads(text, parse_constant=refuse)


def _writer(begin: str, end: str) -> Callable[[Grammar, list[Tool], bool], str]:
    def write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
        # V4 leaves a line free where there are no parameters.
        calls, back = [], f"{literal(chr(10))}? {literal(_INVOKE_END + chr(10))}"
        for tool in tools:

            def parameter(name: str, schema: object, tool: Tool = tool) -> str:
                return _parameter(grammar, tool, name, schema)

            front = literal(f'{_INVOKE}{tool.name}">\n')
            calls.append(f"{front} {grammar.parameters(tool, parameter)} {back}")
        front = literal(f"{begin}\n")
        return f"{front} {some(calls, '', many)} {literal(end)}"

    return write


def _parameter(grammar: Grammar, tool: Tool, name: str, schema: object) -> str:
    front, back = literal(f'{_PARAMETER}{name}" string="'), literal("\n")
    kinds = kinds_of(schema, tool.parameters)
    ways = []
    if "string" in kinds:
        text = grammar.typed(tool, schema if kinds == {"string"} else None, _PARAMETER_END)
        ways.append(literal('true">') + " " + text)
    if kinds != {"string"}:
        others: object = {"type": sorted(kinds - {"string"})} if "string" in kinds else schema
        ways.append(literal('false">') + " " + grammar.json(tool, others, _PARAMETER_END))
    return f"{front} ({' | '.join(ways)}) {back}"


V3_2 = _format("DeepSeek V3.2", "function_calls")
V4 = _format("DeepSeek V4", "tool_calls")
