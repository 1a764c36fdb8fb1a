"""The engine benchmark: its load is what was asked for and can be played again, its figures follow from the moments it noted,
every engine gets the same requests, and what cannot be measured is refused."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise

import pytest

from conftest import DEMO
from engine_request import ENTRIES, request
from hybrid_moe_ext import OptionError
from hybrid_moe_ext.bench.engine import EngineRequest, Round, bench_engine, ratios
from hybrid_moe_ext.bench.engine_figures import Figures, Served, figures, medians
from hybrid_moe_ext.bench.engine_load import (
    Arrival,
    Entry,
    arrivals,
    kinds,
    poisson,
    read_trace,
    share_prefixes,
    write_entries,
    write_trace,
)
from hybrid_moe_ext.bench.engine_play import play
from hybrid_moe_ext.cli import run as command_line

pytestmark = pytest.mark.usefixtures("no_deadlock")

MIX = kinds("4-9:3@3,40-50:5")


# --- the load


def test_poisson_arrivals_are_of_the_rate_and_mix_that_were_asked_for():
    load = poisson(4000, 2.5, MIX, seed=3)
    assert load == poisson(4000, 2.5, MIX, seed=3) != poisson(4000, 2.5, MIX, seed=4)
    gaps = [b.at_s - a.at_s for a, b in pairwise(load)]
    assert load[0].at_s == 0 and min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 2.5, rel=0.1)
    # Exponential: the deviation is the mean, and a gap is above it in 1/e of the cases.
    assert math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)
    assert sum(g > mean for g in gaps) / len(gaps) == pytest.approx(1 / math.e, rel=0.1)
    long = [e for e in load if e.prompt >= 40]
    assert len(long) / len(load) == pytest.approx(0.25, rel=0.15) and {e.max_tokens for e in long} == {5}
    assert {e.prompt for e in load} == {*range(4, 10), *range(40, 51)}
    assert {e.at_s for e in poisson(5, math.inf, MIX, 0)} == {0}


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "PROMPT:OUTPUT"), ("5", "PROMPT:OUTPUT"), ("5:4@", "PROMPT:OUTPUT"), ("5:4;6:3", "PROMPT:OUTPUT"),
     ("0:4", "prompt of 0"), ("9-3:4", "prompt of 9 to 3"), ("5:0", "output of 0"), ("5:4@0", "weight 0")],
)  # fmt: skip
def test_impossible_mixes(text, rule):
    with pytest.raises(OptionError, match=rule):
        kinds(text)


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_impossible_rates_and_numbers(rate):
    with pytest.raises(OptionError, match="--rate"):
        poisson(3, rate, MIX, 0)
    with pytest.raises(OptionError, match="--requests 0"):
        poisson(0, 1, MIX, 0)


def test_a_trace_plays_again(tmp_path):
    entries = [Entry(0.0, (1, 2, 3), 4), Entry(0.25, "text", 2), Entry(1.5, 7, 1)]
    write_entries(tmp_path / "a", entries)
    assert read_trace(tmp_path / "a") == entries
    load = arrivals(entries, range(10, 20), lambda text: [len(text)] * 2, 100, 50, seed=1)
    assert [a.tokens for a in load[:2]] == [(1, 2, 3), (4, 4)] and len(load[2].tokens) == 7
    assert set(load[2].tokens) <= set(range(10, 20))
    write_trace(tmp_path / "b", load)
    again = arrivals(read_trace(tmp_path / "b"), (), lambda _: [], 100, 50, seed=2)
    assert again == load


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "no JSON"),
        ("[]", "is a list"),
        ('{"at_s": 0, "prompt_tokens": 3}', "max_tokens is None"),
        ('{"at_s": 0, "prompt_tokens": 3, "max_tokens": 0}', "max_tokens is 0"),
        ('{"at_s": 0, "prompt_tokens": true, "max_tokens": 1}', "prompt_tokens is True"),
        ('{"at_s": -1, "prompt_tokens": 3, "max_tokens": 1}', "at_s is -1"),
        ('{"at_s": NaN, "prompt_tokens": 3, "max_tokens": 1}', "at_s is nan"),
        ('{"at_s": 0, "max_tokens": 1}', "either prompt"),
        ('{"at_s": 0, "prompt": "a", "prompt_tokens": 3, "max_tokens": 1}', "either prompt"),
        ('{"at_s": 0, "prompt": "", "max_tokens": 1}', "prompt is ''"),
        ('{"at_s": 0, "prompt": [1, -2], "max_tokens": 1}', "prompt is"),
        ('{"at_s": 0, "prompt": "a", "max_token": 1}', "unknown key 'max_token'"),
    ],
)
def test_a_wrong_line_of_a_trace(tmp_path, line, rule):
    path = tmp_path / "t.jsonl"
    path.write_text('{"at_s": 0, "prompt_tokens": 3, "max_tokens": 1}\n\n' + line + "\n")
    with pytest.raises(OptionError, match=rule) as error:
        read_trace(path)
    assert f"{path}, line 3" in str(error.value)


def test_traces_that_cannot_be_played(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, rule in (("none", "cannot be read"), ("empty", "no requests"), ("bytes", "not UTF-8")):
        with pytest.raises(OptionError, match=rule):
            read_trace(tmp_path / name)
    with pytest.raises(OptionError, match="request 1 has 8 \\+ 3 tokens, the context holds 10"):
        arrivals([Entry(0, 8, 3)], range(5), list, 5, 10, 0)
    with pytest.raises(OptionError, match="token 9, the model has 5"):
        arrivals([Entry(0, (9,), 3)], range(5), list, 5, 10, 0)


def test_who_shares_a_prefix():
    stem = tuple(range(40))
    assert share_prefixes([Arrival(0, (*stem, 1), 1), Arrival(0, (*stem, 2), 1)])
    assert not share_prefixes([Arrival(0, (*stem, 1), 1), Arrival(0, (7, *stem), 1), Arrival(0, stem[:20], 1)])


# --- playing and counting


class VirtualTime:
    """Goes on only when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        await asyncio.sleep(0)  # others run first
        self.now += seconds


