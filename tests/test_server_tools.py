"""Tool calls: offered by the model's own template, and taken from its text only when they are certain."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_moe_ext.server.output.calls import Tools
from hybrid_moe_ext.server.output.formats import format_of
from server_host import MODEL, Host, demo_with, joined, said, serving

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
    with serving(path=demo_with(tmp_path_factory.mktemp("tools"), TEMPLATE)) as started:
        yield started


def test_a_call(host: Host) -> None:
    choice = said(host, f"Let me look. {ONE}", tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Köln"},
    )
    _, content, [call], reason = joined(said(host, f"Let me look. {ONE}", tools=TOOLS, stream=True))
    assert (content, reason, call.index) == ("Let me look.", "tool_calls", 0)
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_no_call_without_tools(host: Host, more: dict) -> None:
    choice = said(host, ONE, **more).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", ONE, None)
    assert joined(said(host, ONE, stream=True, **more)) == ("", ONE, [], "stop")


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
    reader, shown, at = format_of(TEMPLATE).reader(Tools(TOOLS), "free", True), [], 0
    assert reader is not None
    whole = before + text
    while at < len(whole):
        n = random.randint(1, 8)
        shown += reader.add(whole[at : at + n])
        at += n
    rest, calls = reader.end()
    is_certain = text not in UNCERTAIN and "<tool_call>" not in before + text[:10]
    assert len(calls) == (text.count("<tool_call>") if is_certain else 0)
    assert "".join(piece.text for piece in shown + rest) == (before if is_certain else whole)


def test_templates_of_another_format() -> None:
    def calls(template: str) -> str | None:
        told = format_of(template).calls
        return told.name if told else None

    assert calls(TEMPLATE) == "Hermes"
    assert calls('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>') == "Hermes"
    assert calls("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key></tool_call>") is None
    assert calls("{% for tool in tools %}{{ tool }}{% endfor %}") is None


# --- calls that are forced

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Köln"]}}, "required": ["city"]}
TWO = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "news"}},
]


def asked(host: Host, **more: object):
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "seed": 3}
    return host.openai().chat.completions.create(**request | more)


def test_a_named_tool_is_called(host: Host) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for seed in range(3):
        [told] = asked(host, tools=TWO, tool_choice=choice, seed=seed).choices
        [call] = told.message.tool_calls
        assert (told.finish_reason, told.message.content, call.function.name) == ("stop", None, "weather")
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Köln")
    reasoning, content, [call], reason = joined(asked(host, tools=TWO, tool_choice=choice, stream=True))
    assert (reasoning, content, reason, call.function.name) == ("", "", "stop", "weather")


def test_some_tool_is_called(host: Host) -> None:
    names = set()
    for seed in range(8):
        given = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "temperature": 2}
        [told] = asked(host, tools=TWO, response_format={"type": "json_object"}, **given).choices
        [call] = told.message.tool_calls
        names.add(call.function.name)
        assert told.finish_reason == "tool_calls"
        if call.function.name == "news":
            assert json.loads(call.function.arguments) == {}
    assert names <= {"weather", "news"}


def test_forced_calls_without_an_end(host: Host) -> None:
    """A model that knows nothing goes on calling."""
    given = {"tools": TWO[:1], "tool_choice": "required", "temperature": 0, "logit_bias": {"1": -100}}
    [told] = asked(host, **given).choices
    assert told.finish_reason == "length" and len(told.message.tool_calls) > 1 and told.message.content is None


def test_one_call_where_several_are_not_wanted(host: Host) -> None:
    assert len(said(host, ONE + ONE, tools=TOOLS).choices[0].message.tool_calls) == 2
    [call] = said(host, ONE + ONE, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "weather"
    _, _, [call], _ = joined(said(host, ONE + ONE, tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert call.index == 0


LANGCHAIN = {  # ChatOpenAI of langchain-openai: with_structured_output by function_calling, and bind_tools(tool_choice="any")
    "structured": {
        "model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": False, "temperature": 0, "n": 1,
        "parallel_tool_calls": False, "tool_choice": {"type": "function", "function": {"name": "Weather"}},
        "tools": [{"type": "function", "function": {"name": "Weather", "description": "", "parameters": CITY}}],
    },
    "any": {
        "model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True, "temperature": 0,
        "tools": TWO[:1], "tool_choice": "required", "stream_options": {"include_usage": True}, "max_completion_tokens": 200,
        "parallel_tool_calls": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LANGCHAIN)
def test_what_langchain_sends(host: Host, name: str) -> None:
    answer = host.post("/v1/chat/completions", json=LANGCHAIN[name])
    assert answer.status_code == 200, answer.text
    text = answer.text.replace('\\"', '"').replace("\\u00f6", "ö")
    assert '"name":"weather"' in text.lower() and ('"city": "Rome"' in text or '"city": "Köln"' in text), text


def pattern(text: str) -> list[dict]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}}
    return [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tool_choice": "required"}, "only possible with 'tools'"),
        ({"tool_choice": "required", "tools": []}, "only possible with 'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": TOOLS}, "names 'other'"),
        ({"tool_choice": {"type": "function", "name": "weather"}, "tools": TOOLS}, '"required", or'),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, '"required", or'),
        ({"tool_choice": "any", "tools": TOOLS}, '"required", or'),
        ({"tool_choice": "required", "tools": [TOOLS[0] | {"function": {"name": "a b"}}]}, "'a b' cannot be forced"),
        ({"tool_choice": "required", "tools": TOOLS, "grammar": 'root ::= "a"'}, "choose one"),
        ({"tool_choice": "required", "tools": pattern("a(?=b)")}, "a call of 'weather' cannot be forced"),
    ],
)
def test_what_cannot_be_forced(host: Host, wrong: dict, message: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]} | wrong
    answer = host.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("n", [30, 150, 400, 900, 20_000])
@pytest.mark.parametrize("unit", ['{"anyOf": [', '{"type": "array", "items": ', '{"properties": {"b": '])
def test_deep_schemas_are_no_fault_of_the_server(host: Host, n: int, unit: str) -> None:
    ends = {"[": "]", "{": "}"}
    closing = "".join(ends[c] for c in reversed(unit) if c in ends)
    schema = '{"type": "object", "properties": {"a": ' + unit * n + "{}" + closing * n + "}}"
    tools = f'[{{"type": "function", "function": {{"name": "weather", "parameters": {schema}}}}}]'
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "a"}}], "tool_choice": "required", "max_tokens": 1, '
    answer = host.post(
        "/v1/chat/completions", content=f'{body}"tools": {tools}}}', headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400), answer.text
