"""Reasoning apart from the answer, and formats whose marks are control tokens: by the real client, of a real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hybrid_moe_ext.engine import Request, Sampling
from hybrid_moe_ext.errors import OptionError
from hybrid_moe_ext.server import ServerOptions
from server_host import MODEL, Host, demo_with, joined, said, serving

# The model's answer begins inside its reasoning, if that is not turned off. Earlier reasoning is shown.
THINKING = """{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {% if message.reasoning_content %}\
<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{% endfor %}assistant: {{ '<think>\n' if enable_thinking is not defined or enable_thinking else '<think>\n\n</think>\n\n' }}"""
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

HARMONY = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|start|>{{ message.role }}\
{% if message.thinking %}<|channel|>analysis{% elif message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>\
{{ message.thinking or message.content }}<|end|>{% endfor %}<|start|>assistant"""
HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]

DEEPSEEK = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}\
{% endfor %}{# <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{}<｜tool▁call▁end｜> #}"""
DEEPSEEK_TOKENS = [
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end", "other")
]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with serving(path=demo_with(tmp_path_factory.mktemp("thinking"), THINKING)) as started:
        yield started


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with serving(path=demo_with(tmp_path_factory.mktemp("harmony"), HARMONY, HARMONY_TOKENS)) as started:
        yield started


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with serving(path=demo_with(tmp_path_factory.mktemp("deepseek"), DEEPSEEK, DEEPSEEK_TOKENS)) as started:
        yield started


def ids(host: Host, texts: list[str]) -> list[int]:
    found = [host.engine.tokenize(text, add_bos=False) for text in texts]
    assert all(len(one) == 1 for one in found), "they are no tokens"
    return [one[0] for one in found]


def parts(answer) -> tuple[str | None, str | None, str]:
    [choice] = answer.choices
    return getattr(choice.message, "reasoning_content", None), choice.message.content, choice.finish_reason


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("First this.\nThen that.\n</think>\n\nThe answer.", "First this.\nThen that.", "The answer."),
        ("</think>The answer.", None, "The answer."),
        ("a <think> b</think>c </think> d", "a <think> b", "c </think> d"),
        ("a < b</thin </think>", "a < b</thin", ""),
    ],
)
def test_the_prompt_opens_the_reasoning(thinking: Host, text: str, reasoning: str | None, content: str) -> None:
    assert parts(said(thinking, text)) == (reasoning, content, "stop")
    assert joined(said(thinking, text, stream=True)) == (reasoning or "", content, [], "stop")


def test_unended_reasoning_stays_reasoning(thinking: Host) -> None:
    answer = said(thinking, "One two three four five six</think>Done", max_completion_tokens=4)
    reasoning, content, reason = parts(answer)
    assert (content, reason) == ("", "length") and reasoning and "One two three four five six".startswith(reasoning)


