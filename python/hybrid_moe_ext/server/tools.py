"""Tool calls in a model's text, in the format that Qwen's and Hermes' templates teach:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Only what is that from the first mark to the end of the text, and calls tools that were offered, is taken for calls; everything
else stays text, as the model wrote it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"\s*{_BEGIN}(.*?){_END}\s*", re.DOTALL)


def can_parse(template: str) -> bool:
    """Whether a chat template shows this format to its model."""
    return _BEGIN in template and _END in template and bool(re.search(r'\\?"arguments\\?"', template))


class ToolText:
    """Text comes in by pieces; what cannot be a call goes out at once."""

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self._names = {tool["function"]["name"] for tool in tools}
        self._held = ""

    def add(self, text: str) -> str:
        self._held += text
        at = self._held.find(_BEGIN)
        if at < 0:
            at = len(self._held) - _overlap(self._held)
        out, self._held = self._held[:at], self._held[at:]
        return out

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left: text, or calls in OpenAI's shape."""
        held, self._held = self._held, ""
        calls = self._calls(held)
        return ("", calls) if calls else (held, [])

    def _calls(self, text: str) -> list[dict[str, Any]]:
        calls, at = [], 0
        while at < len(text):
            block = _BLOCK.match(text, at)
            call = self._call(block[1]) if block else None
            if block is None or call is None:
                return []
            calls.append(call)
            at = block.end()
        return calls

    def _call(self, block: str) -> dict[str, Any] | None:
        try:
            told = json.loads(block)
        except (ValueError, RecursionError):
            return None
        if not isinstance(told, dict) or set(told) != {"name", "arguments"}:
            return None
        if (
            not isinstance(told["name"], str)
            or told["name"] not in self._names
            or not isinstance(told["arguments"], dict)
        ):
            return None
        function = {"name": told["name"], "arguments": json.dumps(told["arguments"], ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _overlap(text: str) -> int:
    """Characters at the end of the text that a call could begin with."""
    return next((n for n in range(min(len(text), len(_BEGIN) - 1), 0, -1) if text.endswith(_BEGIN[:n])), 0)
