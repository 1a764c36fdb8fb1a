"""Tool calls: offered by the model's own template, and taken from its text only when they are certain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import DEMO
from hybrid_moe_ext.server.tools import ToolText, can_parse
from server_host import MODEL, Host, serving

# In the way of Qwen's: tools in front, calls between marks. (A line's end after a {% %} is not part of the text.)
TEMPLATE = """{{ bos_token }}{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{% endfor %}{% endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The demo model with another chat template."""
    folder: Path = tmp_path_factory.mktemp("tools")
    for file in DEMO.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    with serving(path=str(folder)) as started:
        yield started


def said(host: Host, text: str, **more: object):
    """What the client gets when the model says this: a grammar makes it."""
    rule = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 100}
    return host.openai().chat.completions.create(**request, extra_body={"grammar": rule}, **more)


def joined(chunks) -> tuple[str, list, str]:
    choices = [chunk.choices[0] for chunk in chunks]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    return "".join(choice.delta.content or "" for choice in choices), calls, choices[-1].finish_reason


def test_a_call(host: Host) -> None:
    choice = said(host, f"Let me look. {ONE}", tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Köln"},
    )
    content, [call], reason = joined(said(host, f"Let me look. {ONE}", tools=TOOLS, stream=True))
    assert (content, reason, call.index) == ("Let me look. ", "tool_calls", 0)
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_no_call_without_tools(host: Host, more: dict) -> None:
    choice = said(host, ONE, **more).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", ONE, None)
    assert joined(said(host, ONE, stream=True, **more)) == (ONE, [], "stop")


def test_the_template_gets_tools_and_earlier_calls(host: Host) -> None:
    def n_prompt(messages: list, **more: object) -> int:
        given = {"model": MODEL, "max_tokens": 1} | more
        return host.openai().chat.completions.create(messages=messages, **given).usage.prompt_tokens

    def n(text: str) -> int:
        return len(host.engine.tokenize(text))

    user = {"role": "user", "content": "Hello"}
    tool = json.dumps(TOOLS[0])
    front = f'Tools: {tool}Call one with <tool_call>{{"name": ..., "arguments": ...}}</tool_call>\n'
    assert n_prompt([user]) == n("user: Hello")
    assert n_prompt([user], tools=TOOLS) == n(f"{front}user: Hello")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
    ]
    written = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
    assert n_prompt(messages, tools=TOOLS) == n(f"{front}assistant: {written}tool: Sun")


UNCERTAIN = [
    "<tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "weather", "arguments": {}}',
    '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>',
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {}, "more": 1}</tool_call>',
    f"{ONE} as I said",
    f"{ONE}<tool_call>",
    "<tool_call>" * 20,
]


@settings(deadline=None)
@given(st.sampled_from([*UNCERTAIN, ONE, f"{ONE}\n{ONE}"]), st.text("<tol_ca>x", max_size=12), st.randoms())
def test_however_it_is_cut(text: str, before: str, random) -> None:
    """Nothing is lost of what is no call, nothing of a call is shown."""
    parser, shown, at = ToolText(TOOLS), "", 0
    whole = before + text
    while at < len(whole):
        n = random.randint(1, 8)
        shown += parser.add(whole[at : at + n])
        at += n
    rest, calls = parser.end()
    is_certain = text not in UNCERTAIN and "<tool_call>" not in before + text[:10]
    assert len(calls) == (text.count("<tool_call>") if is_certain else 0)
    assert shown + rest == (before if is_certain else whole)


def test_templates_of_another_format() -> None:
    assert can_parse(TEMPLATE)
    assert can_parse('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>')
    assert not can_parse("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key></tool_call>")
    assert not can_parse("{% for tool in tools %}{{ tool }}{% endfor %}")
