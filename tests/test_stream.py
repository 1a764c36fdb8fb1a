"""Experts streamed to simulated GPUs: right whatever the layer, the batch and the devices are, in bounded memory.

The cases are in stream_scenarios.py; each runs in a process of its own, which is killed when it hangs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run(simgpu: Path, cache: Path, program: str, *arguments: object) -> Any:
    """What a scenario of that program saw."""
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
    for case in seen if isinstance(seen, list) else [seen, *seen.values()]:
        assert "crash" not in case if isinstance(case, dict) else True, case["crash"]
    return seen
