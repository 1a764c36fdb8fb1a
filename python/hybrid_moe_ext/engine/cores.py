"""How the cores are divided while both workers compute: tried out during the first passes that overlap with decoding, then kept.

A trial is a pass of the prefill worker: it has its threads for the whole pass, and the decode worker the rest for its steps
meanwhile. Two teams on the same cores would wait for each other's threads at every operation."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .options import Threads

MOST_TRIALS = 8  # passes, when some of them tell nothing because too few steps fell into them
LEAST_STEPS = 3  # of the decode worker within a pass


@dataclass(frozen=True)
class Trial:
    """One pass with `decode` threads for the decode worker."""

    decode: int
    prefill_tps: float
    step_s: float
    decode_tps: float  # tokens per second of its steps


class Cores:
    """`threads`: the division to begin with. `is_given`: and to stay with. Read by both workers, told by both."""

    def __init__(self, threads: Threads, tpot_s: float, is_given: bool):
        self._threads = threads
        self._tpot_s = tpot_s
        self._lock = threading.Lock()
        self._left = [] if is_given else _order(threads)
        self._n_passes = 0
        self._steps: list[tuple[int, float]] = []  # (sequences, seconds) within the pass at hand
        self.trials: list[Trial] = []

    @property
    def alone(self) -> int:
        return self._threads.alone

    @property
    def decode(self) -> int:
        return self._threads.decode

    @property
    def prefill(self) -> int:
        return self._threads.prefill

    @property
    def is_decided(self) -> bool:
        return not self._left

    def step(self, n_decoding: int, seconds: float) -> None:
        """The decode worker computed a step beside a long prompt."""
        if self._left and n_decoding:
            with self._lock:
                self._steps.append((n_decoding, seconds))

    def begin_pass(self) -> None:
        """The prefill worker begins one beside decoding sequences."""
        with self._lock:
            if self._left:
                self._divide(self._left[0])
            self._steps = []

    def end_pass(self, n_tokens: int, seconds: float) -> None:
        """The steps that began in it are those of its division, but for one at either end."""
        with self._lock:
            if not self._left:
                return
            self._n_passes += 1
            steps = self._steps[1:]
            if len(steps) >= LEAST_STEPS:
                in_steps = sum(s for _, s in steps)
                n = sum(n for n, _ in steps)
                self.trials.append(Trial(self._left.pop(0), n_tokens / seconds, in_steps / len(steps), n / in_steps))
            if self._n_passes >= MOST_TRIALS:
                self._left = []
            if not self._left:
                self._divide(self._best())

    def _divide(self, decode: int) -> None:
        self._threads = Threads(self.alone, decode, max(1, self.alone - decode))

    def _best(self) -> int:
        """Within tpot the one that computes prompts fastest; where none is within, the largest product of both speeds."""
        by_decode: dict[int, list[Trial]] = {}
        for trial in self.trials:
            by_decode.setdefault(trial.decode, []).append(trial)
        means = [_mean(trials) for trials in by_decode.values()]
        if not means:
            return self._threads.decode
        within = [t for t in means if t.step_s <= self._tpot_s]
        if within:
            return max(within, key=lambda t: t.prefill_tps).decode
        return max(means, key=lambda t: t.prefill_tps * t.decode_tps).decode

    def __str__(self) -> str:
        told = "; ".join(
            f"{t.decode} for decode: prompt {t.prefill_tps:.0f} tokens/s, step {1e3 * t.step_s:.1f} ms"
            for t in self.trials
        )
        return f"{self.decode} threads decode beside {self.prefill} for a long prompt" + (f" ({told})" if told else "")


def _order(threads: Threads) -> list[int]:
    """Half, a quarter, three quarters, and half again: a prompt's passes get slower with its length, and so the mean of half is
    that of the middle. Empty: there is nothing to choose."""
    quarter = max(1, threads.alone // 4)
    others = sorted({quarter, threads.alone - quarter} - {threads.decode})
    return [threads.decode, *others, threads.decode] if threads.alone > 2 and others else []


def _mean(trials: list[Trial]) -> Trial:
    n = len(trials)
    return Trial(
        trials[0].decode,
        sum(t.prefill_tps for t in trials) / n,
        sum(t.step_s for t in trials) / n,
        sum(t.decode_tps for t in trials) / n,
    )
