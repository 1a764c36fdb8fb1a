"""Which tools a request offers, and whether one of them must be called. Raises ApiError for what cannot be had."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .chat import ChatTemplate
from .output.calls import Tool, Tools
from .replies import ApiError
from .schema import ChatBody

_FORCEABLE = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = '"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class Offer:
    given: list[dict[str, Any]] | None = None  # for the template; None: no tools
    tools: Tools | None = None
    forced: tuple[Tool, ...] = ()  # one of them must be called
    is_named: bool = False  # by the request
    many: bool = True  # several calls in one answer


def offer(body: ChatBody, template: ChatTemplate) -> Offer:
    choice = body.tool_choice
    many = body.parallel_tool_calls is not False
    if choice == "none" or (not body.tools and choice in (None, "auto")):
        return Offer()
    if not body.tools:
        raise ApiError(
            400,
            "'tool_choice' is only possible with 'tools': give some, or leave it out",
            "invalid_value",
            "tool_choice",
        )
    tools = _tools(body.tools, template)
    if choice in (None, "auto"):
        return Offer(body.tools, tools, many=many)
    name = _name(choice)
    if name is not None and name not in tools.all:
        raise ApiError(
            400,
            f"'tool_choice' names {name!r}, which is none of 'tools': choose one of these",
            "invalid_value",
            "tool_choice",
        )
    forced = tuple(tool for tool in tools.all.values() if name in (None, tool.name))
    _check_forced(forced, template)
    return Offer(body.tools, tools, forced, name is not None, many and name is None)


def _tools(given: list[dict[str, Any]], template: ChatTemplate) -> Tools:
    if not template.knows_tools:
        raise ApiError(
            400, "this model's chat template has no place for tools: leave them out", "unsupported_parameter", "tools"
        )
    for i, tool in enumerate(given):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ApiError(
                400, f"Invalid value for 'tools.{i}': give a function with a name", "invalid_value", f"tools.{i}"
            )
    return Tools(given)


def _name(choice: Any) -> str | None:
    """Of the tool that must be called; None: any."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, f"'tool_choice' can be {_CHOICES} here", "unsupported_parameter", "tool_choice")
    return name


def _check_forced(tools: tuple[Tool, ...], template: ChatTemplate) -> None:
    if template.format.calls is None:
        raise ApiError(
            400,
            "this server does not know in which format this model calls tools, so that a call cannot be forced: use "
            '"tool_choice": "auto"',
            "unsupported_parameter",
            "tool_choice",
        )
    for tool in tools:
        if not _FORCEABLE.fullmatch(tool.name):
            raise ApiError(
                400,
                f"a call of {tool.name!r} cannot be forced: names have up to 128 letters, digits, '_', '-' and '.'",
                "invalid_value",
                "tool_choice",
            )
