"""The engine's parts by themselves: text, cells, pace. No model."""

import threading
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ROOT
from hybrid_moe_ext.engine.arrivals import TimeShare
from hybrid_moe_ext.engine.cache import Cells, common
from hybrid_moe_ext.engine.context import Memory
from hybrid_moe_ext.engine.metrics import RequestMetrics
from hybrid_moe_ext.engine.options import EngineOptions, Threads
from hybrid_moe_ext.engine.pace import Pace
from hybrid_moe_ext.engine.stream import Finish, Stream, Token
from hybrid_moe_ext.engine.text import TextOut

_LETTERS = st.text(alphabet="abé日🙂", max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    text=_LETTERS,
    stops=st.lists(st.text(alphabet="abé日🙂", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=40),
)
def test_text_is_the_same_however_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    out, data, got = TextOut(stops), text.encode(), ""
    for n in [*cuts, len(data)]:
        if out.stopped is None:
            part, data = data[:n], data[n:]
            got += out.add(part)
            assert text.startswith(got)
    got += out.end()
    found = [text.index(stop) for stop in stops if stop in text]
    if out.stopped is None:
        assert not found and got == text
    else:
        # By the time one is complete another may have begun earlier and not be complete: the first complete one counts.
        assert got + out.stopped == text[: len(got) + len(out.stopped)]
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        assert len(got) <= min(ends)


def test_text_that_is_no_utf8() -> None:
    out = TextOut([])
    assert out.add(b"a\xff\xe6") + out.add(b"b") == "a��b"
    assert out.add(b"\xe6\x97") == "" and out.end() == "�"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=40))
def test_cells_count_as_a_unified_cache(steps: list[tuple[int, int]]) -> None:
    """Against the plain definition: a cell is free when no sequence has it."""
    cells, held = Cells(32), []
    for kind, n in steps:
        if kind == 0 and n <= cells.n_free:
            held.append(cells.take(n))
        elif kind == 1 and held:
            held.append(cells.share(held[n % len(held)][:n]))
        elif kind == 2 and held:
            cells.drop(held.pop(n % len(held)))
        assert cells.n_free == 32 - len({int(t) for tickets in held for t in tickets})


@pytest.mark.parametrize(
    ("n", "n_decode", "shares"),
    [(1, 0, (1, 1, 1)), (2, 0, (2, 1, 1)), (8, 0, (8, 4, 4)), (8, 2, (8, 2, 6)), (9, 0, (9, 4, 5)), (4, 9, (4, 3, 1))],
)
def test_cores_are_shared(n: int, n_decode: int, shares: tuple[int, int, int]) -> None:
    assert EngineOptions(n_threads=n, n_threads_decode=n_decode).threads() == Threads(*shares)


def test_options_are_documented() -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    rows = [line.split("|")[1:3] for line in text[text.index("## Options") :].splitlines() if line.startswith("| `")]
    told = {
        name.strip(" `"): value.strip()
        for names, values in rows
        for name, value in zip(names.split(","), values.split(","), strict=True)
    }
    assert told == {f.name: str(f.default) for f in fields(EngineOptions)}


def test_common_prefix() -> None:
    def of(a: list[int], b: list[int]) -> int:
        return common(np.array(a, np.int32), np.array(b, np.int32))

    assert of([], [1]) == 0 and of([1, 2], [1, 2, 3]) == 2 and of([1, 2, 3], [1, 5, 3]) == 1 and of([9], [1]) == 0


def test_memories_say_what_they_can() -> None:
    attention, window = Memory(False, 0, True), Memory(False, 16, True)
    small, recurrent = Memory(False, 16, False), Memory(True, 0, True)
    assert [m.goes_in_pieces for m in (attention, window, small, recurrent)] == [True, False, False, False]
    assert [m.has_prefixes for m in (attention, window, small, recurrent)] == [True, True, False, True]
    assert "any prefix" in str(attention) and "no prefixes" in str(small) and "whole" in str(recurrent)


def _pace(tpot_s: float = 0.05, ttft_s: float = 30) -> Pace:
    """10 ms for one sequence, 20 for two, 1 ms per token of a prompt."""
    pace = Pace(tpot_s, ttft_s, min_chunk=8, max_chunk=512)
    for _ in range(30):
        pace.learn(1, 0, 0.010)
        pace.learn(2, 0, 0.020)
        pace.learn(1, 40, 0.050)
    return pace


