"""Messages to a prompt, by the model's own chat template, which is a program of the model's author in a sandbox."""

from __future__ import annotations

import json
import re
from typing import Any

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from ..engine import Engine
from .replies import ApiError
from .schema import ChatBody, Message

# Templates that print arguments as JSON want what was parsed; others put OpenAI's text as it is.
_ARGUMENTS_AS_JSON = re.compile(r"arguments\s*\|\s*tojson")


class ChatTemplate:
    def __init__(self, engine: Engine):
        self._engine = engine
        llm = engine.llama
        self.source: str = llm.metadata.get("tokenizer.chat_template", "")
        self._bos, eos = (llm._model.token_get_text(t) if t >= 0 else "" for t in (llm.token_bos(), llm.token_eos()))
        self._error = "this model has no chat template: use /v1/completions"
        self._format: Any = None
        if self.source:
            try:
                self._format = Jinja2ChatFormatter(self.source, eos_token=eos, bos_token=self._bos)
            except Exception as error:  # jinja2's, for what is no template
                self._error = f"this model's chat template cannot be read ({error}): use /v1/completions"
        self.knows_tools = bool(re.search(r"\btools\b", self.source))
        self._parses_arguments = (
            bool(_ARGUMENTS_AS_JSON.search(self.source)) and "arguments is string" not in self.source
        )

    def tokens(self, body: ChatBody, tools: list[dict[str, Any]] | None) -> list[int]:
        """Raises ApiError."""
        if self._format is None:
            raise ApiError(400, self._error, "no_chat_template")
        more = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            more["reasoning_effort"] = body.reasoning_effort
        messages = [self._plain(message, f"messages.{i}") for i, message in enumerate(body.messages)]
        try:
            text = self._format(messages=messages, tools=tools, **more).prompt
        except Exception as error:
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", "chat_template", "messages"
            ) from error
        return self._engine.tokenize(text, add_bos=False if self._bos and text.startswith(self._bos) else None)

    def _plain(self, message: Message, param: str) -> dict[str, Any]:
        plain = message.model_dump(exclude_none=True)
        plain["content"] = _text(message, param)
        if message.role == "developer" and "developer" not in self.source:
            plain["role"] = "system"
        if message.tool_calls and self._parses_arguments:
            plain["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
        return plain


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
