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
    roots: tuple[bytes | None, ...] = (None, None, None)
    if sys_root is not None and proc_root is not None:
        roots = (os.fsencode(sys_root), os.fsencode(proc_root), cpus.encode())
    described = library().hybrid_moe_machine(*roots)
    if described is None:
        raise OptionError(f"cpus={cpus!r}: {sentence(library().hybrid_moe_error())}")
    return Machine(**json.loads(described))


@dataclass(frozen=True)
class Copies:
    """Experts held in memory (experts_memory="copy"), in bytes; shared ones count once."""

    tensors: int
    planned: int  # when every expert has been used
    copied: int
    anywhere: int  # of the copied: wanted on no node in particular
    nodes: list[dict[str, int | None]]  # id, wanted there, really there (None: the kernel does not tell)
    elsewhere: int  # on nodes this process has no CPUs of
    huge_pages: int
    troubles: list[str]  # since the process started: what could not be had, one sentence per kind

    def lines(self) -> list[str]:
        """For people."""
        share = f"{_mib(self.huge_pages)} of it in huge pages" if self.huge_pages else "no huge pages"
        lines = [f"memory: {_mib(self.copied)} of {_mib(self.planned)} of experts copied, {share}"]
        for node in self.nodes:
            there = node["there"]
            really = "unknown, the kernel does not tell" if there is None else _mib(there)
            lines.append(f"node {node['id']}: {_mib(node['wanted'] or 0)} wanted, {really} there")
        if self.elsewhere:
            lines.append(f"other nodes: {_mib(self.elsewhere)}")
        return lines + [f"memory: {trouble}" for trouble in self.troubles]


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def copies() -> Copies:
    """Asks the kernel where every page is, which takes a while for large models."""
    return Copies(**json.loads(library().hybrid_moe_copies()))


def default_threads() -> int:
    """One per physical core that this process may use, but no more than its CPU quota feeds."""
    return machine().default_threads
