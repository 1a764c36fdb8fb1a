"""Engines whose cells hold too little, so that the store of finished sequences serves."""

import logging
import time

import numpy as np
import pytest

from engine_solo import Gate, assert_nothing_leaked, assert_solo, engine, greedy, prompt, result
from hybrid_moe_ext.engine.context import Context
from test_engine_load import run_callers

pytestmark = pytest.mark.usefixtures("no_deadlock")


# What serves is the store alone: finished sequences have no cells, or hardly any.
KINDS = [
    ("demo", {}),
    ("qwen3-30b", {}),
    ("qwen3-30b", {"n_kept": 8}),
    ("qwen3-30b", {"dual_batch": "on"}),
    ("gpt-oss-120b", {}),
    ("gpt-oss-120b", {"swa_full": False}),
    ("mamba", {}),
]


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_conversations_that_alternate(name: str, options: dict) -> None:
    """Three of them in cells for two: every turn goes on from the store, and answers as if alone."""
    options = {"n_ctx": 256, "n_kept": 0, "n_parallel": 2, **options}
    with engine(name, **options) as e:
        texts = [prompt(55 + 7 * i, seed=i) for i in range(3)]
        known = [0] * 3
        for turn in range(3):
            for i, text in enumerate(texts):
                r = result(e.submit(greedy(text, 8)))
                assert_solo(name, text, r.tokens, is_whole=8)
                assert r.finish.metrics.n_reused == known[i]
                if options["n_kept"] == 0 and turn:
                    assert r.finish.metrics.n_stored == known[i]
                known[i] = len(text) + 7
                texts[i] = text + r.tokens + prompt(9, seed=10 * turn + i)
        m = e.metrics()
        assert m.store_hits == 6 if options["n_kept"] == 0 else m.store_hits >= 1
        assert m.store_tokens >= m.store_hits * 16 and m.store_bytes_now > 0 and m.store_written_bytes > 0
        assert m.reused_tokens >= m.store_tokens
        assert_nothing_leaked(e)
        store = e._store
    assert store.n_bytes == 0 and len(store) == 0


@pytest.mark.parametrize("name", ["demo", "qwen3-30b"])
def test_branches_share_their_pieces(name: str) -> None:
    """A common beginning is stored once, and a branch in the middle of a piece begins there."""
    stem = prompt(53, seed=1)
    with engine(name, n_kept=0, piece_tokens=16) as e:
        for i in range(3):
            text = stem + prompt(10, seed=2 + i)
            r = result(e.submit(greedy(text, 8)))
            assert_solo(name, text, r.tokens, is_whole=8)
            assert r.finish.metrics.n_stored == r.finish.metrics.n_reused == (53 if i else 0)
        e.drain()
        ends = sorted((entry.begin, len(entry.tokens)) for entry in e._store._entries)
        # 0..48 once; of each branch 48..64 and the rest up to its last computed token, the 70th.
        assert ends == [(0, 16), (16, 16), (32, 16), *[(48, 16)] * 3, *[(64, 6)] * 3]
        assert_nothing_leaked(e)


@pytest.mark.parametrize("name", ["qwen3-30b", "gpt-oss-120b", "mamba"])
def test_a_long_rest_goes_to_the_prefill_worker(name: str) -> None:
    """It takes the prefix from the store too, and computes the rest only."""
    with engine(name, n_kept=0, prefill_batch=32) as e:
        first = prompt(70, seed=1)
        r = result(e.submit(greedy(first, 8)))
        result(e.submit(greedy(prompt(80, seed=2), 8)))  # the prefill context has this one now
        n = e.metrics().prefill_tokens
        longer = first + r.tokens[:7] + prompt(80, seed=3)
        r = result(e.submit(greedy(longer, 20)))
        assert r.finish.metrics.via == "prefill" and r.finish.metrics.n_stored == r.finish.metrics.n_reused == 77
        assert_solo(name, longer, r.tokens, is_whole=20)
        assert e.metrics().prefill_tokens - n == 79
        assert_nothing_leaked(e)


