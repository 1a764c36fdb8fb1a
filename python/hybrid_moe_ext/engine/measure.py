"""Times steps of one decode context with n sequences against steps of two with half of them each. Before anything is served.

Sequences begin empty, so what long ones add to the attention is left out; and every step chooses the same tokens, so that
experts which are read from a disk are read once, before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from .context import Context
from .dual import Measured

BUDGET_S = 2.0  # after this no further size is begun; of a slow model that is one size, with a few steps
_MOST_ROUNDS = 7
_LEAST_RUN_S = 0.02  # what is timed at a time; more steps of a fast model
_MOST_STEPS = 8


def measure(contexts: Sequence[Context], n_parallel: int, n_threads: int) -> tuple[Measured, ...]:
    """By batch size, the largest first. `contexts`: two, empty, and empty again afterwards. Raises EngineError, NoRoom."""
    began = time.monotonic()
    sizes = _sizes(n_parallel)
    measured: list[Measured] = []
    with ThreadPoolExecutor(2, "hybrid-moe-measure") as pool:
        for i, n in enumerate(sizes):
            share_s = (BUDGET_S - (time.monotonic() - began)) / (len(sizes) - i)
            if measured and share_s <= 0:
                break
            measured.append(_measure_size(pool, contexts, n, n_threads, share_s))
    return tuple(measured)


def _sizes(n_parallel: int) -> list[int]:
    """The largest, two, and powers of two between them."""
    between = [2**i for i in range(2, 9) if 2**i < n_parallel]
    return list(dict.fromkeys([n_parallel, 2, *between]))


def _measure_size(
    pool: ThreadPoolExecutor, contexts: Sequence[Context], n: int, n_threads: int, share_s: float
) -> Measured:
    def single(n_steps: int) -> float:
        return _run(contexts[0], n, n_steps, n_threads)

    def dual(n_steps: int) -> float:
        began = time.monotonic()
        halves = (n // 2, n - n // 2)
        runs = [
            pool.submit(_run, c, half, n_steps, n_threads) for c, half in zip(reversed(contexts), halves, strict=True)
        ]
        for run in runs:
            run.result()
        return (time.monotonic() - began) / n_steps

    end = time.monotonic() + share_s
    step_s = max(single(1), dual(1))  # memory is allocated, experts are read
    n_steps = max(1, min(_MOST_STEPS, int(_LEAST_RUN_S / max(step_s, 1e-9)), min(c.n_ctx for c in contexts) // n))
    singles: list[float] = []
    duals: list[float] = []
    round_s = 0.0
    while not singles or (len(singles) < _MOST_ROUNDS and time.monotonic() + round_s < end):
        began = time.monotonic()
        singles.append(single(n_steps))
        duals.append(dual(n_steps))
        round_s = time.monotonic() - began
    return Measured(n, median(singles), median(duals))


def _run(context: Context, n: int, n_steps: int, n_threads: int) -> float:
    """Seconds per step of n sequences that begin empty."""
    began = time.monotonic()
    try:
        for pos in range(n_steps):
            for seq in range(n):
                context.add([_token(context, seq)], pos, seq, logits=True)
            context.decode(n_threads)
        return (time.monotonic() - began) / n_steps
    finally:
        for seq in range(n):
            context.remove(seq)


def _token(context: Context, seq: int) -> int:
    """Another one per sequence, so that they choose experts of their own, as in use."""
    return (seq * 7919 + 1) % context.n_vocab
