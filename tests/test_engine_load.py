"""Hundreds of requests at a time with random prompts, limits, cancels and consumers: nothing is lost, mixed up or left over."""

import gc
import random
import re
import threading
from pathlib import Path

import llama_cpp.llama_cpp as C
import pytest

from engine_solo import DEADLOCK_S, assert_nothing_leaked, assert_solo, engine, greedy, prompt
from hybrid_moe_ext import errors
from hybrid_moe_ext.engine import Engine, Request, Sampling, Stream

pytestmark = pytest.mark.usefixtures("no_deadlock")

N_CALLERS, N_EACH = 6, 60


def _pool() -> list[list[int]]:
    """Prompts that share beginnings, short and long ones."""
    stem = prompt(60, seed=100)
    pool = [stem[:n] + prompt(m, seed=n + m) for n in (0, 9, 30, 60) for m in (1, 5, 25)]
    return [*pool, prompt(90, seed=1), [*prompt(90, seed=1), 5, 6], stem + prompt(70, seed=2)]


class Caller(threading.Thread):
    """Submits, reads and cancels; keeps what it got."""

    def __init__(self, e: Engine, seed: int, n_each: int):
        super().__init__()
        self.got: list[tuple[list[int], int, Stream, list[int]]] = []  # prompt, max_tokens, stream, tokens
        self.n_refused = self.n_late = 0
        self.error: BaseException | None = None
        self._engine = e
        self._n_each = n_each
        self._random = random.Random(seed)
        self._pool = _pool()

    def run(self) -> None:
        try:
            open_streams: list[tuple[list[int], int, Stream]] = []
            for _ in range(self._n_each):
                self._submit(open_streams)
                while len(open_streams) > self._random.randrange(8):
                    self._read(*open_streams.pop(self._random.randrange(len(open_streams))))
            for one in open_streams:
                self._read(*one)
        except BaseException as error:
            self.error = error

    def _submit(self, open_streams: list) -> None:
        text, n = self._random.choice(self._pool), self._random.choice([0, 1, 2, 8, 24])
        kind = self._random.random()
        request = greedy(text, n)
        if kind < 0.05:
            request = Request(text, max_tokens=n, sampling=Sampling(temperature=0, top_p=2))
        elif kind < 0.1:
            request = greedy(text, n, deadline_s=self._random.choice([0.0, 0.01]))
        try:
            stream = self._engine.submit(request)
            if self._random.random() < 0.15:
                stream.cancel()
            open_streams.append((text, n, stream))
        except errors.RequestError:
            assert kind < 0.05
        except errors.EngineBusy:
            self.n_refused += 1

    def _read(self, text: list[int], n: int, stream: Stream) -> None:
        tokens: list[int] = []
        n_until_cancel = self._random.randrange(20) if self._random.random() < 0.5 else 1000
        try:
            if n_until_cancel == 0:
                stream.cancel()
            while (event := stream.next(DEADLOCK_S)) is not None:
                if event.token is not None:
                    tokens.append(event.token)
                if len(tokens) == n_until_cancel:
                    stream.cancel()
        except errors.DeadlinePassed:
            self.n_late += 1
        self.got.append((text, n, stream, tokens))


def run_callers(e: Engine, seeds: range, n_each: int = N_EACH) -> list[Caller]:
    callers = [Caller(e, seed, n_each) for seed in seeds]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLOCK_S)
        assert not caller.is_alive()
        assert caller.error is None, repr(caller.error)
    return callers


def _rss_kib() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.slow
def test_ten_thousand_requests() -> None:
    """Memory stops growing."""
    with engine("qwen3-30b") as e:
        rss = []
        for i in range(0, 10_000 // N_EACH, N_CALLERS):
            for text, _, _, tokens in (one for c in run_callers(e, range(i, i + N_CALLERS)) for one in c.got):
                assert_solo("qwen3-30b", text, tokens)
            gc.collect()
            rss.append(_rss_kib())
        assert rss[-1] < rss[len(rss) // 2] + 2 * 1024, rss  # 1 KiB per request would be 5 MiB
        assert e.metrics().submitted > 5000
        assert_nothing_leaked(e)


def _count_samplers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    n, lock = {"made": 0, "freed": 0}, threading.Lock()

    def counted(function, what: str):
        def call(*args):
            with lock:
                n[what] += 1
            return function(*args)

        return call

    monkeypatch.setattr(C, "llama_sampler_chain_init", counted(C.llama_sampler_chain_init, "made"))
    monkeypatch.setattr(C, "llama_sampler_free", counted(C.llama_sampler_free, "freed"))
    return n


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-30b", {"queue": 16}),
        # Hardly room: sequences wait for cells, kept ones are thrown out all the time.
        (
            "qwen3-30b",
            {"n_ctx": 256, "n_kept": 3, "n_batch": 24, "piece_tokens": 7, "pieces_ahead": 1, "n_parallel": 5},
        ),
        ("gpt-oss-120b", {"n_ctx": 256}),
        ("mamba", {"n_kept": 2}),
    ],
)
def test_random_requests(name: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    check_random_requests(name, options, monkeypatch)


def check_random_requests(name: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = _count_samplers(monkeypatch)
    with engine(name, **options) as e:
        callers = run_callers(e, range(N_CALLERS))
        reasons: dict[str, int] = {}
        for text, n, stream, tokens in (one for caller in callers for one in caller.got):
            assert_solo(name, text, tokens)
            reason = stream.finish.reason if stream.finish else "late"
            reasons[reason] = reasons.get(reason, 0) + 1
            if reason == "length":
                assert len(tokens) == n
            if stream.finish and n:
                assert len(tokens) == stream.finish.metrics.n_generated
        assert reasons["length"] > N_EACH and reasons["cancelled"] > 10, reasons
        m = e.metrics()
        n_zero = sum(n == 0 for caller in callers for _, n, _, _ in caller.got)
        assert sum(m.finished.values()) == m.submitted == sum(len(caller.got) for caller in callers) - n_zero
        assert m.refused == sum(caller.n_refused for caller in callers)
        assert m.reused_tokens > 0 and m.prefill_tokens > 0 and m.moved_bytes > 0
        assert_nothing_leaked(e)
    assert samplers["made"] == samplers["freed"] > 100
