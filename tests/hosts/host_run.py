"""Host programs, run with and without the plug-in, and what the plug-in counted. Helpers, not tests."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from hybrid_moe_ext import library_path
from models import FOLDER


@dataclass(frozen=True)
class Ran:
    stdout: str
    log: str  # stderr
    matmuls: int  # expert matrix products that the plug-in computed, over all processes of the host


def environment(stats: Path | None, **more: str) -> dict[str, str]:
    """Ours with the plug-in as a stock host takes it (`stats`: where it shall count), or clean of it."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("HYBRID_MOE_", "GGML_BACKEND_PATH"))
    }
    if stats is not None:
        env |= {"GGML_BACKEND_PATH": str(library_path()), "HYBRID_MOE_STATS": str(stats)}
    return env | more


def run(command: list[object], plugin: bool, timeout: float = 300, cwd: Path | None = None, **more: str) -> Ran:
    stats = FOLDER / f"stats-{uuid4().hex}" if plugin else None
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, errors="replace", timeout=timeout, cwd=cwd,
        env=environment(stats, **more), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{command[0]} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return Ran(done.stdout, done.stderr, matmuls(stats) if stats else 0)


def matmuls(stats: Path) -> int:
    """A host that never loaded the plug-in leaves no file, which is a failure here and not a zero."""
    assert stats.exists(), "the host did not load the plug-in"
    return sum(json.loads(line)["matmuls"] for line in stats.read_text().splitlines())


def program(name: str) -> Path:
    """A program of llama.cpp from the folder LLAMA_CPP_BIN; docs/hosts.md says how to build it."""
    folder = os.environ.get("LLAMA_CPP_BIN")
    if not folder:
        pytest.skip(f"LLAMA_CPP_BIN names no folder with {name}: docs/hosts.md says how to build it")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{path} does not exist: docs/hosts.md says how to build it")
    return path
