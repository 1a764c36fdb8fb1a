"""Times the product by one expert matrix, cold: weights come from memory at few token rows, as when a model decodes.

Engines get the same bytes and the same activations; every call uses the next of several experts, which together are
larger than the caches."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PluginError
from .graph import MatrixGraph, MatrixShape
from .layer import SHAPES, TOLERANCE, check_choice, random_experts, start_engines
from .limits import Limits
from .timing import Result, in_turn, result
from .values import Experts

ROWS = (1, 4, 16, 128, 512, 2048)
COLD_BYTES = 256 << 20
ROUND_S = 0.02  # of calls in a row; a single small product is too short for the clock
CHECKED_ROWS = 16


def matrix_name(shape_name: str) -> str:
    return f"{SHAPES[shape_name].n_embd}x{SHAPES[shape_name].n_ff}"


def _cold_bytes() -> int:
    """Twice the last-level cache, if the system tells its size, but not less than what no desktop's cache holds."""
    try:
        return max(COLD_BYTES, 2 * os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    except (ValueError, OSError):
        return COLD_BYTES


def bench_kernels(
    shape_names: list[str], kinds: list[str], rows: list[int], n_threads: int, limits: Limits, rounds: int = 5
) -> Iterator[Result]:
    """Yields results as they come: a shape, its types, their rows. Weights exist once per type at a time."""
    check_choice(shape_names, kinds)
    rng = np.random.default_rng(0)
    for name in shape_names:
        for kind in kinds:
            with TemporaryDirectory(prefix="hybrid-moe-bench-") as folder:
                one = random_experts(kind, "up", SHAPES[name].n_ff, SHAPES[name].n_embd, 1, Path(folder), rng)
                n_expert = max(2, -(-_cold_bytes() // one.bytes_per_expert))
                shape = MatrixShape(SHAPES[name].n_embd, SHAPES[name].n_ff, n_expert, n_used=1)
                experts = random_experts(kind, "up", shape.n_ff, shape.n_embd, n_expert, Path(folder), rng)
                yield from _bench_matrix(matrix_name(name), shape, experts, rows, n_threads, limits, rounds, rng)


def _bench_matrix(
    name: str,
    shape: MatrixShape,
    experts: Experts,
    rows: list[int],
    n_threads: int,
    limits: Limits,
    rounds: int,
    rng: np.random.Generator,
) -> Iterator[Result]:
    values = experts.values().astype(np.float64)
    for m in rows:
        x = rng.standard_normal((m, shape.n_embd)).astype(np.float32)
        engines = start_engines(MatrixGraph, shape, {"up": experts}, m, n_threads)
        weights = np.ones((m, 1), np.float32)
        for engine_name, engine in engines.items():
            engine.set(x, np.zeros((m, 1), np.int32), weights)
            engine.run()
            _check(engine_name, experts.kind, engine.output(), x, values)
            _visit_all(engine, m, shape.n_expert)
        runs = {engine_name: _cold_calls(engine, m, shape.n_expert) for engine_name, engine in engines.items()}
        for engine_name, times in in_turn(runs, rounds).items():
            seconds = statistics.median(times)
            flops = 2.0 * m * values.size
            yield result(name, engine_name, experts.kind, m, experts.bytes_per_expert, flops, seconds, limits)
        for engine in engines.values():
            engine.close()


def _visit_all(engine: Any, m: int, n_expert: int) -> None:
    """The first use of an expert also looks for damage in it, and maps its pages."""
    for first in range(0, n_expert, m):
        engine.set_ids(((first + np.arange(m)) % n_expert).astype(np.int32)[:, None])
        engine.run()


def _cold_calls(engine: Any, m: int, n_expert: int) -> Callable[[], float]:
    """Seconds per call, over as many calls as fill ROUND_S, each with another expert."""
    expert = itertools.cycle(range(n_expert))

    def run() -> float:
        total, n = 0.0, 0
        while total < ROUND_S:
            engine.set_ids(np.full((m, 1), next(expert), np.int32))
            total, n = total + engine.run(), n + 1
        return total / n

    return run


def _check(engine: str, kind: str, y: NDArray[np.float32], x: NDArray[np.float32], values: NDArray[Any]) -> None:
    some = np.unique(np.linspace(0, len(x) - 1, CHECKED_ROWS).astype(int))
    want = x[some].astype(np.float64) @ values.T
    nmse = float(((y[some] - want) ** 2).sum() / (want**2).sum())
    limit = TOLERANCE["torch" if engine == "torch" else kind]
    if not nmse <= limit:
        raise PluginError(f"{kind}: the product of {engine} is wrong (NMSE {nmse:.1e} > {limit:.0e}), no use timing it")
