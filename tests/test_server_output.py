"""What models write, by their own templates: which format a template teaches, and calls and reasoning read back from it."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import CASES, TOOLS, Case, all_templates, needs_archive, written
from hybrid_moe_ext.server.output.calls import Call, Tools
from hybrid_moe_ext.server.output.formats import OutputFormat, format_of

# Of all templates of the archive: reasoning, calls. Those that are missing have neither that is known here.
KNOWN = {
    "Bielik-11B-v3.0-Instruct": ("<think>", "Hermes"),
    "GLM-4.6": ("<think>", "GLM"),
    "GLM-4.7-Flash": ("<think>", "GLM"),
    "HuggingFaceTB-SmolLM3-3B": ("<think>", None),
    "Kimi-K2-Instruct": (None, "Kimi K2"),
    "Kimi-K2-Thinking": ("<think>", "Kimi K2"),
    "LFM2.5-8B-A1B": ("<think>", None),
    "MiMo-VL": (None, "Hermes"),
    "MiniMax-M2": ("<think>", "MiniMax-M2"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("<think>", "Qwen3-Coder"),
    "NVIDIA-Nemotron-Nano-v2": ("<think>", None),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": (None, "Hermes"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": (None, "Hermes"),
    "Qwen-QwQ-32B": ("<think>", "Hermes"),
    "Qwen-Qwen2.5-7B-Instruct": (None, "Hermes"),
    "Qwen-Qwen3-0.6B": ("<think>", "Hermes"),
    "Qwen3-Coder": (None, "Qwen3-Coder"),
    "Qwen3.5-4B": ("<think>", "Qwen3-Coder"),
    "Reka-Edge": ("<think>", "Hermes"),
    "Spark2.5": ("<think>", "GLM"),
    "StepFun3.5-Flash": ("<think>", "Qwen3-Coder"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("<think>", "DeepSeek V3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("<think>", "DeepSeek V3"),
    "deepseek-ai-DeepSeek-V3.1": ("<think>", "DeepSeek V3.1"),
    "deepseek-ai-DeepSeek-V3.2": ("<think>", "DeepSeek V3.2"),
    "deepseek-ai-DeepSeek-V4": ("<think>", "DeepSeek V4"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("<think>", "DeepSeek V4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("<think>", None),
    "ibm-granite-granite-4.0": (None, "Hermes"),
    "ibm-granite-granite-4.1": (None, "Hermes"),
    "inclusionai-ling-3.0-flash": ("<think>", "GLM"),
    "llama-cpp-deepseek-r1": ("<think>", "DeepSeek V3"),
    "llama-cpp-rwkv-world": ("<think>", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("[THINK]", None),
    "moonshotai-Kimi-K2": (None, "Kimi K2"),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("<think>", None),
    "poolside-Laguna-S-2.1": ("<think>", "GLM"),
    "poolside-Laguna-XS-2.1": ("<think>", "GLM"),
    "poolside-Laguna-XS.2": ("<think>", "GLM"),
}


def known(told: OutputFormat) -> tuple[str | None, str | None]:
    reasoning = "harmony" if told.is_harmony else told.tags.begin if told.tags else None
    return reasoning, told.calls.name if told.calls else None


@needs_archive
def test_which_format_a_template_teaches() -> None:
    assert len(all_templates()) >= 60
    assert {name for name in all_templates() if known(format_of(all_templates()[name])) != (None, None)} == set(KNOWN)
    for name, expected in KNOWN.items():
        assert known(format_of(all_templates()[name])) == expected, name


# --- from a template and back

TEXTS = st.one_of(
    st.text('ab\\"\n\täß€<>/{}[]:,=|', max_size=12),
    st.sampled_from(
        ["", " ", "1", "true", "null", "None", '{"a": 1}', "</tool_call>", "</parameter>", "</arg_value>", "```", "<think>",
         "</think>", "<tool_call>", "}</tool_call>", "</invoke>", "<function=weather>", "\n", "\n\nx\n"]
    ),
)  # fmt: skip
JSON = st.recursive(
    st.one_of(TEXTS, st.integers(-(10**18), 10**18), st.booleans(), st.none(), st.floats(-1e9, 1e9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXTS,
        "days": st.integers(-(10**9), 10**9),
        "at": st.floats(-1e9, 1e9),
        "exact": st.booleans(),
        "places": st.lists(JSON, max_size=3),
        "more": st.dictionaries(TEXTS, JSON, max_size=3),
        "unit": st.one_of(st.integers(), st.none()),
    },
)


def marks_of(told: OutputFormat) -> list[str]:
    calls = told.calls
    marks = [*(told.tags or ()), *calls.begins, *calls.marks, *calls.parts] if calls else list(told.tags or ())
    return sorted(marks, key=len, reverse=True)


def events(text: str, told: OutputFormat, as_control: bool, seed: int) -> list[tuple[str, str]]:
    """Texts and the control tokens behind them, cut anywhere."""
    drawn, out = random.Random(seed), []
    parts = re.split("(" + "|".join(map(re.escape, marks_of(told))) + ")", text) if as_control else [text]
    for i, part in enumerate(parts):
        if i % 2:
            out.append(("", part))
            continue
        at = 0
        while at < len(part):
            n = drawn.randint(1, drawn.choice((2, 9, 40)))
            out.append((part[at : at + n], ""))
            at += n
    return out


def read(
    told: OutputFormat, text: str, prompt: str = "", as_control: bool = False, seed: int = 0, tools: list | None = TOOLS,
    apart: bool = True,
) -> tuple[str, str, list[Call]]:  # fmt: skip
    """Reasoning, content and calls."""
    reader = told.reader(Tools(tools) if tools else None, told.thinking(prompt), apart)
    assert reader is not None
    pieces = [piece for event in events(text, told, as_control, seed) for piece in reader.add(*event)]
    rest, calls = reader.end()
    pieces += rest
    assert all(piece.text for piece in pieces)
    return (
        "".join(piece.text for piece in pieces if piece.is_reasoning),
        "".join(piece.text for piece in pieces if not piece.is_reasoning),
        calls,
    )


def has(value: object, text: str) -> bool:
    if isinstance(value, dict):
        return any(has(one, text) for pair in value.items() for one in pair)
    return any(has(one, text) for one in value) if isinstance(value, list) else isinstance(value, str) and text in value


@needs_archive
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case.template, *case.more]))
def test_from_a_template_and_back(case: Case) -> None:
    told = format_of(all_templates()[case.template])

    @settings(deadline=None, max_examples=25)
    @given(
        st.lists(st.tuples(st.sampled_from(["weather", "get.forecast-2"]), ARGUMENTS), max_size=case.n_calls),
        st.sampled_from(["", "Let me look.", "So\n\nit: <b>1 < 2</b>"]) if case.content else st.just(""),
        st.sampled_from(["Hm.", "First\n\nwhat <tool_call> is\n1 < 2"]) if case.reasoning else st.just(""),
        st.booleans(),
        st.integers(0, 10**6),
    )
    def check(calls: list, content: str, reasoning: str, as_control: bool, seed: int) -> None:
        if case.not_in_values and has([arguments for _, arguments in calls], case.not_in_values):
            return
        if not calls and case.template in ("openai-gpt-oss-120b", "llama-cpp-deepseek-r1", "Kimi-K2-Thinking"):
            return  # these templates show such an answer in another way
        if as_control:  # a control token in the reasoning is not shown
            reasoning = reasoning.replace("<tool_call>", "that")
        prompt, text = written(case, reasoning, content, calls)
        got = read(told, text, prompt, as_control, seed)
        assert got[:2] == (reasoning, content)
        assert [(call.name, json.loads(call.arguments)) for call in got[2]] == calls

    check()


@needs_archive
@pytest.mark.parametrize("name", sorted(KNOWN))
@pytest.mark.parametrize("wants", [True, False])
def test_models_may_write_anything(name: str, wants: bool) -> None:
    """However it is cut, text that is no call is content or reasoning, once; marks of reasoning and white space aside."""
    told = format_of(all_templates()[name])
    pieces = [
        *marks_of(told), "functions.weather:0", "weather", "{", "}", '{"city": "a"}', "\n", " ", "a", "<", "</", "[", '"',
        "to=functions.weather", "<|channel|>final<|message|>", "```json", "<parameter=city>", "<function=weather>",
    ]  # fmt: skip

    @settings(deadline=None, max_examples=40)
    @given(
        st.lists(st.sampled_from(pieces), max_size=12).map("".join),
        st.sampled_from(["open", "closed", "free"]),
        st.booleans(),
        st.integers(0, 999),
    )
    def check(text: str, thinking: str, apart: bool, seed: int) -> None:
        reader = told.reader(Tools(TOOLS) if wants else None, thinking, apart)
        if reader is None:
            return
        whole = [piece for event in events(text, told, False, seed) for piece in reader.add(*event)]
        rest, calls = reader.end()
        shown = "".join(piece.text for piece in whole + rest)
        if not apart and not calls:
            assert shown == text
        again = told.reader(Tools(TOOLS) if wants else None, thinking, apart)
        assert again is not None
        at_once = again.add(text)
        end, same = again.end()
        assert "".join(piece.text for piece in at_once + end) == shown, "it depends on how it is cut"
        assert [(call.name, call.arguments) for call in same] == [(call.name, call.arguments) for call in calls]
        if not told.is_harmony and not calls and told.tags:
            marks = "|".join(map(re.escape, told.tags))
            assert re.sub(rf"\s|{marks}", "", shown) == re.sub(rf"\s|{marks}", "", text)

    check()


@needs_archive
def test_kimis_calls_end_its_reasoning() -> None:
    told = format_of(all_templates()["Kimi-K2-Thinking"])
    one = "<|tool_call_begin|>functions.weather:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    calls = f"<|tool_calls_section_begin|>{one}<|tool_calls_section_end|>"
    for as_control in (False, True):
        reasoning, content, [call] = read(told, f"<think>Hm. {calls}", as_control=as_control)
        assert (reasoning, content, call.id, call.told()["id"]) == (
            "Hm.",
            "",
            "functions.weather:7",
            "functions.weather:7",
        )
        reasoning, content, [call] = read(
            told, f"<think>a<|tool_calls_section_begin|>b</think>c{calls}", as_control=as_control
        )
        assert (reasoning, content) == ("ab" if as_control else "a<|tool_calls_section_begin|>b", "c")
        assert read(told, f"<think>a{calls}{calls}", as_control=as_control)[1:] == ("", [])
        assert read(told, calls.replace(one, one + one), as_control=as_control)[2] == [], "an id twice"


N = 100_000


@needs_archive
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_hostile_text_costs_no_more_than_its_length(name: str) -> None:
    """A hundred thousand of anything, in pieces: what is quadratic would take minutes."""
    told = format_of(all_templates()[name])
    marks = marks_of(told)
    opening = "<tool_call><|channel|>commentary to=functions.weather<|message|>"
    began = time.monotonic()
    for unit in [*marks, *(mark[:-1] for mark in marks), "[", "{", " ", "\n", "<", '{"a":', "\\", opening]:
        for thinking in ("free", "open") if told.tags else ("free",):
            reader = told.reader(Tools(TOOLS), thinking, True)
            assert reader is not None or told.calls is None
            if reader is None:
                continue
            for i in range(0, N, 1000):
                assert isinstance(reader.add((marks[0] if i == 0 and marks else "") + unit * 1000), list)
            assert reader.end()[1] == []
    assert time.monotonic() - began < 60


def test_control_tokens_beside_a_call_change_nothing() -> None:
    told = format_of("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>")
    reader = told.reader(Tools(TOOLS), "free", True)
    assert reader is not None
    begin, call, separator, end, all_end = (
        f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    )
    said = [("I look.", "<|other|>"), ("", begin), ("", call), ("weather", separator), ('{"city":', "<|other|>")]
    said += [(' "a"}', end), ("", "<|other|>"), ("", all_end)]
    pieces = [piece.text for one in said for piece in reader.add(*one)]
    rest, [made] = reader.end()
    assert (pieces, rest, made.arguments) == (["I look."], [], '{"city": "a"}')


def test_qwens_calls_without_their_first_mark() -> None:
    told = format_of("<tool_call><function=<parameter=")
    one = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
    for text in (f"{one}\n</tool_call>", one, f"{one}\n</tool_call>\n<tool_call>\n{one}\n</tool_call>"):
        reasoning, content, calls = read(told, f"I look.\n{text}")
        assert (reasoning, content) == ("", "I look.") and {call.arguments for call in calls} == {'{"city": "Rome"}'}
    for text in (f"<tool_call>{one}", f"{one} so", one.replace("weather", "other"), "The <function=weather> tag"):
        assert read(told, text) == ("", text, [])


def test_deep_arguments_are_text() -> None:
    told = format_of('<tool_call> </tool_call> "arguments"')
    for n in (100, 900, 1200, 100_000):
        text = '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * n + "]" * n + "}}</tool_call>"
        _, content, calls = read(told, text, seed=n)
        assert (len(calls), content) in ((1, ""), (0, text)), n
        assert n not in (100, 100_000) or len(calls) == (n == 100)
    for odd in ('{"a": NaN}', '{"a": ' + "9" * 5000 + "}", '{"a": "\x01"}'):
        text = f'<tool_call>{{"name": "weather", "arguments": {odd}}}</tool_call>'
        assert read(told, text)[1:] == (text, [])
