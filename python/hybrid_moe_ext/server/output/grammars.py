"""Grammars that make a model call a tool, or answer in JSON, after it has thought where the prompt lets it."""

from __future__ import annotations

from typing import Any

from . import harmony
from .calls import Tool
from .formats import OutputFormat
from .gbnf import Grammar, literal
from .reader import Thinking

_LINES = " ".join([f"{literal(chr(10))}?"] * 3)  # as templates have them between the reasoning and a call


def of_calls(format: OutputFormat, tools: list[Tool], many: bool, thinking: Thinking) -> str:
    """One call of one of the tools, or with `many` one or more. Raises RequestError for a schema that cannot be made into one."""
    assert format.calls is not None
    grammar = Grammar()
    front = [_thought(grammar, format, thinking), "" if format.is_harmony else _LINES]
    return grammar.text(" ".join([*front, format.calls.write(grammar, tools, many)]))


def of_schema(format: OutputFormat, schema: Any, thinking: Thinking) -> str | None:
    """JSON by a schema behind the reasoning; None where nothing comes before it."""
    grammar = Grammar()
    if format.is_harmony:
        return grammar.text(f"{harmony.thought(grammar)} {harmony.final()} {grammar.value(schema)}")
    if thinking != "open":
        return None
    return grammar.text(f"{_thought(grammar, format, thinking)} {_LINES} {grammar.value(schema)}")


def _thought(grammar: Grammar, format: OutputFormat, thinking: Thinking) -> str:
    if format.is_harmony:
        return harmony.thought(grammar)
    if format.tags is None or thinking == "closed":
        return ""
    rest = grammar.until(format.tags.end)
    return rest if thinking == "open" else f"({_LINES} {literal(format.tags.begin)} {rest})?"
