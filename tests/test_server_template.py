"""Conversations through chat templates: the real ones, and their sandbox."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
from jinja2.exceptions import SecurityError

from chat_templates import CASES, TOOLS, all_templates, needs_archive
from hybrid_moe_ext.server.chat import ChatTemplate
from hybrid_moe_ext.server.replies import ApiError
from hybrid_moe_ext.server.schema import ChatBody
from hybrid_moe_ext.server.template import Template


def chat_template(source: str) -> ChatTemplate:
    """Of a model that has a template and nothing else; a prompt's tokens are its characters."""
    model = SimpleNamespace(token_get_text=lambda token: f"<{token}>")
    llama = SimpleNamespace(
        metadata={"tokenizer.chat_template": source}, _model=model, token_bos=lambda: 0, token_eos=lambda: 1
    )
    return ChatTemplate(SimpleNamespace(llama=llama, tokenize=lambda text, add_bos: list(text)))


@needs_archive
@pytest.mark.parametrize("name", sorted({case.template for case in CASES}))
def test_a_conversation_with_calls_goes_into_each_template(name: str) -> None:
    call = {"id": "functions.weather:0", "type": "function"} | {
        "function": {"name": "weather", "arguments": '{"city": "Köln"}'}
    }
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.weather:0", "content": "Sun"},
    ]
    made = chat_template(all_templates()[name])
    shown = made.render(ChatBody.model_validate({"model": "m", "messages": messages}), TOOLS).text
    assert "Sun" in shown
    if name != "llama-cpp-deepseek-r1":  # it shows content or calls, never both
        assert "Köln" in shown and '\\"city' not in shown and "{'city'" not in shown, "arguments are JSON, once"
    if name == "openai-gpt-oss-120b":
        assert "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>" in shown
    if name in ("Kimi-K2-Thinking", "MiniMax-M2", "GLM-4.6", "Qwen3.5-4B"):
        assert "Hm." in shown


NEEDS_ALL = (
    "{% for tool in tools %}{{ tool.function.description + '!' }}{{ tool.function.parameters.properties.items() | list }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    "function",
    [{}, {"description": None, "parameters": None}, {"parameters": {"type": "object"}}, {"description": "d"}],
)
def test_what_a_tool_may_leave_out_is_given_to_templates_that_want_it(function: dict) -> None:
    tools = [{"type": "function", "function": {"name": "weather"} | function}]
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools})
    assert chat_template(NEEDS_ALL).render(body, tools).text == (function.get("description") or "") + "![]"
    as_given = chat_template("{{ tools | tojson }}").render(body, tools).text
    assert json.loads(as_given) == tools


@needs_archive
def test_a_tool_of_a_name_only_goes_into_each_template() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools})
    refused = set()
    for name, source in all_templates().items():
        made = chat_template(source)
        try:
            made.render(body, tools if made.knows_tools else None)
        except ApiError:
            refused.add(name)
    assert refused == {"fireworks-ai-llama-3-firefunction-v2"}  # it reads tools by another name


def test_arguments_that_are_no_json_are_refused_by_a_template_that_reads_them() -> None:
    # As DeepSeek V3.2's.
    source = "{% for call in messages[0].tool_calls %}{{ (call.function.arguments | from_json).city }}{% endfor %}"

    def shown(arguments: str) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        return chat_template(source).render(ChatBody.model_validate({"model": "m", "messages": messages}), None).text

    assert shown('{"city": "Rome"}') == "Rome"
    with pytest.raises(ApiError, match="refuses these messages"):
        shown('{"city"')


def test_a_template_keeps_to_its_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append.__self__ }}", "{{ cycler.__init__.__globals__ }}"):
        shown = ""
        with contextlib.suppress(SecurityError):
            shown = Template(source, "", "").render([], None, {})
        assert shown == ""
    listing = "{% set a = [] %}{{ a.append(1) or '' }}{{ messages | map(attribute='x') | tojson }}{{ a }}"
    assert Template(listing, "", "").render([{"x": "ä"}], None, {}) == '["ä"][1]'
