"""Dual batch: two decode contexts, and still every stream is its solo run, nothing is lost and nobody waits for ever."""

import threading

import pytest

import test_engine_load
from engine_solo import (
    DEADLOCK_S,
    Gate,
    assert_nothing_leaked,
    assert_solo,
    engine,
    greedy,
    prompt,
    result,
)
from hybrid_moe_ext.engine import Engine, StepReport
from hybrid_moe_ext.engine import engine as engine_module
from hybrid_moe_ext.engine.dual import Measured
from hybrid_moe_ext.engine.measure import measure as real_measure
from hybrid_moe_ext.errors import EngineClosed

pytestmark = pytest.mark.usefixtures("no_deadlock")

MODELS = ["demo", "gpt-oss-120b", "mamba"]


def dual(name: str, **options: object) -> Engine:
    e = engine(name, **{"dual_batch": "on", **options})
    assert len(e._workers) == 2 and str(e.dual_batch) == "dual batch: on from 2 sequences (as given)"
    return e


def _lanes_of(reports: list) -> dict[int, set[int]]:
    """Request -> the lanes that computed it."""
    lanes: dict[int, set[int]] = {}
    for r in reports:
        for id in (*r.decoding, *dict(r.chunks)):
            lanes.setdefault(id, set()).add(r.lane)
    return lanes


@pytest.mark.parametrize("name", MODELS)
def test_every_stream_is_its_solo_run(name: str) -> None:
    """Short and long prompts in both lanes, with prefixes, in several rounds; each request stays in its lane."""
    reports: list = []
    base = prompt(70, seed=1)
    prompts = [
        base[:3], prompt(90, seed=2), base[:40], prompt(17, seed=3), prompt(150, seed=4), base, base + prompt(30, seed=5),
        prompt(90, seed=2) + prompt(20, seed=6), base[:40], prompt(90, seed=7),
    ]  # fmt: skip
    with dual(name, on_step=reports.append) as e:
        assert [c.n_ctx for c in e._contexts[1:]] == [512, 256]
        streams = [e.submit(greedy(p)) for p in prompts]
        for p, s in zip(prompts, streams, strict=True):
            assert_solo(name, p, result(s).tokens, is_whole=24)
        assert all(len(lanes) == 1 for lanes in _lanes_of(reports).values())
        assert {r.lane for r in reports} == {0, 1}
        via = [s.finish.metrics.via for s in streams if s.finish]
        assert via.count("prefill") >= 3
        m = e.metrics()
        assert m.lanes_now == 2 and m.dual_from_now == 2 and m.dual_gain_now == 0
        assert m.cells == sum(c.n_ctx for c in e._contexts[1:])
        assert m.steps == len(reports) and 0 < m.dual_steps <= m.steps
        assert m.finished == {"length": len(prompts)} and m.running_now == m.prefilling_now == 0
        assert_nothing_leaked(e)


class FirstLaneGate(Gate):
    """Holds the first lane's worker only."""

    def __call__(self, report: StepReport) -> None:
        if report.lane == 0:
            super().__call__(report)
        else:
            self.reports.append(report)


def test_sequences_are_divided_and_a_prefix_is_followed() -> None:
    gate = FirstLaneGate()
    with dual("qwen3-30b", on_step=gate, n_parallel=6) as e:
        texts = [prompt(40, seed=i) for i in range(2)]
        gate.shut()
        first = e.submit(greedy(texts[0], 40))
        gate.wait_until_held()
        second = e.submit(greedy(texts[1], 40))
        result(second)
        gate.open()
        result(first)
        assert _lanes_of(gate.reports) == {first.id: {0}, second.id: {1}}
        # Each conversation goes on where its first turn was, though the other lane is as empty.
        for text in texts:
            r = result(e.submit(greedy([*text, 5, 6], 8)))
            assert r.finish.metrics.n_reused == 40
        assert_nothing_leaked(e)


def test_what_is_too_long_for_the_second_lane_waits_for_the_first() -> None:
    reports: list = []
    with dual("demo", on_step=reports.append) as e:
        long = [e.submit(greedy(prompt(220, seed=i), 40)) for i in range(3)]  # of 512 and 256 cells
        short = [e.submit(greedy(prompt(9, seed=i), 9)) for i in range(3, 6)]
        results = [result(s) for s in (*long, *short)]
        lanes = _lanes_of(reports)
        assert all(lanes[s.id] == {0} for s in long)
        assert any(lanes[s.id] == {1} for s in short)
        for i, r in enumerate(results):
            assert_solo("demo", prompt(220 if i < 3 else 9, seed=i), r.tokens)
        assert_nothing_leaked(e)


