"""What a request can ask of the engine, and what happens when it cannot be had."""

import dataclasses
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from engine_solo import (
    GREEDY,
    assert_nothing_leaked,
    assert_solo,
    engine,
    greedy,
    model,
    prompt,
    result,
    solo,
)
from hybrid_moe_ext import errors
from hybrid_moe_ext.engine import Engine, Request, Sampling

pytestmark = pytest.mark.usefixtures("no_deadlock")


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with engine("demo", default_max_tokens=20) as e:
        yield e
        assert_nothing_leaked(e)


def ask(e: Engine, text: str | list[int] = "The licence", n: int = 20, **more: object):
    sampling = more.pop("sampling", GREEDY)
    return result(e.submit(Request(text, max_tokens=n, sampling=sampling, **more)))


# --- stop strings and text


def test_stop_strings_end_the_text_before_them(demo: Engine) -> None:
    """Every possible stop string of a known answer, most of them across tokens: the text ends where it first occurs."""
    whole = ask(demo)
    assert whole.finish.reason == "length" and len(whole.text) > 40
    ends = np.cumsum([len(event.text) for event in whole.events])
    for begin in range(0, 36, 5):
        for n in (1, 3, 9):
            stop = whole.text[begin : begin + n]
            r = ask(demo, stop=["never in it", stop])
            at = whole.text.index(stop)
            assert r.text == whole.text[:at]
            assert (r.finish.reason, r.finish.stop) == ("stop", stop)
            # No token is computed after the one that completes it.
            assert len(r.tokens) == int(np.searchsorted(ends, at + n)) + 1
    r = ask(demo, stop=["is not there", whole.text[-4:] + "!"])
    assert r.text == whole.text and r.finish.reason == "length"  # what was held back comes at the end


def test_characters_that_span_tokens(demo: Engine) -> None:
    """A grammar makes the model write them; no event has half of one."""
    wanted = "é日本語🙂 ok"
    r = ask(demo, n=60, sampling=Sampling(temperature=0, grammar=f'root ::= "{wanted}"'))
    assert r.text == wanted and r.finish.reason == "stop"
    assert len(r.tokens) > len(wanted)  # the tiny vocabulary writes them in bytes
    assert all("�" not in event.text for event in r.events)
    cut = ask(demo, n=1, sampling=Sampling(temperature=0, grammar='root ::= "🙂"'))
    assert cut.text == "�" and cut.finish.reason == "length"  # half a character at the end is shown as such
    stopped = ask(demo, n=60, stop=["本"], sampling=Sampling(temperature=0, grammar=f'root ::= "{wanted}"'))
    assert stopped.text == "é日" and stopped.finish.stop == "本"


# --- grammar


def test_json_schema(demo: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    }
    for seed in range(5):
        for given in (schema, json.dumps(schema)):
            r = ask(demo, n=200, sampling=Sampling(temperature=1.5, seed=seed, json_schema=given, top_k=40))
            if r.finish.reason == "stop":
                value = json.loads(r.text)
                assert value["name"] in ("a", "b") and isinstance(value["n"], int) and isinstance(value["ok"], bool)
            else:  # an endless number
                assert r.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"grammar": "root ::= nowhere"}, "root"),
        ({"grammar": "no grammar at all"}, "GBNF"),
        ({"grammar": ""}, "GBNF"),
        ({"grammar": 'expr ::= "a"'}, "root"),
        ({"grammar": 'root ::= root "a"'}, "recursion"),
        ({"grammar": "root ::= \0"}, "NUL"),
        ({"grammar": 'root ::= "{2,1}" "a"{2,1}'}, "smaller"),  # llama.cpp would count down from zero
        ({"grammar": f'root ::= "a"{{{"9" * 5000}}}'}, "GBNF"),
        ({"grammar": f'root ::= {"(" * 5000}"a"{")" * 5000}'}, "nests"),  # and overflow its stack
        ({"grammar": 'root ::= "' + "a" * 200_000 + '"'}, "characters"),
        ({"grammar": 3}, "GBNF"),
        ({"json_schema": "{not json"}, "json_schema"),
        ({"json_schema": {"type": "unheard of"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
        ({"json_schema": {"a": object()}}, "json_schema"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "both"),
    ],
)
def test_bad_grammars_are_refused_at_once(demo: Engine, sampling: dict, says: str) -> None:
    with pytest.raises(errors.RequestError, match=says):
        demo.submit(Request("x", sampling=Sampling(**sampling)))


def test_braces_in_strings_are_no_repetition(demo: Engine) -> None:
    r = ask(demo, n=60, sampling=Sampling(temperature=0, grammar='root ::= "{2,1}" [({2,1}] "((" # {2,1}'))
    assert r.text.startswith("{2,1}") and r.text.endswith("((")


def test_a_grammar_that_the_bias_forbids_ends(demo: Engine) -> None:
    """Nothing is left to choose: the text ends instead of breaking the grammar (llama.cpp would stop the process)."""
    banned = dict.fromkeys(range(demo.n_vocab), -math.inf)
    r = ask(demo, sampling=Sampling(temperature=0, grammar='root ::= "a"', logit_bias=banned))
    assert r.finish.reason == "stop" and r.text == ""


# --- sampling


def test_seeds_are_reproducible(demo: Engine) -> None:
    """Alone or among others, by either path."""
    s = Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=7)
    alone = ask(demo, sampling=s)
    streams = [
        demo.submit(Request("The licence", max_tokens=20, sampling=dataclasses.replace(s, seed=seed)))
        for seed in (7, 8, 7, 9)
    ]
    a, b, c, d = (result(x).tokens for x in streams)
    assert a == c == alone.tokens
    assert a != b and b != d
    different = {tuple(ask(demo, sampling=Sampling(temperature=1.5)).tokens) for _ in range(3)}
    assert len(different) == 3  # no seed: another one every time
    last, wrapped = (ask(demo, sampling=dataclasses.replace(s, seed=seed)).tokens for seed in (2**32 - 1, -1))
    assert last == wrapped == ask(demo, sampling=dataclasses.replace(s, seed=-1)).tokens  # llama.cpp's "random seed"


