"""Requests that do not simply end: a full queue, deadlines, cancels, an engine that drains, closes or fails."""

import threading

import pytest

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
from hybrid_moe_ext import errors

pytestmark = pytest.mark.usefixtures("no_deadlock")


def test_a_full_queue_is_refused() -> None:
    gate = Gate()
    with engine("qwen3-30b", n_parallel=2, queue=3, on_step=gate) as e:
        gate.shut()
        streams = [e.submit(greedy(prompt(5), 5))]
        gate.wait_until_held()
        streams += [e.submit(greedy(prompt(5), 5)) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(errors.EngineBusy, match="3 requests wait"):
                e.submit(greedy(prompt(5), 5))
        with pytest.raises(errors.RequestError):  # a bad request is bad, not early
            e.submit(greedy([], 5))
        assert e.metrics().refused == 2 and e.metrics().queued_now == 3
        gate.open()
        for s in streams:
            assert_solo("qwen3-30b", prompt(5), result(s).tokens, is_whole=5)
        assert_nothing_leaked(e)


def test_deadlines() -> None:
    gate = Gate()
    with engine("qwen3-30b", n_parallel=1, on_step=gate) as e:
        gate.shut()
        running = e.submit(greedy(prompt(5), 400, deadline_s=1e6))
        gate.wait_until_held()
        queued = e.submit(greedy(prompt(5), 5, deadline_s=0.0))
        gate.step()
        e._workers[0]._running[0].deadline = 0  # time passes while the engine is held
        gate.open()
        r = result(running)
        assert r.finish.reason == "deadline" and 1 <= len(r.tokens) < 400
        assert_solo("qwen3-30b", prompt(5), r.tokens)
        with pytest.raises(errors.DeadlinePassed, match=r"0\.0 s"):
            result(queued)
        with pytest.raises(TimeoutError):
            result(queued)  # whoever asks again
        after = result(e.submit(greedy(prompt(5), 5, deadline_s=1e6)))
        assert after.finish.reason == "length"
        assert e.metrics().finished == {"deadline": 2, "length": 1}
        assert_nothing_leaked(e)


def test_an_idle_engine_notices_a_deadline() -> None:
    """Of a prompt that the prefill worker has, while nothing else happens in the decode worker."""
    with engine("qwen3-30b", prefill_from=10, prefill_batch=1) as e:
        with pytest.raises(errors.DeadlinePassed):
            result(e.submit(greedy(prompt(200), 5, deadline_s=0.001)))
        assert_nothing_leaked(e)


@pytest.mark.parametrize("name", ["qwen3-30b", "mamba"])
def test_cancel_in_every_state(name: str) -> None:
    gate = Gate()
    with engine(name, n_parallel=3, on_step=gate, prefill_batch=16) as e:
        gate.shut()
        decoding = e.submit(greedy(prompt(5, seed=1), 400))
        gate.wait_until_held()
        prefilling = e.submit(greedy(prompt(150, seed=2), 5))
        bystander = e.submit(greedy(prompt(9, seed=3), 30))
        queued = e.submit(greedy(prompt(5, seed=4), 5))
        while not any(prefilling.id in r.prefilling for r in gate.reports):
            gate.step()
        for s in (queued, prefilling, decoding):
            s.cancel()
            s.cancel()
        gate.open()
        for s, p in ((queued, 4), (prefilling, 2), (decoding, 1)):
            r = result(s)
            assert r.finish.reason in ("cancelled", "length")
            assert_solo(name, prompt(150 if p == 2 else 5, seed=p), r.tokens)
        assert result(decoding).finish.reason == "cancelled"
        assert_solo(name, prompt(9, seed=3), result(bystander).tokens, is_whole=30)
        gate.shut()
        with e.submit(greedy(prompt(5), 400)) as left:  # as a context manager
            gate.wait_until_held()
            gate.step()
            next(iter(left))
        gate.open()
        assert result(left).finish.reason == "cancelled"
        assert_nothing_leaked(e)


def test_cancel_with_pieces_on_the_way() -> None:
    """The prefill worker waits for room for the next piece, others lie there: all of them are dropped, and it goes on."""
    gate = Gate()
    with engine("qwen3-30b", on_step=gate, prefill_batch=16, piece_tokens=8, pieces_ahead=3) as e:
        gate.shut()
        bystander = e.submit(greedy(prompt(5, seed=1), 60))
        gate.wait_until_held()
        long = e.submit(greedy(prompt(200, seed=2), 5))
        gate.step()
        while len(e._mail.pieces) < 3:
            threading.Event().wait(0.002)
        long.cancel()
        gate.open()
        assert result(long).finish.reason == "cancelled" and result(long).tokens == []
        again = e.submit(greedy(prompt(200, seed=3), 5))
        assert_solo("qwen3-30b", prompt(200, seed=3), result(again).tokens, is_whole=5)
        assert_solo("qwen3-30b", prompt(5, seed=1), result(bystander).tokens, is_whole=60)
        assert_nothing_leaked(e)


def test_close_while_running() -> None:
    gate = Gate()
    e = engine("qwen3-30b", n_parallel=2, on_step=gate, prefill_batch=16)
    gate.shut()
    streams = [e.submit(greedy(prompt(5), 400))]
    gate.wait_until_held()
    streams += [e.submit(greedy(prompt(150), 5)), e.submit(greedy(prompt(5), 5))]
    told: list[int] = []

    def wait(i: int) -> None:
        with pytest.raises(errors.EngineClosed):
            result(streams[i])
        told.append(i)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(3)]
    threads.append(threading.Thread(target=e.close))
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(DEADLOCK_S)
        assert not thread.is_alive()
    assert sorted(told) == [0, 1, 2]
    assert all(s.is_done and s.finish is None for s in streams)
    with pytest.raises(errors.EngineClosed):
        e.submit(greedy(prompt(5), 5))
    e.close()