def test_a_lane_that_is_held_up_holds_up_nobody() -> None:
    """While one lane stands still, the other one serves and cancels its own requests."""
    gate = FirstLaneGate()
    with dual("qwen3-30b", on_step=gate, n_parallel=2) as e:
        gate.shut()
        first = e.submit(greedy(prompt(9, seed=1), 30))
        gate.wait_until_held()
        for i in range(3):
            second = e.submit(greedy(prompt(9, seed=2 + i), 12))
            assert_solo("qwen3-30b", prompt(9, seed=2 + i), result(second).tokens, is_whole=12)
        cancelled = e.submit(greedy(prompt(9, seed=8), 100))
        cancelled.cancel()
        assert len(list(cancelled)) <= 100 and cancelled.finish is not None
        gate.open()
        assert_solo("qwen3-30b", prompt(9, seed=1), result(first).tokens, is_whole=30)
        assert_nothing_leaked(e)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-30b", {"queue": 16}),
        (
            "qwen3-30b",
            {"n_ctx": 512, "n_kept": 3, "n_batch": 24, "piece_tokens": 7, "pieces_ahead": 1, "n_parallel": 5},
        ),
    ],
)
def test_random_requests(name: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As test_engine_load has it: random prompts, limits, cancels and consumers."""
    monkeypatch.setattr(test_engine_load, "engine", dual)
    monkeypatch.setattr(test_engine_load, "N_EACH", 30)
    test_engine_load.check_random_requests(name, options, monkeypatch)


def test_close_tells_both_lanes() -> None:
    with dual("qwen3-30b") as e:
        streams = [e.submit(greedy(prompt(9, seed=i), 200)) for i in range(8)]
        assert streams[0].next(DEADLOCK_S) is not None
    for s in streams:
        assert s.is_done


def test_closing_while_a_lane_lets_somebody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lane has ended by then, and told all that waited."""
    with dual("qwen3-30b") as e:
        cache, first = e._workers[1]._cache, e._threads[0]
        real = cache.open
        submitted = threading.Event()

        def closing(*arguments: object) -> object:
            assert submitted.wait(DEADLOCK_S)
            e._mail.close()
            first.join(2)  # it ends now, or waits for us
            return real(*arguments)

        monkeypatch.setattr(cache, "open", closing)
        streams = [e.submit(greedy(prompt(9, seed=i), 200)) for i in range(6)]
        submitted.set()
        for s in streams:
            with pytest.raises(EngineClosed):
                list(s)
        e.close_threads()
        assert e._mail.failure is None


@pytest.mark.parametrize("wins", [False, True])
def test_auto_measures_and_keeps_what_is_faster(wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real measurement on contexts of this machine; what it says is replaced, so that this machine does not decide."""
    seen: list = []

    def measure(*arguments: object) -> tuple[Measured, ...]:
        measured = real_measure(*arguments)
        assert all(m.single_s > 0 and m.dual_s > 0 for m in measured)
        seen.extend(m.n for m in measured)
        return tuple(Measured(m.n, 1.5 if wins else 0.9, 1.0) for m in measured)

    monkeypatch.setattr(engine_module, "attention_on_gpu", lambda placement: True)
    monkeypatch.setattr(engine_module, "measure", measure)
    with engine("qwen3-30b") as e:
        assert seen[0] == 4 and set(seen) <= {2, 4}
        assert len(e._contexts) == len(e._workers) + 1 == (3 if wins else 2)
        m = e.metrics()
        assert m.lanes_now == (2 if wins else 1) and m.dual_from_now == (min(seen) if wins else 0)
        assert m.dual_gain_now == (1.5 if wins else 0.9)
        streams = [e.submit(greedy(prompt(20, seed=i))) for i in range(6)]
        for i, s in enumerate(streams):
            assert_solo("qwen3-30b", prompt(20, seed=i), result(s).tokens, is_whole=24)
        assert_nothing_leaked(e)


def test_auto_on_a_cpu_measures_nothing() -> None:
    with engine("qwen3-30b") as e:
        assert len(e._workers) == 1 and "attention is not on a GPU" in str(e.dual_batch)


def test_without_memory_for_a_second_context_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_module.Engine._new_decode_context
    monkeypatch.setattr(
        engine_module.Engine,
        "_new_decode_context",
        lambda self, n_ctx: real(self, n_ctx) if n_ctx == 512 else None,
    )
    with engine("qwen3-30b", dual_batch="on") as e:
        assert len(e._workers) == 1
        assert str(e.dual_batch) == "dual batch: off (no memory for a second decode context of 256 tokens)"
        assert_solo("qwen3-30b", prompt(5), result(e.submit(greedy(prompt(5)))).tokens, is_whole=24)
