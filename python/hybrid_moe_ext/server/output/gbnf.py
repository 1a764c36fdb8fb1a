"""Pieces of a grammar that makes a model write a call: GBNF, by rules that may refer to each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ...engine.grammar import schema_grammar
from ...errors import RequestError
from .calls import Tool
from .values import kinds_of

# Strings and classes of characters, or names of rules.
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[A-Za-z][A-Za-z0-9-]*', re.DOTALL)
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


def literal(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c, c) for c in text) + '"'


class Grammar:
    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}

    def text(self, root: str) -> str:
        return "\n".join(f"{name} ::= {rule}" for name, rule in [("root", root), *self._rules.items()])

    def until(self, mark: str) -> str:
        """Any text without `mark`, and then `mark`: an automaton that knows how much of it has been written."""
        if (known := self._names.get(("until", mark))) is None:
            known = self._names["until", mark] = f"u{len(self._names)}"
            for n, rule in enumerate(_automaton(mark, known)):
                self._rules[f"{known}-{n}"] = rule
        return f"{known}-0"

    def value(self, schema: Any) -> str:
        """JSON by a schema. Raises RequestError for one that llama.cpp's converter does not take."""
        try:
            key = ("value", json.dumps(schema, sort_keys=True))
        except (ValueError, RecursionError) as error:
            raise RequestError("json_schema nests too deep") from error
        if (known := self._names.get(key)) is None:
            known = self._names[key] = f"v{len(self._names)}"
            for line in schema_grammar(schema).splitlines():
                name, _, rule = line.partition(" ::= ")
                self._rules[f"{known}-{name}"] = _WORD.sub(
                    lambda found: found[0] if found[0][0] in '"[' else f"{known}-{found[0]}", rule
                )
        return f"{known}-root"

    def arguments(self, tool: Tool) -> str:
        """A JSON object by the tool's schema; without one, the tool has no parameters."""
        schema = tool.parameters or {"type": "object", "properties": {}}
        try:
            return self.value({"type": "object"} | schema)
        except RequestError as error:
            raise RequestError(f"a call of {tool.name!r} cannot be forced: {error}") from error

    def parameters(self, tool: Tool, write: Callable[[str, Any], str]) -> str:
        """Those of a format that has each between marks, in the schema's order. `write`: the rule for one, by name and schema."""
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        needed = required if isinstance(required, list) else []
        rules = []
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            rules.append(f"({write(name, schema)})" + ("" if name in needed else "?"))
        return " ".join(rules)

    def typed(self, tool: Tool, schema: Any, end: str, line: str = "") -> str:
        """A value as values.py reads it, and `end`: text as it is, other things as JSON with `line` behind."""
        kinds = kinds_of(schema, tool.parameters)
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(one, str) and end not in one for one in choices):
            return f"({' | '.join(literal(one) for one in choices)}) {literal(line + end)}"
        if "string" in kinds:
            return self.until(end)
        return self.json(tool, schema, end, line)

    def json(self, tool: Tool, schema: Any, end: str, line: str = "") -> str:
        """One JSON value, and `end`."""
        definitions = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        try:
            return f"{self.value(definitions | schema)} {literal(line + end)}"
        except RequestError:  # a schema that the converter does not take: whatever the model writes
            return self.until(end)


def _automaton(mark: str, name: str) -> list[str]:
    """A rule per character of `mark` that has been written: which one follows each next character."""
    rules = []
    for n in range(len(mark)):
        follows: dict[int, str] = {}
        for c in dict.fromkeys(mark):
            written = mark[:n] + c
            longest = next(k for k in range(len(written), -1, -1) if written.endswith(mark[:k]))
            follows[longest] = follows.get(longest, "") + c
        others = "".join(chars for k, chars in follows.items() if k > 0)
        parts = [f"[^{_class(others)}] {name}-0"]
        for k, chars in follows.items():
            if k == len(mark):
                parts.append(f"[{_class(chars)}]")
            elif k > 0:
                parts.append(f"[{_class(chars)}] {name}-{k}")
        rules.append(" | ".join(parts))
    return rules


def _class(chars: str) -> str:
    return "".join(
        {"]": "\\]", "\\": "\\\\", "\n": "\\n", "[": "\\["}.get(c, f"\\x{ord(c):02x}" if c in "^-" else c)
        for c in chars
    )
