"""The store of finished sequences by itself, without a model: what it finds, its budget, and threads that share it."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_moe_ext.engine.store import Store

pytestmark = pytest.mark.usefixtures("no_deadlock")

P = 4  # tokens of a piece, without a model
N_STATE = 64  # bytes of a made-up state


def _tokens(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _then(tokens: np.ndarray, token: int) -> np.ndarray:
    return np.append(tokens, np.int32(token))


def _state(tokens: np.ndarray, end: int) -> np.ndarray:
    """Bytes that only this history has, so that a wrong piece shows."""
    return np.random.default_rng([len(tokens[:end]), *tokens[:end].tolist()]).integers(0, 256, N_STATE).astype(np.uint8)


def _write(store: Store, tokens: np.ndarray) -> bool:
    if not store.in_pieces:
        return store.add(tokens, 0, len(tokens), _state(tokens, len(tokens)))
    begin = store.covers(tokens) // P * P
    return all(
        store.add(tokens, b, min(b + P, len(tokens)), _state(tokens, min(b + P, len(tokens))))
        for b in range(begin, len(tokens), P)
    )


def _check_lease(store: Store, asked: np.ndarray) -> int:
    """What is taken is of this very history. Returns its tokens."""
    lease = store.take(asked)
    if lease is None:
        return 0
    position = 0
    while position < lease.n:
        piece = lease.piece(position)
        assert piece is not None and piece.begin == position < piece.end <= len(asked) - 1
        entry_tokens = next(e for e in store._entries if e.state is piece.state)
        history = np.concatenate([e.tokens for e in list(entry_tokens.up())[::-1]])
        assert np.array_equal(history[: piece.end], asked[: piece.end])
        assert np.array_equal(piece.state, _state(history, len(history)))
        position = piece.end
    assert lease.piece(lease.n) is None
    n = lease.n
    lease.give_back()
    lease.give_back()
    return n


def _prefix(a: np.ndarray, b: np.ndarray) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_HISTORIES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=25)


@settings(max_examples=60, deadline=None)
@given(_HISTORIES, _HISTORIES, st.booleans())
def test_with_room_the_longest_prefix_is_found(written: list, asked: list, in_pieces: bool) -> None:
    store = Store(1e9, P, in_pieces)
    histories = [_tokens(h) for h in written]
    assert all(_write(store, h) for h in histories)
    for prompt_ in map(_tokens, asked):
        usable = prompt_[:-1]
        commons = [_prefix(h, usable) for h in histories]
        if not in_pieces:
            commons = [n for n, h in zip(commons, histories, strict=True) if n == len(h)]
        assert store.find(prompt_) == max(commons, default=0) == _check_lease(store, prompt_)
    store.close()
    assert store.n_bytes == len(store) == 0 and not _write(store, _tokens([1, 2, 3]))


@settings(max_examples=60, deadline=None)
@given(_HISTORIES, st.integers(1, 9), st.booleans())
def test_the_budget_holds_and_what_is_left_is_right(written: list, n_fit: int, in_pieces: bool) -> None:
    entry = N_STATE + P * 4 + 1024
    store = Store(n_fit * entry, P, in_pieces)
    for h in map(_tokens, written):
        pinned = store.take(_then(h, 0))
        _write(store, h)
        assert store.n_bytes == sum(e.n_bytes for e in store._entries) <= n_fit * entry
        if pinned:
            assert all(e in store._entries for e in pinned._last.up())
            pinned.give_back()
        for prompt_ in map(_tokens, written[:3]):
            _check_lease(store, prompt_)
        # A piece is never there without those before it.
        assert all(p is store._root or p in store._entries for p in (e.parent for e in store._entries))
    assert store.n_evicted >= 0 and store.n_bytes_written >= len(store) * N_STATE


def test_the_longest_unused_goes_first() -> None:
    entry = N_STATE + P * 4 + 1024
    store = Store(4 * entry, P, True)
    a, b, c = _tokens([1] * 8), _tokens([1] * 4 + [2] * 4), _tokens([3] * 4)
    for h in (a, b, c):
        assert _write(store, h)
    assert len(store) == 4  # the first piece is a's and b's
    assert store.take(_then(a, 0)).n == 8  # pinned, and used
    assert _write(store, _tokens([4] * 4)) and store.find(_then(b, 0)) == 4 and store.n_evicted == 1
    assert _write(store, _tokens([5] * 4)) and store.find(_then(c, 0)) == 0
    assert store.find(_then(a, 0)) == 8


def test_a_whole_state_gives_way_to_the_one_that_continues_it() -> None:
    """A conversation that goes on throws out its own past before others' last states."""
    store = Store(2 * (N_STATE + 40 + 1024), P, False)
    other, mine = _tokens([1] * 4), _tokens(range(10))
    for h in (mine[:4], other, mine[:7], mine[:10]):
        assert _write(store, h)
    assert len(store) == 2 and store.find(_then(other, 0)) == 4 and store.find(_then(mine, 0)) == 10


def test_a_longer_piece_replaces_its_beginning() -> None:
    store = Store(1e9, P, True)
    for n in (2, 3, 4, 3):
        assert _write(store, _tokens([1, 2, 3, 4][:n]))
        assert len(store) == 1
    assert store.find(_tokens([1, 2, 3, 9])) == 3
    assert not store.add(_tokens([9] * 8), 4, 8, np.zeros(4, np.uint8))  # nobody has what comes before
    assert not Store(100, P, True).add(_tokens([9]), 0, 1, np.zeros(1000, np.uint8))


@pytest.mark.parametrize("in_pieces", [True, False])
def test_python_s_own_bytes_are_counted(in_pieces: bool) -> None:
    n = 100
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 1000, 2 * P).astype(np.int32) for _ in range(n)]
    store = Store(1e9, P, in_pieces)
    gc.collect()
    tracemalloc.start()
    try:
        for h in histories:
            for begin in (0, P) if in_pieces else (0,):
                assert store.add(h, begin, begin + P if in_pieces else 2 * P, np.zeros(N_STATE, np.uint8))
        held = tracemalloc.get_traced_memory()[0]
        assert 0.3 * store.n_bytes < held < store.n_bytes
        store.close()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 0.02 * held
    finally:
        tracemalloc.stop()


def test_threads_share_it() -> None:
    store = Store(20 * (N_STATE + P * 4 + 1024), P, True)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                h = rng.integers(0, 2, rng.integers(1, 20)).astype(np.int32)
                _write(store, h)
                lease = store.take(h)
                if lease is not None:
                    for p in (lease.piece(i) for i in range(0, lease.n, P)):
                        assert p is not None and len(p.state) == N_STATE
                    lease.give_back()
                assert store.n_bytes <= store.limit_bytes
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.n_bytes == sum(e.n_bytes for e in store._entries) and all(e.n_pins == 0 for e in store._entries)