def test_requests_are_sent_when_they_are_due_and_failures_stay_alone():
    time = VirtualTime()
    load = [Arrival(2.0, (1,), 3), Arrival(0.5, (1, 2), 2), Arrival(2.5, (9,), 1)]

    async def send(arrival, served, now):
        if arrival.tokens == (9,):
            raise ConnectionError("gone")
        for i in range(arrival.max_tokens):
            served.token_s.append(now() + i)
        served.n_generated = arrival.max_tokens
        if arrival.max_tokens == 3:
            time.now += 4.0  # as if something held up the client

    served = play(load, send, time.clock, time.sleep)
    assert [(s.due_s, s.sent_s) for s in served] == [(0.5, 0.5), (2.0, 2.0), (2.5, 6.5)]
    assert served[1].token_s == [2.0, 3.0, 4.0] and served[2].error == "ConnectionError: gone"
    assert [s.n_prompt for s in served] == [2, 1, 1]


def test_figures_follow_from_the_moments():
    served = [
        Served(0.0, 0.1, [1.0, 1.1, 1.2, 1.5], n_prompt=10, n_generated=4, n_reused=2, queue_s=0.25),
        Served(1.0, 1.0, [5.0, 5.2], n_prompt=20, n_generated=2, queue_s=0.75),
        Served(2.0, 2.0, [2.5], n_prompt=5, n_generated=1),
        Served(3.0, 3.0, error="refused", n_prompt=100),
    ]
    f = figures(served, ttft_s=2.0, tpot_ms=150)
    assert f.ttft_s_p50 == pytest.approx(1.0) and f.ttft_s_p95 == pytest.approx(1.0 + 0.9 * 3.0)
    assert f.tpot_ms_p50 == pytest.approx(150) and f.stall_ms == pytest.approx(300)
    assert f.stall_by_tpot == pytest.approx(3.0)
    assert f.queue_s_p50 == pytest.approx(0.5)
    assert f.seconds == pytest.approx(5.2) and f.late_ms == pytest.approx(100)
    assert f.prompt_tps == pytest.approx(33 / 5.2) and f.generated_tps == pytest.approx(7 / 5.2)
    assert f.total_tps == pytest.approx(40 / 5.2) and f.request_tps == pytest.approx(3 / 5.2)
    # The second is too late, the last was refused.
    assert f.goodput == 0.5 and f.goodput_tps == pytest.approx(2 / 5.2) and f.n_failed == 1 and f.n_reused == 2
    assert figures(served, 10.0, 150).goodput == 0.5 and figures(served, 10.0, 201).goodput == 0.75
    nothing = figures([Served(0.0, error="x")], 1, 1)
    assert nothing.ttft_s_p50 is None and nothing.total_tps == 0 and nothing.goodput == 0


