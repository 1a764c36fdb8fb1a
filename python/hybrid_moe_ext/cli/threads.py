"""How many threads a run gets by default: physical cores that this process may use. Pins nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path


def default_threads(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> int:
    """Distinct cores among the CPUs of the affinity mask, but no more than the cgroup's CPU quota; at least 1."""
    n_cores = count_cores(os.sched_getaffinity(0), sys_root)
    quota = cpu_quota(sys_root, proc_root)
    return max(1, n_cores if quota is None else min(n_cores, quota))


def count_cores(cpus: Iterable[int], sys_root: Path = Path("/sys")) -> int:
    """CPUs that share a core (hyper-threads) count once; a CPU that does not say which core it is counts as one."""
    return len({_core(cpu, sys_root) for cpu in cpus})


def _core(cpu: int, sys_root: Path) -> tuple[str, ...]:
    topology = sys_root / f"devices/system/cpu/cpu{cpu}/topology"
    try:
        return tuple((topology / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (f"cpu{cpu}",)


def cpu_quota(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> int | None:
    """Whole CPUs that the cgroup (version 2, or 1) grants, the tightest up the tree; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(sys_root / "fs/cgroup", proc_root):
        for read in (_quota_v2, _quota_v1):
            cpus = read(folder)
            if cpus is not None:
                quotas.append(cpus)
    return max(1, math.floor(min(quotas) + 1e-9)) if quotas else None


def _cgroup_folders(root: Path, proc_root: Path) -> list[Path]:
    """The folders that may limit us. In a container the own group is mounted as the root, whatever its path says."""
    folders = [root, root / "cpu", root / "cpu,cpuacct"]
    try:
        lines = (proc_root / "self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        group = base / path.lstrip("/")
        while group != base and base in group.parents:
            folders.append(group)
            group = group.parent
    return folders


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
