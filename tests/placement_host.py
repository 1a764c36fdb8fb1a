"""What tests of Llama and the commands with simulated GPUs share: a process per scenario of placement_child.py. No tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = Path(__file__).parent / "placement_child.py"


def child_of(simgpu: Path, folder: Path) -> Any:
    """run(scenario, n_devices=2, settings={...}, **arguments): the process that ran it."""

    def run(scenario: str, n_devices: int = 2, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
        variables: dict[str, Any] = {"LLAMA_TOKEN_TILE": 0}  # also where this machine has a patched build
        variables |= {"SIMGPU_DEVICES": n_devices} if n_devices else {}
        variables["XDG_CACHE_HOME"] = folder / "cache"  # rates that a process measured are kept there
        variables |= settings or {}
        return subprocess.run(
            [sys.executable, CHILD, simgpu if n_devices else "none", scenario, json.dumps(arguments, default=str)],
            env=environment | {name: str(value) for name, value in variables.items()},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