def test_pieces_of_a_long_prompt_are_kept_as_they_pass() -> None:
    """Without a copy, while the request still runs: another one can have them."""
    gate = Gate()
    with engine("qwen3-30b", n_kept=0, on_step=gate) as e:
        gate.shut()
        text = prompt(100, seed=1)
        first = e.submit(greedy(text, 30))
        gate.wait_until_held()
        assert e._store.find(np.array([*text, 0], np.int32)) == 96  # six pieces of 16 came whole
        gate.open()
        assert_solo("qwen3-30b", text, result(first).tokens, is_whole=30)
        assert_nothing_leaked(e)


@pytest.mark.parametrize("name", ["qwen3-30b", "mamba"])
def test_reading_stalls_nobody(name: str) -> None:
    """With a service level that leaves no time, a piece per step comes from the store while somebody waits for tokens."""
    seen: list[tuple[int, bool]] = []  # per step: tokens from the store so far, and whether the other stream got one
    other = None

    def on_step(report: object) -> None:
        seen.append((e._workers[0]._exchange.n_tokens, other is not None and other.id in report.decoding))
        gate(report)

    gate = Gate()
    with engine(name, n_kept=0, on_step=on_step, tpot_ms=0.001) as e:
        text = prompt(90, seed=1)
        result(e.submit(greedy(text, 4)))
        gate.shut()
        other = e.submit(greedy(prompt(5, seed=2), 60))
        gate.wait_until_held()
        begun = len(seen)
        late = e.submit(greedy([*text, 5, 6], 4))
        gate.open()
        r = result(late)
        assert r.finish.metrics.n_stored >= 89
        assert_solo(name, [*text, 5, 6], r.tokens, is_whole=4)
        assert_solo(name, prompt(5, seed=2), result(other).tokens, is_whole=60)
        steps = [(b[0] - a[0]) for a, b in zip(seen[begun - 1 :], seen[begun:], strict=False) if b[1]]
        assert max(steps) <= (16 if name == "qwen3-30b" else 90) and sum(steps) >= 89
        assert_nothing_leaked(e)


def test_writing_waits_for_its_share_of_the_time() -> None:
    """While somebody waits for tokens and no time is left for it, nothing is written; when nobody does, everything is."""
    gate = Gate()
    with engine("qwen3-30b", on_step=gate, tpot_ms=0.001, prefill_from=1000) as e:
        gate.shut()
        other = e.submit(greedy(prompt(5, seed=2), 100))
        gate.wait_until_held()
        done = e.submit(greedy(prompt(50, seed=1), 4))
        while not done.is_done:
            gate.step()
        gate.step()
        assert not other.is_done and len(e._workers[0]._cache.kept) == 1 and len(e._store) == 0
        gate.open()
        result(other)
        while e.metrics().store_bytes_now < 4 * 1024:  # on the worker's thread, after the last token
            time.sleep(0.01)
        assert_nothing_leaked(e)
        assert e._store.covers(e._workers[0]._cache.kept[0].history) == 53


@pytest.mark.parametrize(("name", "options"), [("qwen3-30b", {"kept_mib": 0}), ("gpt-oss-120b", {"swa_full": False})])
def test_what_is_to_be_written_stays_in_cells(name: str, options: dict) -> None:
    """Nothing may be kept there for its own sake, and there is no time to write while others wait for tokens."""
    gate = Gate()
    with engine(name, on_step=gate, tpot_ms=0.001, prefill_from=1000, **options) as e:
        gate.shut()
        other = e.submit(greedy(prompt(5, seed=2), 60))
        gate.wait_until_held()
        text = prompt(50, seed=1)
        done = e.submit(greedy(text, 4))
        while not done.is_done:
            gate.step()
        gate.step()
        assert not other.is_done and len(e._workers[0]._cache.kept) == 1 and len(e._store) == 0
        gate.open()
        result(other)
        while e.metrics().kept_now:
            time.sleep(0.01)
        longer = text + result(done).tokens + [7, 8]
        r = result(e.submit(greedy(longer, 20)))
        assert r.finish.metrics.n_stored == 53
        assert_solo(name, longer, r.tokens, is_whole=20)
        assert_nothing_leaked(e)


