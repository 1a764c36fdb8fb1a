"""What a benchmark yields, and how engines are timed: in turn, so that a machine whose speed drifts slows all alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .limits import Limits

SLOW_S = 1.0  # an engine that takes longer is timed once: its peers need no exact figure of it


@dataclass(frozen=True)
class Result:
    shape: str
    engine: str  # "hybrid-moe", "ggml", "ggml repacked", "torch"
    kind: str
    n_tokens: int
    ms: float  # median
    gbps: float  # bytes of the distinct experts that the batch uses, per second
    gflops: float
    read_share: float  # of the measured read bandwidth
    fma_share: float  # of the measured multiply-add rate


def in_turn(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each engine's runs."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if not times[name] or times[name][0] < SLOW_S:
                times[name].append(run())
    return times


def result(
    shape: str, engine: str, kind: str, n_tokens: int, n_bytes: int, flops: float, seconds: float, limits: Limits
) -> Result:
    gbps, gflops = n_bytes / seconds / 1e9, flops / seconds / 1e9
    shares = gbps / limits.read_gbps, gflops / limits.fma_gflops
    return Result(shape, engine, kind, n_tokens, seconds * 1e3, gbps, gflops, *shares)
