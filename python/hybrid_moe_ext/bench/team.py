"""Which team is faster here, the host's OpenMP or our pool: time of a region beyond its threads' own work.

    python -m hybrid_moe_ext.bench.team [THREADS]

Short rounds of both providers go in turn, so that other load on the machine meets both alike; medians are compared. What
the figures mean, and what was chosen by them: docs/threads.md."""

from __future__ import annotations

import ctypes
import statistics
import sys
from dataclasses import dataclass

from .. import _native
from ..errors import PluginError
from ..machine import default_threads

REGIONS = 25  # per round
GAPS_US = (0, 20, 100, 500, 3000)
WORK_US = 200  # of each thread: an expert layer of a mid-sized model


@dataclass(frozen=True)
class Result:
    provider: str
    host_works: bool  # in the gap the host's team computes; else the CPUs idle
    gap_us: float
    median_us: float  # beyond WORK_US
    p90_us: float


def providers() -> list[str]:
    """Those that this process has."""
    return [name for name in ("openmp", "pool") if _regions(name, 1, 0, False, 0, 1) is not None]


def _regions(
    provider: str, n_threads: int, gap_us: float, host_works: bool, work_us: float, n: int
) -> list[float] | None:
    out = (ctypes.c_double * n)()
    failed = _native.library().hybrid_moe_measure_team(
        provider.encode(), n_threads, gap_us, int(host_works), work_us, n, out
    )
    return None if failed else list(out)


def bench_team(n_threads: int, rounds: int = 40, gaps_us: tuple[float, ...] = GAPS_US) -> list[Result]:
    """Raises PluginError when there is only one provider and so nothing to compare."""
    names = providers()
    if len(names) < 2:
        raise PluginError("this process has no OpenMP: its team is the pool")
    results = []
    for host_works in (False, True):
        for gap_us in gaps_us:
            times: dict[str, list[float]] = {name: [] for name in names}
            for i in range(rounds):
                for name in names if i % 2 else reversed(names):
                    found = _regions(name, n_threads, gap_us, host_works, WORK_US, REGIONS)
                    assert found is not None
                    times[name] += found[1:]  # the first still meets the other provider's threads
            for name in names:
                beyond = sorted(t - WORK_US for t in times[name])
                p90 = beyond[len(beyond) * 9 // 10]
                results.append(Result(name, host_works, gap_us, statistics.median(beyond), p90))
    return results


def main() -> None:
    _native.register()
    n_threads = int(sys.argv[1]) if len(sys.argv) > 1 else default_threads()
    print(f"{n_threads} threads, {WORK_US} us of work per region; us beyond it: median (90th percentile)")
    for r in bench_team(n_threads):
        gap = f"{'host works' if r.host_works else 'idle'} {r.gap_us:.0f} us"
        print(f"{gap:20} {r.provider:7} {r.median_us:9.1f} ({r.p90_us:.1f})")


if __name__ == "__main__":
    main()