def test_the_model_stays_while_a_caller_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that closes waits for a submit() in another thread's tokenizer; later ones read nothing any more."""
    e = engine("demo")
    real, closing = e.llama.tokenize, threading.Thread(target=e.close)

    def tokenize(*arguments: object) -> list[int]:
        closing.start()
        closing.join(2)
        assert closing.is_alive() and e.llama.model is not None
        return real(*arguments)

    monkeypatch.setattr(e.llama, "tokenize", tokenize)
    with pytest.raises(errors.EngineClosed):
        e.submit(greedy([5], 5)) if e.tokenize("This program is") else None
    closing.join(DEADLOCK_S)
    assert not closing.is_alive()
    for use in (lambda: e.tokenize("a"), lambda: e.detokenize([5]), lambda: e.submit(greedy([5], 5))):
        with pytest.raises(errors.EngineClosed):
            use()


def test_drain() -> None:
    gate = Gate()
    with engine("qwen3-30b", on_step=gate) as e:
        gate.shut()
        s = e.submit(greedy(prompt(5), 30))
        gate.wait_until_held()
        assert not e.drain(0.05)
        with pytest.raises(errors.EngineClosed):
            e.submit(greedy(prompt(5), 5))
        gate.open()
        assert e.drain(DEADLOCK_S)
        assert_solo("qwen3-30b", prompt(5), result(s).tokens, is_whole=30)


def test_an_error_of_ours_ends_the_engine_and_tells_everybody() -> None:
    def broken(report: object) -> None:
        raise ZeroDivisionError("in on_step")

    previous, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with engine("qwen3-30b", on_step=broken) as e:
            s = e.submit(greedy(prompt(5), 30))
            with pytest.raises(errors.EngineError, match="in on_step"):
                result(s)
            with pytest.raises(errors.EngineError, match="in on_step"):
                e.submit(greedy(prompt(5), 30))
    finally:
        threading.excepthook = previous