def test_the_model_opens_its_reasoning(thinking: Host) -> None:
    """The prompt ends behind an empty one."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}

    def of(text: str):
        rule = f"root ::= {json.dumps(text)}"
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0,
            "max_tokens": 200,
        }
        return thinking.openai().chat.completions.create(**request, extra_body=off | {"grammar": rule})

    assert parts(of("The answer. <think>no</think>")) == (None, "The answer. <think>no</think>", "stop")
    assert parts(of("\n<think>Hm.</think>\nThe answer.")) == ("Hm.", "The answer.", "stop")


def test_a_call_behind_the_reasoning(thinking: Host) -> None:
    text = f"Look with <tool_call>?\n</think>\n\nI look.\n{CALL}"
    answer = said(thinking, text, tools=TOOLS, logprobs=True)
    assert parts(answer) == ("Look with <tool_call>?", "I look.", "tool_calls")
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens, "of the reasoning and the call too"
    reasoning, content, [call], reason = joined(said(thinking, text, tools=TOOLS, stream=True))
    assert (reasoning, content, reason) == ("Look with <tool_call>?", "I look.", "tool_calls")


def test_a_streams_log_probabilities_are_whole(thinking: Host) -> None:
    chunks = list(said(thinking, "Hm.</think>Yes.", stream=True, logprobs=True, stream_options={"include_usage": True}))
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert sum(len(one.content) for one in told if one) == chunks[-1].usage.completion_tokens


def test_a_grammar_of_the_clients_own_is_content(thinking: Host) -> None:
    assert parts(said(thinking, "yes")) == (None, "yes", "stop")


def test_json_comes_behind_the_reasoning(thinking: Host) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "response_format": wanted,
        "max_tokens": 30,
    }
    reasoning, content, reason = parts(thinking.openai().chat.completions.create(**request, seed=1))
    assert reason == "length" and reasoning and content == "", "this model's thinking never ends by itself"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    reasoning, content, reason = parts(thinking.openai().chat.completions.create(**request, extra_body=off))
    assert (reasoning, json.loads(content), reason) == (None, {"a": 1}, "stop")


def n_prompt(host: Host, messages: list) -> int:
    request = {"model": MODEL, "messages": messages, "max_tokens": 1}
    return host.openai().chat.completions.create(**request).usage.prompt_tokens


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_goes_to_the_template(thinking: Host, harmony: Host, name: str) -> None:
    user, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}
    expected = "user: Hello\nassistant: <think>Hm, hm.</think>Yes.\nuser: Hello\nassistant: <think>\n"
    assert n_prompt(thinking, [user, answer | {name: "Hm, hm."}, user]) == len(thinking.engine.tokenize(expected))
    front = "<|start|>user<|message|>Hello<|end|>"
    expected = f"{front}<|start|>assistant<|channel|>analysis<|message|>Hm, hm.<|end|>{front}<|start|>assistant"
    assert n_prompt(harmony, [user, answer | {name: "Hm, hm."}, user]) == len(harmony.engine.tokenize(expected))
    body = {"model": MODEL, "messages": [user, answer | {name: 1}, user]}
    assert thinking.post("/v1/chat/completions", json=body).status_code == 400


def test_reasoning_off(tmp_path) -> None:
    with serving(path=demo_with(tmp_path, THINKING), reasoning="off") as host:
        text = "Hm.\n</think>\n\nThe answer. "
        assert parts(said(host, text)) == (None, text, "stop")
        assert joined(said(host, text, stream=True)) == ("", text, [], "stop")
        answer = said(host, f"<tool_call>?</think>\n{CALL}", tools=TOOLS)
        assert parts(answer) == (None, "<tool_call>?</think>", "tool_calls")
    with pytest.raises(OptionError, match="reasoning"):
        ServerOptions(reasoning="on")


# --- marks that are control tokens


def test_harmonys_channels(harmony: Host) -> None:
    bias = ids(harmony, HARMONY_TOKENS)
    text = (
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is so."
    )
    answer = said(harmony, text, bias)
    assert parts(answer) == ("Hm <b>.", "I look.\n\nIt is so.", "stop")
    in_pieces = said(harmony, text)
    assert in_pieces.choices[0].message == answer.choices[0].message
    assert answer.usage.completion_tokens < in_pieces.usage.completion_tokens - 12, "the marks were no tokens"
    assert joined(said(harmony, text, bias, stream=True)) == ("Hm <b>.", "I look.\n\nIt is so.", [], "stop")


def test_harmonys_call(harmony: Host) -> None:
    bias = ids(harmony, HARMONY_TOKENS)
    for header in (
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>commentary json",
    ):
        text = f'{header}<|message|>{{"city": "Rome"}}'
        reasoning, content, [call], reason = joined(said(harmony, text, bias, tools=TOOLS, stream=True))
        assert (reasoning, content, reason) == ("", "", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    text = "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}"
    assert "to=functions.other" in parts(said(harmony, text, bias, tools=TOOLS))[1]


@pytest.mark.parametrize("seed", range(3))
def test_harmonys_call_is_forced(harmony: Host, seed: int) -> None:
    marks = ids(harmony, HARMONY_TOKENS)
    bias = {str(token): 100 for token in [*marks[:4], *marks[5:]]} | {str(marks[4]): 60}
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100, "seed": seed}
    answer = harmony.openai().chat.completions.create(**request, tools=TOOLS, tool_choice="required", logit_bias=bias)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert answer.choices[0].finish_reason == "tool_calls"


def deepseek_call(name: str) -> str:
    one = f'<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{"city": "Rome"}}<｜tool▁call▁end｜>'
    return f"<｜tool▁calls▁begin｜>{one}<｜tool▁calls▁end｜>"


def test_deepseeks_call(deepseek: Host) -> None:
    bias = ids(deepseek, DEEPSEEK_TOKENS)
    reasoning, content, [call], reason = joined(
        said(deepseek, "I look. " + deepseek_call("weather"), bias, tools=TOOLS, stream=True)
    )
    assert (reasoning, content, reason) == ("", "I look.", "tool_calls")
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_control_tokens_are_not_shown(deepseek: Host) -> None:
    """Of what is no call, and those that are no marks; with tools and without."""
    bias = ids(deepseek, DEEPSEEK_TOKENS)
    text = "I look. " + deepseek_call("other")
    shown = 'I look. other{"city": "Rome"}'
    assert parts(said(deepseek, text, bias, tools=TOOLS)) == (None, shown, "stop")
    assert joined(said(deepseek, text, bias, tools=TOOLS, stream=True)) == ("", shown, [], "stop")
    assert parts(said(deepseek, text, bias)) == (None, shown, "stop")
    assert parts(said(deepseek, "a<｜tool▁other｜>b", bias, tools=TOOLS)) == (None, "ab", "stop")


def test_control_tokens_come_as_events(deepseek: Host) -> None:
    """Between what is before and what is behind, though a stop string might have begun there."""
    marks = ids(deepseek, DEEPSEEK_TOKENS)
    sampling = Sampling(temperature=0, grammar='root ::= "ab<｜tool▁sep｜>cd"', logit_bias=dict.fromkeys(marks, 100.0))
    for asks in (False, True):
        stream = deepseek.engine.submit(Request("Hello", sampling=sampling, stop=["bc"], control_tokens=asks))
        result = stream.result(60)
        told = "".join(event.text + event.control for event in result.events)
        assert (told, result.finish.stop) == (("ab<｜tool▁sep｜>cd", None) if asks else ("a", "bc"))
