"""What the timeline makes of spans: batches, the last prompt's, lanes, bars that are one; and the plug-in's rings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_solo import engine, greedy, prompt, result
from hybrid_moe_ext._native import library
from hybrid_moe_ext.server.timeline import Timeline, _lane, _last_prefill, _passes

MS = 1_000_000


def layer(i: int, begin_ms: float, ms: float = 1, rows: int = 64, thread: int = 1) -> dict[str, Any]:
    return {
        "process": "layers", "lane": "layer", "name": "layer", "layer": f"blk.{i}.ffn_up_exps.weight", "expert": -1, "bytes": 0,
        "begin_ns": int(begin_ms * MS), "end_ns": int((begin_ms + ms) * MS), "rows": rows, "thread": thread,
    }  # fmt: skip


def test_batches_of_one_prompt_belong_together() -> None:
    old = [layer(i, t) for i, t in enumerate((0, 2, 4))]
    new = [layer(i, 5000 + 10 * b + 2 * i, rows=64 if b < 2 else 7) for b in range(3) for i in range(3)]
    assert [len(p) for p in _passes(old + new)] == [3, 3, 3, 3]
    assert _last_prefill(old + new) == new
    assert _last_prefill([]) == []


def test_other_threads_are_other_prompts() -> None:
    ours = [layer(i, 2 * i) for i in range(3)]
    other = [layer(i, 2 * i + 1, rows=16, thread=2) for i in range(2)]
    spans = sorted(ours + other, key=lambda s: s["begin_ns"])
    assert _last_prefill(spans) == ours


def test_bars_that_no_screen_tells_apart_are_one() -> None:
    experts = [layer(0, i * 0.01, ms=0.009) | {"name": "expert", "lane": "upload", "bytes": 10} for i in range(5000)]
    experts.append(layer(1, 60) | {"name": "expert", "lane": "upload", "bytes": 1})
    lane = _lane("GPU0", "upload", experts, 0, 100 * MS)
    assert [(bar["layer"], bar["n"], bar["bytes"]) for bar in lane["bars"]] == [
        ("layer 0", 5000, 50000),
        ("layer 1", 1, 1),
    ]
    assert lane["busy"] == pytest.approx(0.46)


def test_the_plug_in_keeps_the_last_prefill_and_no_decode() -> None:
    with engine("demo", n_parallel=4) as e:
        timeline = Timeline(e)
        assert timeline.read()["lanes"] == []
        result(e.submit(greedy(prompt(40), 20)))
        told = timeline.read()
        assert told["passes"][0]["tokens"] == 40 and told["tokens"] == 40 and told["milliseconds"] > 0
        assert [(lane["device"], lane["lane"]) for lane in told["lanes"]] == [("CPU", "layers")]
        # The last layer computes only the rows whose logits are wanted: one here.
        assert [bar["layer"] for bar in told["lanes"][0]["bars"]] == ["layer 1", "layer 2"]
        assert 0 < told["lanes"][0]["busy"] <= 1
        result(e.submit(greedy(prompt(200, seed=1), 2)))  # goes to the prefill worker
        assert timeline.read()["tokens"] >= 199
        n = 0
        for seed in range(4, 8):
            result(e.submit(greedy(prompt(30, seed), 2)))
            n = len(json.loads(library().hybrid_moe_recorded(1, 0, 2**62)))
        assert 0 < n <= 4096
        library().hybrid_moe_record(0)
        assert json.loads(library().hybrid_moe_recorded(1, 0, 2**62)) == []


def test_another_engine_has_no_prefill_of_this_one() -> None:
    with engine() as first:
        seen = Timeline(first)
        result(first.submit(greedy(prompt(200), 1)))
        assert seen.read()["lanes"]
    with engine() as second:
        assert Timeline(second).read()["why"] == "No prompt has been computed yet."
