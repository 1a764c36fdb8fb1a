"""Tools that a request offers, and calls of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class NoCall(ValueError):
    """The text is no call, or none of an offered tool."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # a JSON object
    id: str | None = None  # the model's own, where its format has them

    def told(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any]  # a JSON schema; empty: none was given

    def parameter(self, name: str) -> Any:
        """Its schema, None when there is none."""
        properties = self.parameters.get("properties")
        return properties.get(name) if isinstance(properties, dict) else None


class Tools:
    """By name, in the order of the request."""

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self.all: dict[str, Tool] = {}
        for function in (tool["function"] for tool in tools):
            given = function.get("parameters")
            self.all[function["name"]] = Tool(function["name"], given if isinstance(given, dict) else {})

    def named(self, name: str) -> Tool:
        """Raises NoCall for a tool that was not offered."""
        if name not in self.all:
            raise NoCall(f"no tool {name!r}")
        return self.all[name]

    def call(self, name: Any, arguments: Any, id: str | None = None) -> Call:
        """Raises NoCall for what cannot be one."""
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NoCall("a call has a name and an object of arguments")
        return Call(self.named(name).name, json.dumps(arguments, ensure_ascii=False), id)
