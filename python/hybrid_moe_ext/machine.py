"""What of this machine the process may use, as the plug-in sees it (cpp/threads/topology.h)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ._native import library, sentence
from .errors import OptionError


@dataclass(frozen=True)
class Machine:
    cpus: list[int]  # in the order in which threads take them
    cores: int
    caches: int  # last-level caches
    nodes: list[dict[str, int | bool]]  # id, cores, memory: whether this process may have memory there
    quota: float  # CPUs' worth of time that the cgroup grants; 0: no limit
    usable: int  # threads that can run at once
    default_threads: int


def machine(
    sys_root: str | os.PathLike[str] | None = None, proc_root: str | os.PathLike[str] | None = None, cpus: str = ""
) -> Machine:
    """This machine; or the one described by files below `sys_root` and `proc_root` to a process that may run on `cpus`."""
    roots = (None, None, None)
    if sys_root is not None and proc_root is not None:
        roots = (os.fsencode(sys_root), os.fsencode(proc_root), cpus.encode())
    described = library().hybrid_moe_machine(*roots)
    if described is None:
        raise OptionError(f"cpus={cpus!r}: {sentence(library().hybrid_moe_error())}")
    return Machine(**json.loads(described))


def default_threads() -> int:
    """One per physical core that this process may use, but no more than its CPU quota feeds."""
    return machine().default_threads