def test_ratios_are_within_a_round():
    def of(engine: str, i: int, tps: float) -> Round:
        values = dict.fromkeys(Figures.names(), 0.0) | {"total_tps": tps, "queue_s_p50": None}
        return Round(engine, i, Figures(**values), [])

    rounds = [of("a", 0, 10), of("p", 0, 5), of("a", 1, 30), of("p", 1, 10), of("a", 2, 8), of("p", 2, 8)]
    assert ratios(rounds, "a", "p", "total_tps") == 2.0 and ratios(rounds, "a", "p", "queue_s_p50") is None
    assert medians([r.figures for r in rounds if r.engine == "a"]).total_tps == 10


# --- whole runs


def check_round(one: Round, r: EngineRequest) -> None:
    assert [(s.due_s, s.n_generated, s.error) for s in one.served] == [(e.at_s, e.max_tokens, "") for e in r.entries]
    assert one.served[2].n_prompt == 200 and one.served[3].n_prompt == 3
    for s in one.served:
        assert s.due_s <= s.sent_s <= s.token_s[0] and s.token_s == sorted(s.token_s)
        assert 1 <= len(s.token_s) <= s.n_generated
    assert one.figures == figures(one.served, r.sizes["ttft_s"], r.sizes["tpot_ms"])


def test_with_and_without_a_prefill_worker_and_over_http(tmp_path):
    r = request(DEMO, ["worker", "chunked", "serve"], ENTRIES)
    rounds = list(bench_engine(r, tmp_path / "trace.jsonl"))
    assert [one.engine for one in rounds] == r.engines
    for one in rounds:
        check_round(one, r)
    worker, chunked, _ = rounds
    assert [s.via for s in worker.served] == ["decode", "decode", "prefill", "decode"]
    assert {s.via for s in chunked.served} == {"decode"} and all(s.queue_s is not None for s in chunked.served)
    assert worker.counted["prefill_tokens"] == 199 and chunked.counted["prefill_tokens"] == 0
    assert all(len(s.token_s) == s.n_generated for s in (*worker.served, *chunked.served))
    played = read_trace(tmp_path / "trace.jsonl")
    assert [len(e.prompt) for e in played] == [s.n_prompt for s in worker.served]


def test_command_line(tmp_path, capfd):
    common = ["--engines", "chunked", "--rounds", "1", "-t", "1", "-c", "256", "--n-parallel", "2", "--n-batch", "32"]
    load = ["-n", "3", "--rate", "inf", "--mix", "5-9:2-4", "--save-trace", str(tmp_path / "t.jsonl")]
    assert command_line(["bench", "engine", str(DEMO), *common, *load, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["medians"]["chunked"]["n_failed"] == 0 and len(told["rounds"][0]["served"]) == 3
    assert told["medians"]["chunked"]["total_tps"] > 0 and told["by_llama_server"] == {}
    assert command_line(["bench", "engine", str(DEMO), *common, "--trace", str(tmp_path / "t.jsonl")]) == 0
    shown = capfd.readouterr().out
    assert "TTFT p50" in shown and "longest stall" in shown and "chunked" in shown
