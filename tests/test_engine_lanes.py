"""Dual batch without a model: what is decided from which measurements, and which request goes to which lane."""

from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_moe_ext.engine import EngineMetrics, EngineOptions
from hybrid_moe_ext.engine.dual import DualBatch, Measured, decide, why_single
from hybrid_moe_ext.engine.lanes import Lanes
from hybrid_moe_ext.engine.running import Running
from hybrid_moe_ext.errors import OptionError

ON = DualBatch(True, "as given")


def _running(prompt: list[int], max_tokens: int = 4, job: object = None) -> Running:
    fields = {"prompt": np.array(prompt, np.int32), "max_tokens": max_tokens, "job": job, "lane": None}
    return SimpleNamespace(**fields, is_assigned=False)


def _assign(lanes: Lanes, prompt: list[int] = [1], n_waiting: int = 1, max_tokens: int = 4) -> int:  # noqa: B006
    running = _running(prompt, max_tokens)
    lanes.assign(running, [running, *(_running([1]) for _ in range(n_waiting - 1))])
    assert running.is_assigned
    return running.lane


def _lanes(n_first: int, n_second: int, dual: DualBatch = ON, n_parallel: int = 8) -> Lanes:
    lanes = Lanes([1000, 500], n_parallel, dual)
    for lane, n in zip(lanes.all, (n_first, n_second), strict=True):
        lane.running.extend(_running([1]) for _ in range(n))
    return lanes


def test_what_is_not_faster_is_off() -> None:
    chosen = decide((Measured(8, 0.100, 0.099), Measured(2, 0.050, 0.060)))
    assert not chosen.is_on and chosen.begins_at == 0 and not any(chosen.uses_both(n) for n in range(20))
    assert str(chosen) == (
        "dual batch: off (not measured faster: 2 sequences: 50.0 ms in one, 60.0 ms in two; "
        "8 sequences: 100.0 ms in one, 99.0 ms in two)"
    )
    assert not decide(()).is_on


def test_it_is_on_from_the_size_that_wins() -> None:
    chosen = decide((Measured(8, 0.150, 0.100), Measured(2, 0.050, 0.050), Measured(4, 0.090, 0.080)))
    assert chosen.is_on and chosen.begins_at == 4 and chosen.best_gain == pytest.approx(1.5)
    assert [n for n in range(12) if chosen.uses_both(n)] == list(range(4, 12))
    assert str(chosen).startswith("dual batch: on from 4 sequences (measured faster: 2 sequences: ")


def test_sizes_that_lose_again_are_one_batch() -> None:
    chosen = decide((Measured(2, 0.05, 0.04), Measured(6, 0.10, 0.12)))
    assert [n for n in range(9) if chosen.uses_both(n)] == [2, 3, 4, 5]


def test_a_size_that_was_not_measured_is_unknown() -> None:
    assert [n for n in range(9) if decide((Measured(6, 2.0, 1.0),)).uses_both(n)] == [6, 7, 8]


def test_what_needs_no_measurement() -> None:
    assert why_single(EngineOptions(dual_batch="off"), True) == "as given"
    assert "not on a GPU" in why_single(EngineOptions(), False)
    assert why_single(EngineOptions(), True) == "" == why_single(EngineOptions(dual_batch="on"), False)
    assert why_single(EngineOptions(n_parallel=1), True) == "n_parallel=1"
    with pytest.raises(OptionError, match="n_parallel from 2 on"):
        EngineOptions(dual_batch="on", n_parallel=1)
    with pytest.raises(OptionError, match="dual_batch='yes' is not possible: choose one of auto, on, off"):
        EngineOptions(dual_batch="yes")


def test_sequences_are_balanced() -> None:
    assert _assign(_lanes(0, 0), n_waiting=4) == 0
    assert _assign(_lanes(1, 0)) == 1 and _assign(_lanes(1, 2)) == 0 and _assign(_lanes(2, 2)) == 0


def test_who_waits_in_a_lane_counts_there() -> None:
    """Six at once, of which none is let in yet."""
    lanes, waiting = _lanes(0, 0), [_running([1]) for _ in range(6)]
    for running in waiting:
        lanes.assign(running, waiting)
    assert [running.lane for running in waiting] == [0, 1, 0, 1, 0, 1]


def test_few_sequences_are_one_batch() -> None:
    dual = decide((Measured(2, 1.0, 1.0), Measured(4, 1.5, 1.0)))
    assert _assign(_lanes(1, 0, dual)) == 0 and _assign(_lanes(0, 2, dual)) == 1
    assert _assign(_lanes(3, 0, dual)) == 1  # the fourth
    assert _assign(_lanes(1, 0, dual), n_waiting=3) == 1  # who waits will run too
    assert _assign(_lanes(1, 0, dual, n_parallel=3), n_waiting=3) == 0  # but not beyond n_parallel


def test_a_prefix_is_followed_unless_that_unbalances() -> None:
    prompt = list(range(20))

    def known(n_first: int, n_second: int, dual: DualBatch = ON, n: int = 20) -> int:
        lanes = _lanes(n_first, n_second, dual)
        lanes.all[1].prefixes = (np.arange(n, dtype=np.int32),)
        return _assign(lanes, list(range(max(20, n))))

    assert known(1, 1) == 1 and known(1, 2) == 1 and known(1, 3) == 0
    assert known(1, 1, n=7) == 0  # a few tokens are nothing
    few = decide((Measured(8, 1.5, 1.0),))
    assert known(0, 0, few) == 1 and known(1, 0, few) == 0 and known(1, 0, few, n=300) == 1
    assert _assign(_lanes(1, 0), prompt) == 1


def test_the_longest_go_where_they_fit() -> None:
    assert _assign(_lanes(4, 0), max_tokens=600) == 0


def test_only_one_admits_and_who_missed_it_is_woken() -> None:
    lanes = _lanes(0, 0)
    assert lanes.begin_admitting() and not lanes.begin_admitting()
    assert lanes.end_admitting() and lanes.begin_admitting() and not lanes.end_admitting()


def test_counts_of_two_workers_add_up() -> None:
    a = EngineMetrics(steps=3, finished={"stop": 1}, chunk_now=8, decode_seconds=1.5, lanes_now=2)
    b = EngineMetrics(steps=4, finished={"stop": 2, "length": 1}, chunk_now=5, decode_seconds=0.5, lanes_now=2)
    both = a.plus(b)
    assert (both.steps, both.decode_seconds, both.chunk_now, both.lanes_now) == (7, 2.0, 8, 2)
    assert both.finished == {"stop": 3, "length": 1}
