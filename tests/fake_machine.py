"""Writes trees like /sys and /proc of machines that are not here. Helpers, not tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def as_list(cpus: Iterable[int]) -> str:
    return ",".join(str(cpu) for cpu in sorted(cpus))


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


class FakeMachine:
    """`core`, `l3` and `node` give the group that a CPU belongs to."""

    def __init__(
        self,
        root: Path,
        n_cpus: int,
        core: Callable[[int], int] = lambda cpu: cpu,
        l3: Callable[[int], int] = lambda cpu: 0,
        node: Callable[[int], int] = lambda cpu: 0,
        online: Iterable[int] | None = None,
    ):
        self.sys, self.proc = root / "sys", root / "proc"
        up = sorted(range(n_cpus) if online is None else online)
        devices = self.sys / "devices/system"
        write_file(devices / "cpu/online", as_list(up))
        for cpu in range(n_cpus):
            folder = devices / f"cpu/cpu{cpu}"
            folder.mkdir(parents=True)
            if cpu not in up:
                continue  # the kernel takes the files away with the CPU
            siblings = [other for other in up if core(other) == core(cpu)]
            write_file(folder / "topology/core_cpus_list", as_list(siblings))
            for index, level, sharing in (
                (0, 1, siblings),
                (1, 1, siblings),
                (2, 2, siblings),
                (3, 3, [other for other in up if l3(other) == l3(cpu)]),
            ):
                write_file(folder / f"cache/index{index}/level", str(level))
                write_file(folder / f"cache/index{index}/shared_cpu_list", as_list(sharing))
        nodes = sorted({node(cpu) for cpu in range(n_cpus)})
        write_file(devices / "node/online", as_list(nodes))
        for i in nodes:
            write_file(devices / f"node/node{i}/cpulist", as_list(cpu for cpu in up if node(cpu) == i))
            write_file(devices / f"node/node{i}/meminfo", f"Node {i} MemTotal:       65536000 kB")
        write_file(self.proc / "self/status", f"Name:\ttest\nMems_allowed_list:\t{as_list(nodes)}")
        write_file(self.proc / "self/cgroup", "0::/")
