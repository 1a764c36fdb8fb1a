"""What this machine can do at most: read bandwidth and float multiply-adds, measured in the run that quotes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .. import _native

READ_BYTES = 512 << 20  # far beyond any cache


@dataclass(frozen=True)
class Limits:
    """GB/s and GFLOP/s of `n_threads` threads together."""

    n_threads: int
    read_gbps: float
    fma_gflops: float


def measure_limits(n_threads: int) -> Limits:
    lib = _native.library()
    read = lib.hybrid_moe_measure_read(n_threads, ctypes.c_size_t(READ_BYTES), 5)
    fma = lib.hybrid_moe_measure_fma(n_threads, 5)
    return Limits(n_threads, read / 1e9, fma / 1e9)
