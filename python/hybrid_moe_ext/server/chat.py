"""Messages to a prompt, by the model's own chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ..engine import Engine
from .output.formats import OutputFormat, format_of
from .replies import ApiError
from .schema import ChatBody, Message
from .template import Template

# gpt-oss's name for the reasoning of an earlier answer.
_READS_THINKING = re.compile(r"""message(\.thinking\b|\[["']thinking["']\])""")


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: list[int]


class ChatTemplate:
    def __init__(self, engine: Engine):
        self._engine = engine
        llm = engine.llama
        self.source: str = llm.metadata.get("tokenizer.chat_template", "")
        self._bos, eos = (llm._model.token_get_text(t) if t >= 0 else "" for t in (llm.token_bos(), llm.token_eos()))
        self._error = "this model has no chat template: use /v1/completions"
        self._template: Template | None = None
        if self.source:
            try:
                self._template = Template(self.source, self._bos, eos)
            except Exception as error:  # jinja2's, for what is no template
                self._error = f"this model's chat template cannot be read ({error}): use /v1/completions"
        self.knows_tools = bool(re.search(r"\btools\b", self.source))
        self.format: OutputFormat = format_of(self.source)
        self._reads_thinking = bool(_READS_THINKING.search(self.source))
        self._parses_arguments = self._template is not None and wants_parsed_arguments(self._template)
        self._completes_tools = self._template is not None and wants_complete_tools(self._template)

    def render(self, body: ChatBody, tools: list[dict[str, Any]] | None) -> Prompt:
        """Raises ApiError."""
        if self._template is None:
            raise ApiError(400, self._error, "no_chat_template")
        more = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            more["reasoning_effort"] = body.reasoning_effort
        messages = [self._plain(message, f"messages.{i}") for i, message in enumerate(body.messages)]
        if tools is not None and self._completes_tools:
            tools = [complete_tool(tool) for tool in tools]
        try:
            text = self._template.render(messages, tools, more)
        except Exception as error:
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", "chat_template", "messages"
            ) from error
        add_bos = False if self._bos and text.startswith(self._bos) else None
        return Prompt(text, self._engine.tokenize(text, add_bos))

    def _plain(self, message: Message, param: str) -> dict[str, Any]:
        plain = message.model_dump(exclude_none=True)
        plain["content"] = _text(message, param)
        if message.role == "developer" and "developer" not in self.source:
            plain["role"] = "system"
        if message.tool_calls and self._parses_arguments:
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
        if message.role == "assistant" and (reasoning := message.reasoning_content or message.reasoning):
            plain["reasoning_content"] = reasoning
            if self._reads_thinking:
                plain["thinking"] = reasoning
                if message.tool_calls and plain["content"]:  # it refuses both, and would show the content as reasoning
                    plain |= {"thinking": f"{reasoning}\n\n{plain['content']}", "content": ""}
        return plain


def wants_parsed_arguments(template: Template) -> bool:
    """Some templates go through a call's arguments or print them as JSON, others put OpenAI's text as it is: they are tried."""

    def shown(arguments: Any) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "b", "name": "probe", "tool_call_id": call["id"]},
        ]
        return (
            _shown(template, messages, {"description": "c", "parameters": {"type": "object", "properties": {}}}) or ""
        )

    if '{"probed": "as it is"}' in shown('{"probed": "as it is"}'):
        return False
    parsed = shown({"probed": "as it is"})
    return "as it is" in parsed and "{'probed'" not in parsed


def wants_complete_tools(template: Template) -> bool:
    """Some templates raise for a tool without a description or parameters, which OpenAI lets one leave out: they are tried."""

    messages = [{"role": "user", "content": "a"}]
    bare: list[dict[str, Any]] = [{}, {"description": "c", "parameters": {"type": "object"}}]
    return any(_shown(template, messages, function) is None for function in bare)


def _shown(template: Template, messages: list[dict[str, Any]], function: dict[str, Any]) -> str | None:
    """With one tool. None: the template raises."""
    try:
        return template.render(messages, [{"type": "function", "function": {"name": "probe"} | function}], {})
    except Exception:  # jinja2's, and whatever a template raises
        return None


def complete_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With all that a function may have."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    given = function.get("parameters")
    parameters = {"type": "object", "properties": {}} | (given if isinstance(given, dict) else {})
    return tool | {"function": {"description": ""} | function | {"parameters": parameters}}


def _text(message: Message, param: str) -> str:
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise ApiError(
            400, f"Invalid value for '{param}.content': a {message.role} message needs text", "invalid_value", param
        )
    if isinstance(message.content, str):
        return message.content
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise ApiError(
                400, f"this model reads text only: {param}.content.{i} is of type {part.type!r}", "unsupported_content",
                f"{param}.content.{i}",
            )  # fmt: skip
        if part.text is None:
            raise ApiError(
                400, f"Missing required parameter: '{param}.content.{i}.text'.", "missing_required_parameter", param
            )
    return "".join(part.text or "" for part in message.content)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": parsed}}
