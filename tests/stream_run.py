"""Runs a scenario of streaming in a process of its own. A helper, not a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = ("HYBRID_MOE_LIBRARY", "HYBRID_MOE_ISA", "HYBRID_MOE_TEAM")


def environment(cache: Path) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not name.startswith(("SIMGPU_", "HYBRID_MOE_", "GGML_BACKEND_PATH"))
    }
    # Scenarios fork, so nothing before that may have started threads.
    return inherited | {"XDG_CACHE_HOME": str(cache), "OPENBLAS_NUM_THREADS": "1"}


def crashes(seen: Any) -> list[str]:
    """What the processes said that crashed or had to be killed."""
    if isinstance(seen, dict):
        return [seen["crash"]] if "crash" in seen else [c for value in seen.values() for c in crashes(value)]
    return [c for value in seen for c in crashes(value)] if isinstance(seen, list) else []


def run(simgpu: Path, cache: Path, program: str, *arguments: object) -> Any:
    """What the scenario saw. Fails when one of its processes crashed or hung."""
    command = [sys.executable, HERE / f"{program}.py", simgpu, *arguments]
    child = subprocess.run(
        [str(c) for c in command],
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    seen = json.loads(child.stdout.splitlines()[-1])
    said = crashes(seen)
    assert not said, f"{len(said)} processes crashed or hung, the first: {said[0]}"
    return seen
