"""Calls that are forced: the grammars admit what models write by their own templates, and make nothing that is not read again."""

from __future__ import annotations

import json
from collections.abc import Iterator

import llama_cpp.llama_cpp as C
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import CASES, Case, all_templates, needs_archive, written
from engine_solo import DEADLOCK_S, engine
from hybrid_moe_ext.engine import Engine, Request, Sampling
from hybrid_moe_ext.engine.sampling import Sampler
from hybrid_moe_ext.server.output import grammars
from hybrid_moe_ext.server.output.calls import Tools
from hybrid_moe_ext.server.output.formats import format_of
from hybrid_moe_ext.server.output.gbnf import Grammar, literal

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Köln"]},
        "note": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"unit": {"enum": [1, 2]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "a", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get.forecast-2", "description": "a", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "news", "description": "a"}},
]
ODD = 'a "b"\nß </ <x> \\ {'
FIRST = ("weather", {"city": "Köln", "note": ODD, "days": 3, "places": ["a", ODD], "unit": 2})
SECOND = ("get.forecast-2", {"city": "Rome", "unit": 1})


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with engine("demo") as made:
        yield made


def admits(demo: Engine, grammar: str, text: str) -> bool:
    """All of the text, and its end there."""
    sampler = Sampler(demo._vocab, Sampling(temperature=0, grammar=grammar), [], [], 512)
    try:
        for token in demo.tokenize(text, add_bos=False):
            if not sampler._allows(token):
                return False
            C.llama_sampler_accept(sampler._grammar, token)
        return sampler._allows(C.llama_vocab_eos(demo._vocab))
    finally:
        sampler.free()


def forced(case: Case, prompt: str, many: bool, *names: str) -> str:
    told = format_of(all_templates()[case.template])
    tools = [tool for tool in Tools(TOOLS).all.values() if not names or tool.name in names]
    return grammars.of_calls(told, tools, many, told.thinking(prompt))


@needs_archive
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case.template, *case.more]))
def test_what_models_write_is_admitted(demo: Engine, case: Case) -> None:
    for reasoning in ["Hm </ t"] if case.reasoning else [""]:
        for calls in ([FIRST], [SECOND], [("news", {})], [FIRST, SECOND, ("news", {})][: case.n_calls + 1]):
            if len(calls) > 1 and case.n_calls == 1:
                continue
            prompt, text = written(case, reasoning, "", calls)
            # What the templates of conversations put behind the last mark is not the model's.
            text = text.rstrip()
            assert admits(demo, forced(case, prompt, True), text), text
            assert admits(demo, forced(case, prompt, False), text) == (len(calls) == 1), text
            others = {"weather", "get.forecast-2", "news"} - {calls[0][0]}
            assert not admits(demo, forced(case, prompt, True, *others), text), "that tool is not to be called"
    prompt, text = written(case, "Hm." if case.reasoning else "", "", [("weather", {"city": "Paris"})])
    assert not admits(demo, forced(case, prompt, True), text.rstrip()), "no such city"
    assert not admits(demo, forced(case, prompt, True), "I do not want to.")


FEW = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Köln"]},
        "exact": {"type": "boolean"},
        "unit": {"type": "null"},
        "day": {"enum": [1, 2]},
    },
    "required": ["city", "exact"],
}


@needs_archive
@pytest.mark.parametrize("name", sorted({case.template for case in CASES}))
def test_what_is_forced_is_a_call(demo: Engine, name: str) -> None:
    """Of a model that knows nothing, at its freest."""
    told = format_of(all_templates()[name])
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": FEW}},
        {"type": "function", "function": {"name": "news"}},
    ]
    grammar = grammars.of_calls(told, list(Tools(tools).all.values()), False, "closed")
    for seed in range(2):
        sampling = Sampling(temperature=2, seed=seed, grammar=grammar)
        text = demo.submit(Request("Hello", max_tokens=300, sampling=sampling)).result(DEADLOCK_S).text
        reader = told.reader(Tools(tools), "closed", True)
        assert reader is not None
        pieces = reader.add(text)
        rest, [call] = reader.end()
        assert pieces + rest == [], text
        arguments = json.loads(call.arguments)
        assert call.name in ("weather", "news")
        if call.name == "weather":
            assert arguments["city"] in ("Rome", "Köln") and isinstance(arguments["exact"], bool)
            assert arguments.get("unit") is None and arguments.get("day", 1) in (1, 2)
        else:
            assert arguments == {}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["</a>", "aab", "ab-]", "\n</\\^", "a"]), st.data())
def test_until_a_mark(demo: Engine, mark: str, data: st.DataObject) -> None:
    """Any text, and the mark once, at its end."""
    text = data.draw(st.text(mark + "x<ä", max_size=12)) + data.draw(st.sampled_from([mark, ""]))
    grammar = Grammar()
    rule = grammar.until(mark)
    at = text.find(mark)
    assert admits(demo, grammar.text(f"{literal('x')} {rule}"), "x" + text) == (at >= 0 and at + len(mark) == len(text))


@needs_archive
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case.template, *case.more]))
def test_what_is_whole_of_forced_calls_is_given_out(case: Case) -> None:
    told = format_of(all_templates()[case.template])
    if case.n_calls == 1:
        return
    prompt, text = written(case, "Hm." if case.reasoning else "", "", [FIRST, SECOND])
    begin = text.index("get.forecast-2")
    for at in range(begin, len(text)):
        reader = told.reader(Tools(TOOLS), told.thinking(prompt), True, is_forced=True)
        assert reader is not None
        pieces = reader.add(text[:at])
        rest, calls = reader.end()
        assert [call.name for call in calls] == ["weather", "get.forecast-2"][: len(calls)] and calls, text[:at]
        assert "".join(piece.text for piece in pieces + rest) == ("Hm." if case.reasoning else "")


def test_text_cannot_end_a_value_twice(demo: Engine) -> None:
    """What is written behind its end could not be read as a call."""
    told = format_of("<tool_call><function=<parameter=")
    grammar = grammars.of_calls(told, list(Tools(TOOLS).all.values()), False, "closed")
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=note>\n{}</function>\n</tool_call>"
    assert admits(demo, grammar, text.format("a\n</parameter>\n")) and admits(
        demo, grammar, text.format("a</parameter>\n")
    )
    assert not admits(demo, grammar, text.format("a</parameter>b\n</parameter>\n"))


def test_json_behind_the_reasoning(demo: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    think = format_of("<think></think>")
    behind = grammars.of_schema(think, schema, "open")
    assert behind is not None
    assert admits(demo, behind, 'Hm {"a": "b"}\n</think>\n\n{"a": 1}') and not admits(demo, behind, '{"a": 1}')
    assert grammars.of_schema(think, schema, "closed") is grammars.of_schema(think, schema, "free") is None
    harmony = format_of("<|start|><|channel|><|message|> analysis final")
    final = grammars.of_schema(harmony, schema, "free")
    assert final is not None
    for front in ("", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"):
        assert admits(demo, final, f'{front}<|channel|>final<|message|>{{"a": 1}}')
        assert admits(demo, final, f'{front}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}')
    assert not admits(demo, final, '{"a": 1}')