def test_no_memory_loses_the_entry_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def state(self: Context, seq: int) -> np.ndarray:
        raise MemoryError

    with engine("qwen3-30b", prefill_from=1000, n_kept=0) as e, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(Context, "state", state)
        text = prompt(40, seed=1)
        assert_solo("qwen3-30b", text, result(e.submit(greedy(text, 8))).tokens, is_whole=8)
        assert "store_mib" in caplog.text and e.metrics().store_bytes_now == 0
        monkeypatch.undo()
        assert_solo("qwen3-30b", text, result(e.submit(greedy(text, 8))).tokens, is_whole=8)
        assert e.drain() and e.metrics().store_bytes_now > 0
        assert_nothing_leaked(e)


def test_a_piece_that_cannot_be_installed_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the decode worker, or by the prefill worker, which then has to send more."""
    for n_more in (5, 90):
        with engine("qwen3-30b", n_kept=0) as e:
            text = prompt(90, seed=1)
            result(e.submit(greedy(text, 4)))
            n_left = [2]  # two pieces arrive

            def n_empty(n_left: list = n_left) -> int:
                n_left[0] -= 1
                return 1000 if n_left[0] >= 0 else 0

            monkeypatch.setattr(e._workers[0]._cache, "n_empty", n_empty)
            longer = text + prompt(n_more, seed=2)
            r = result(e.submit(greedy(longer, 20)))
            assert r.finish.metrics.n_stored == r.finish.metrics.n_reused == 32
            assert r.finish.metrics.via == ("prefill" if n_more == 90 else "decode")
            assert_solo("qwen3-30b", longer, r.tokens, is_whole=20)
            assert_nothing_leaked(e)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-30b", {"n_ctx": 256, "n_kept": 2, "piece_tokens": 7, "pieces_ahead": 1, "store_mib": 0.5}),
        ("qwen3-30b", {"n_ctx": 224, "n_kept": 0, "prefill_from": 30, "prefill_batch": 32, "n_parallel": 3}),
        ("gpt-oss-120b", {"n_ctx": 256, "n_kept": 1, "store_mib": 1}),
        ("gpt-oss-120b", {"swa_full": False}),
        ("qwen3-30b", {"n_kept": 1, "dual_batch": "on", "store_mib": 0.5}),
        ("mamba", {"n_kept": 0, "store_mib": 0.5}),
    ],
)
def test_random_requests(name: str, options: dict) -> None:
    """Cancels, deadlines and hardly any cells; the budget holds after every step."""
    over: list[int] = []

    def on_step(report: object) -> None:
        if e._store.n_bytes > e._store.limit_bytes:
            over.append(e._store.n_bytes)

    with engine(name, on_step=on_step, **options) as e:
        callers = run_callers(e, range(100, 104), n_each=25)
        for text, _, _, tokens in (one for caller in callers for one in caller.got):
            assert_solo(name, text, tokens)
        m = e.metrics()
        assert m.store_hits > 0 and m.store_tokens > 0 and not over
        if options.get("store_mib", 1) < 1:
            assert m.store_evictions > 0
        assert_nothing_leaked(e)


def test_what_another_lane_writes_meanwhile_leaves_nothing_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the store and the lease of what it has, another lane wrote all of this long prompt."""
    with engine("qwen3-30b", n_kept=0) as e:
        text = prompt(90, seed=1)
        result(e.submit(greedy(text, 4)))
        monkeypatch.setattr(e._store, "find", lambda prompt: 0)
        r = result(e.submit(greedy(text, 8)))
        assert_solo("qwen3-30b", text, r.tokens, is_whole=8)
        assert r.finish.metrics.via == "decode" and r.finish.metrics.n_stored == r.finish.metrics.n_reused == 89
        assert_nothing_leaked(e)