def test_chunks_keep_the_service_level() -> None:
    pace = _pace()
    assert pace.chunk(0, 10_000, 30) == 512  # nobody waits for a token
    assert pace.chunk(1, 100, 30) == pytest.approx(40, abs=1)
    assert pace.chunk(2, 100, 30) == pytest.approx(30, abs=1)
    assert _pace(tpot_s=0.01).chunk(2, 100, 30) == 8  # never nothing
    fresh = Pace(0.05, 30, 8, 512)
    assert fresh.chunk(0, 100, 30) == 512 and fresh.chunk(3, 100, 30) == 8  # the first measurement is a careful one


def test_a_late_prompt_gets_more() -> None:
    pace = _pace()
    assert pace.chunk(1, 2000, 1.5) == pytest.approx(66, abs=2)  # 2000 tokens in 30 steps
    assert pace.chunk(1, 20_000, 1.5) == pytest.approx(90, abs=2)  # but no step beyond twice the level
    assert pace.chunk(1, 20_000, -5) == pytest.approx(90, abs=2)


def test_admission_waits_for_the_service_level() -> None:
    pace = Pace(0.05, 30, 8, 512)
    pace.learn(1, 0, 0.03)
    pace.learn(2, 0, 0.08)
    assert pace.admits(1, 0)  # the first step may have been disturbed
    for _ in range(2):
        pace.learn(2, 0, 0.08)
    assert pace.admits(0, 0) and not pace.admits(1, 0)
    assert pace.admits(2, 0)  # three were never measured
    assert pace.admits(1, 30)  # waited too long already
    for _ in range(20):
        pace.learn(2, 0, 0.04)
    assert pace.admits(1, 0)


def test_nobody_waits_for_a_level_that_cannot_be_had() -> None:
    """On a slow machine all came one after the other, each after ttft_s."""
    pace = Pace(0.05, 30, 8, 512)
    for _ in range(5):
        pace.learn(1, 0, 0.06)
        pace.learn(2, 0, 0.08)
    assert pace.admits(1, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 64), st.floats(0, 10)), max_size=20),
    st.integers(0, 4), st.integers(1, 5000), st.floats(-10, 100),
)  # fmt: skip
def test_a_chunk_always_fits_the_batch(learned: list, n_decoding: int, n_waiting: int, left_s: float) -> None:
    pace = Pace(0.05, 30, min_chunk=8, max_chunk=64)
    for n, n_prompt, seconds in learned:
        pace.learn(n, n_prompt, seconds)
    assert 8 <= pace.chunk(n_decoding, n_waiting, left_s) <= 64 - n_decoding


def test_a_stream_across_threads() -> None:
    woken = []
    stream = Stream(1, lambda: woken.append(1))
    with pytest.raises(TimeoutError):
        stream.next(0.01)
    writer = threading.Thread(
        target=lambda: [
            *(stream.put(Token(i, "x")) for i in range(100)),
            stream.end(Finish("length", None, RequestMetrics())),
        ]
    )
    writer.start()
    assert [event.token for event in stream] == list(range(100))
    writer.join()
    stream.fail(ValueError("too late"))  # it has ended already
    assert stream.result(1).text == "" and stream.finish is not None
    stream.cancel()
    assert woken == [1] and stream.cancelled
    failed = Stream(2, lambda: None)
    failed.put(Token(1, "x"))
    failed.fail(ValueError("why"))
    assert failed.next(1) == Token(1, "x")
    told = []
    for _ in range(2):
        with pytest.raises(ValueError, match="why") as info:
            failed.next(1)
        told.append(info.value)
    assert told[0] is not told[1]


@pytest.mark.parametrize(("step_s", "piece_s", "most"), [(0.05, 0.001, 1.0), (0.01, 0.004, 0.3), (0.001, 0.1, 0.01)])
def test_arrivals_take_their_share_of_the_time(step_s: float, piece_s: float, most: float) -> None:
    share, now, n_pieces, in_pieces, began = TimeShare(0.08), 100.0, 0, 0.0, 100.0
    for _ in range(5000):
        if share.may_begin(now):
            share.took(now, now + piece_s)
            now += piece_s
            in_pieces += piece_s
            n_pieces += 1
        now += step_s
    assert 0 < n_pieces <= most * 5000 + 1
    assert in_pieces <= 0.08 * (now - began) + piece_s