def test_bias_penalties_and_filters(demo: Engine) -> None:
    whole = ask(demo)
    first = whole.tokens[0]
    without = ask(demo, sampling=Sampling(temperature=0, logit_bias={first: -math.inf}))
    assert first not in without.tokens
    forced = ask(demo, n=5, sampling=Sampling(temperature=0, logit_bias={first: 1000}))
    assert forced.tokens == [first] * 5
    varied = ask(demo, n=5, sampling=Sampling(temperature=0, logit_bias={first: 30}, presence_penalty=100))
    assert varied.tokens.count(first) == 1
    # Penalties count the prompt.
    tokens = [*demo.tokenize("The licence"), first]
    new = ask(demo, tokens, n=1, sampling=Sampling(temperature=0, logit_bias={first: 30}, presence_penalty=100))
    assert new.tokens != [first]
    for narrow in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0), Sampling(temperature=1e-6)):
        assert ask(demo, sampling=narrow).tokens == whole.tokens


def test_logprobs_are_the_models(demo: Engine) -> None:
    llm_tokens, _ = solo("demo", tuple(demo.tokenize("The licence")), 20)
    r = ask(demo, logprobs=5, n=6, sampling=Sampling(temperature=0, ignore_eos=True))
    assert r.tokens == llm_tokens[:6]
    for event in r.events:
        top = dict(event.top_logprobs)
        assert len(top) == 5 and list(top.values()) == sorted(top.values(), reverse=True)
        assert event.logprob == max(top.values()) and event.token in top
        assert sum(math.exp(x) for x in top.values()) <= 1 + 1e-9
    all_of_them = ask(demo, [5], n=1, logprobs=100).events[0]
    assert len(all_of_them.top_logprobs) == 100
    none = ask(demo, n=2).events[0]
    assert none.logprob is None and none.top_logprobs == ()
    assert ask(demo, n=1, logprobs=0).events[0].logprob is not None


# --- limits


def test_max_tokens(demo: Engine) -> None:
    r = ask(demo, n=0)
    assert r.tokens == [] and r.finish.reason == "length" and r.finish.metrics.n_prompt > 0
    assert len(ask(demo, n=1).tokens) == 1
    assert len(ask(demo, n=None).tokens) == 20  # default_max_tokens
    text = prompt(500)
    r = result(demo.submit(greedy(text, 1000)))  # the context ends sooner
    assert r.finish.reason == "length" and len(r.tokens) == 12
    assert_solo("demo", text, r.tokens)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [1] * 512}, "context holds 512"),
        ({"prompt": [1] * 5000}, "shorten the prompt"),
        ({"prompt": "word " * 5000}, "context holds"),
        ({"prompt": [-1]}, "a token of the prompt is -1"),
        ({"prompt": [2048]}, "0 to 2047"),
        ({"prompt": [1.5]}, "an integer"),
        ({"prompt": ["a"]}, "an integer"),
        ({"prompt": [True]}, "an integer"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"stop": "text"}, "a list"),
        ({"stop": [""]}, "not empty"),
        ({"stop": [3]}, "a list"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 101}, "logprobs"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"sampling": {"temperature": 0}}, "give a Sampling"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "temperature"),
        ({"sampling": Sampling(top_p=1.1)}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(top_k=2.5)}, "top_k"),
        ({"sampling": Sampling(min_p=math.nan)}, "min_p"),
        ({"sampling": Sampling(repeat_penalty=0)}, "repeat_penalty"),
        ({"sampling": Sampling(seed=2**64)}, "seed"),
        ({"sampling": Sampling(logit_bias={2048: 1})}, "logit_bias"),
        ({"sampling": Sampling(logit_bias={1: math.nan})}, "logit_bias"),
        ({"sampling": Sampling(logit_bias={1: math.inf})}, "logit_bias"),
    ],
)
def test_bad_requests_are_refused_at_once(demo: Engine, fields: dict, says: str) -> None:
    with pytest.raises(errors.RequestError, match=says):
        demo.submit(Request(**{"prompt": [5], **fields}))


def test_a_model_without_tokenizer_takes_tokens_only() -> None:
    with engine("mamba") as e:
        with pytest.raises(errors.RequestError, match="no tokenizer"):
            e.submit(Request("text"))
        with pytest.raises(errors.RequestError, match="no tokenizer"):
            e.submit(Request([5], sampling=Sampling(grammar='root ::= "a"')))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_parallel": 0}, "n_parallel"),
        ({"n_ctx": 1.5}, "an integer"),
        ({"n_batch": 8, "n_parallel": 8}, "min_chunk"),
        ({"n_parallel": 200, "n_kept": 100, "n_batch": 512}, "sequences"),
        ({"tpot_ms": 0}, "tpot_ms"),
        ({"n_paralel": 3}, "unknown option"),
        ({"n_ubatch": 3}, "prefill_batch"),
        ({"embedding": True}, "use Llama"),
    ],
)
def test_bad_options(options: dict, says: str) -> None:
    path, exact = model("qwen3-30b")
    with pytest.raises(errors.OptionError, match=says):
        Engine(path, **exact, **options)
