"""Which team is faster here, the host's OpenMP or our pool: time of a region beyond its threads' own work.

    python -m hybrid_moe_ext.bench.team [THREADS [SECONDS]]

Short rounds of both providers go in turn, rounds that other processes disturbed are left out, medians are compared. What the
figures mean, and what was chosen by them: docs/threads.md."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from dataclasses import dataclass

from .. import _native
from ..errors import PluginError
from ..machine import default_threads

GAPS_US = (0, 20, 100, 500, 3000)
ROUND_US = 100_000
WORK_US = 200  # of each thread: an expert layer of a mid-sized model


@dataclass(frozen=True)
class Result:
    provider: str
    host_works: bool  # in the gap the host's team computes; else the CPUs idle
    gap_us: float
    median_us: float  # beyond WORK_US
    p90_us: float
    n_quiet: int  # rounds that nobody disturbed


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


class _Quiet:
    """Whether nobody else used the CPUs meanwhile: what the system was busy, less what this process was."""

    def __init__(self) -> None:
        self._others = self._others_s()

    @staticmethod
    def _others_s() -> float:
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, stat.readline().split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return busy - time.process_time()

    def held(self, seconds: float) -> bool:
        return self._others_s() - self._others <= 0.1 * seconds + 0.01  # the system counts in hundredths


def bench_team(
    n_threads: int, seconds: float = 120, gaps_us: tuple[float, ...] = GAPS_US
) -> tuple[list[Result], float]:
    """Also the share of rounds that other processes left undisturbed; the others count only where fewer than 3 are.

    Raises PluginError when there is only one provider and so nothing to compare."""
    names = providers()
    if len(names) < 2:
        raise PluginError("this process has no OpenMP: its team is the pool")
    cases = [(host_works, gap_us) for host_works in (False, True) for gap_us in gaps_us]
    rounds: dict[tuple[str, bool, float], list[tuple[bool, list[float]]]] = {
        (n, *case): [] for case in cases for n in names
    }
    until = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < until or turn < 3:
        for host_works, gap_us in cases:
            for name in names if turn % 2 else reversed(names):
                quiet, started = _Quiet(), time.monotonic()
                found = _regions(name, n_threads, gap_us, host_works, WORK_US, int(ROUND_US / (gap_us + WORK_US)) + 2)
                assert found is not None
                # the first region still meets the other provider's threads
                rounds[name, host_works, gap_us].append((quiet.held(time.monotonic() - started), found[1:]))
        turn += 1
    results = []
    for (name, host_works, gap_us), all_rounds in rounds.items():
        undisturbed = [times for is_quiet, times in all_rounds if is_quiet]
        used = undisturbed if len(undisturbed) >= 3 else [times for _, times in all_rounds]
        beyond = sorted(t - WORK_US for times in used for t in times)
        p90 = beyond[len(beyond) * 9 // 10]
        results.append(Result(name, host_works, gap_us, statistics.median(beyond), p90, len(undisturbed)))
    n_quiet = sum(r.n_quiet for r in results)
    return results, n_quiet / (turn * len(results))


def main() -> None:
    _native.register()
    n_threads = int(sys.argv[1]) if len(sys.argv) > 1 else default_threads()
    results, quiet_share = bench_team(n_threads, float(sys.argv[2]) if len(sys.argv) > 2 else 120)
    print(f"{n_threads} threads, {WORK_US} us of work per region, {quiet_share:.0%} of the rounds undisturbed")
    print("us beyond the work: median (90th percentile), undisturbed rounds")
    for r in results:
        gap = f"{'host works' if r.host_works else 'idle'} {r.gap_us:.0f} us"
        print(f"{gap:20} {r.provider:7} {r.median_us:9.1f} ({r.p90_us:.1f}) {r.n_quiet}")


if __name__ == "__main__":
    main()
