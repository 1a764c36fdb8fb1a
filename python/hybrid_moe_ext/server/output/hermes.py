"""Calls of Hermes' and Qwen's models, and of many that were made after them:

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import re

from .call_format import CallFormat, some
from .calls import Call, NoCall, Tool, Tools
from .cursor import Cursor
from .gbnf import Grammar, literal

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _is_taught_by(template: str) -> bool:
    """Others have <tool_calls>[...], or another kind of text between these marks."""
    has_marks = _BEGIN in template and _END in template and "<tool_calls>" not in template
    return has_marks and bool(re.search(r'\\?"arguments\\?"', template))


def _read(cursor: Cursor, tools: Tools) -> list[Call]:
    calls = []
    while not cursor.is_at_end:
        cursor.expect(_BEGIN)
        told = cursor.json()
        cursor.expect(_END)
        cursor.space()
        if not isinstance(told, dict) or set(told) != {"name", "arguments"}:
            raise NoCall("a call has a name and arguments, nothing else")
        calls.append(tools.call(told["name"], told["arguments"]))
    return calls


def _write(grammar: Grammar, tools: list[Tool], many: bool) -> str:
    calls = []
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)
        front = literal(f'{_BEGIN}\n{{"name": {name}, "arguments": ')
        back = literal("}\n" + _END)
        calls.append(f"{front} {grammar.arguments(tool)} {back}")
    return some(calls, literal("\n"), many)


FORMAT = CallFormat("Hermes", _is_taught_by, (_BEGIN,), _read, _write, ends=(_END, ""), marks=(_END,))
