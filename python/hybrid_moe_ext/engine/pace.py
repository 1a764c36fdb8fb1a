"""How many tokens of prompts a decode step may have, and whether one more sequence may join: by what steps took so far."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest measurement in a running mean
_KNOWN = 3  # steps with so many sequences until their time is known: the first ones read weights, or are disturbed
_LATE_FACTOR = 2.0  # a prompt that would miss ttft_s may stretch a step to this many times tpot_ms


class Pace:
    """Seconds of a step = those of its batch of decoding sequences + tokens of prompts x seconds per such token."""

    def __init__(self, tpot_s: float, ttft_s: float, min_chunk: int, max_chunk: int):
        self._tpot_s = tpot_s
        self._ttft_s = ttft_s
        self._min_chunk = min(min_chunk, max_chunk)
        self._max_chunk = max_chunk
        self._of_batch: dict[int, float] = {0: 0.0}  # decoding sequences -> seconds of a step without prompts
        self._n_seen: dict[int, int] = {}  # decoding sequences -> steps that were measured
        self._per_token: float | None = None

    def chunk(self, n_decoding: int, n_waiting: int, left_s: float) -> int:
        """Tokens of prompts in the next step. `n_waiting` are to be computed, the first prompt's `left_s` remain of ttft_s."""
        most = max(self._min_chunk, self._max_chunk - n_decoding)
        if n_decoding == 0 or self._per_token is None:
            return most if n_decoding == 0 else self._min_chunk  # the first measurement beside others is a small one
        batch_s = self._batch_seconds(n_decoding)
        fits = self._fitting(self._tpot_s - batch_s)
        n_steps = max(1.0, left_s / max(self._tpot_s, batch_s))
        if fits * n_steps < n_waiting:  # it would be late
            fits = min(self._fitting(_LATE_FACTOR * self._tpot_s - batch_s), max(fits, int(n_waiting / n_steps)))
        return max(self._min_chunk, min(fits, most))

    def admits(self, n_running: int, waited_s: float) -> bool:
        """One more sequence, if steps with so many are not known to be too slow; after ttft_s in any case. Where one alone is too
        slow, nobody is kept waiting for a level that cannot be had."""
        if n_running == 0 or waited_s >= self._ttft_s or self._is_slow(1):
            return True
        return not self._is_slow(n_running + 1)

    def _is_slow(self, n: int) -> bool:
        return self._n_seen.get(n, 0) >= _KNOWN and self._of_batch[n] > self._tpot_s

    def learn(self, n_decoding: int, n_prompt: int, seconds: float) -> None:
        if n_prompt == 0:
            self._n_seen[n_decoding] = self._n_seen.get(n_decoding, 0) + 1
            self._of_batch[n_decoding] = _mean(self._of_batch.get(n_decoding), seconds)
        else:
            rest = max(0.0, seconds - self._batch_seconds(n_decoding))
            self._per_token = _mean(self._per_token, rest / n_prompt)

    def _fitting(self, seconds: float) -> int:
        assert self._per_token is not None
        return int(max(0.0, seconds) / max(self._per_token, 1e-9))

    def _batch_seconds(self, n: int) -> float:
        """Measured, else that of the nearest smaller batch."""
        return self._of_batch[max(k for k in self._of_batch if k <= n)]


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
