"""A host with two Vulkan devices for tests: llama-cpp-python's bindings in a child process, on the libraries of the npm package
@node-llama-cpp/linux-x64-vulkan, and lavapipe, Mesa's software GPU, shown twice. Helpers, not tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from hybrid_moe_ext import library_path
from models import FOLDER

CHILD = Path(__file__).parent / "vulkan" / "child.py"
LAVAPIPE = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
PACKAGE = Path("node_modules/@node-llama-cpp/linux-x64-vulkan/bins/linux-x64-vulkan")
STREAMS = b"HYBRID_MOE_SLP" in library_path().read_bytes()  # this plug-in knows how to
EXPERTS_OURS, EXPERTS_CPU = {"exps": "HybridMoE"}, {"exps": "CPU"}


@dataclass(frozen=True)
class Run:
    """One load of a model and one prompt. `devices` hold what `overrides` (regular expression -> device) leave."""

    model: str
    devices: tuple[str, ...] = ()
    n_gpu_layers: int = 99
    overrides: dict[str, str] = field(default_factory=dict)
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()  # shares of layers per device; () leaves them to llama.cpp
    mmap: bool = True
    n_batch: int = 128
    n_ubatch: int = 128
    n_threads: int = 2
    flash_attn: bool = False
    n_tokens: int = 70
    seed: int = 0


@dataclass(frozen=True)
class Ran:
    logits: np.ndarray  # float64 [n_tokens, n_vocab]
    counters: dict[str, int]  # ours, of this run's one prompt
    streamed: dict[str, int]  # device -> experts that it computed from streamed weights
    where: dict[str, dict[str, int]]  # "attention" or "experts" -> buffer -> results that lie in it
    log: str  # of the whole process


@cache
def libraries() -> Path:
    """A folder with the package's libraries under the names that the bindings and the linker look for."""
    folder = os.environ.get("NODE_LLAMA_CPP")
    if not folder:
        pytest.skip("NODE_LLAMA_CPP names no folder with npm's Vulkan libraries: docs/hosts.md says how to make one")
    package = Path(folder) / PACKAGE
    if not package.is_dir():
        pytest.skip(f"{package} does not exist: docs/hosts.md says how to install it")
    if not LAVAPIPE:
        pytest.skip("lavapipe, a software GPU, is not installed (Debian: mesa-vulkan-drivers)")
    links = FOLDER / "vulkan-libraries"
    links.mkdir()
    for path in package.glob("*.so"):
        (links / path.name).symlink_to(path)
    (links / "libllama.so").symlink_to(next(package.glob("libllama.vulkan.*.so")))
    return links


def run(runs: list[Run], plugin: bool = True, **environment: str) -> list[Ran]:
    """All `runs` in one process, in this order; `environment` may set HYBRID_MOE_... and GGML_VK_..."""
    asked = [asdict(one) | {"logits": str(FOLDER / f"{uuid4().hex}.npy")} for one in runs]
    request = FOLDER / f"vulkan-{uuid4().hex}.json"
    request.write_text(json.dumps({"plugin": plugin, "runs": asked}))
    done = subprocess.run(
        [sys.executable, CHILD, request], capture_output=True, text=True, errors="replace", timeout=1200,
        env=_environment(environment), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"the Vulkan host ended with {done.returncode}\n{done.stderr[-6000:]}"
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        Ran(np.load(one["logits"]).astype(np.float64), **answer, log=done.stderr)
        for one, answer in zip(asked, told, strict=True)
    ]


def _environment(more: dict[str, str]) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HYBRID_MOE_", "GGML_VK_", "GGML_BACKEND_PATH"))}
    kept = {k: os.environ[k] for k in ("HYBRID_MOE_ISA", "HYBRID_MOE_LIBRARY") if k in os.environ}
    chosen = {
        "LLAMA_CPP_LIB_PATH": str(libraries()),
        "VK_DRIVER_FILES": str(LAVAPIPE[0]),  # lavapipe and nothing else, whatever GPUs this machine has
        "VK_ICD_FILENAMES": str(LAVAPIPE[0]),  # the same for loaders before 1.3.207
        "GGML_VK_VISIBLE_DEVICES": "0,0",
        "GGML_NO_BACKTRACE": "1",
    }
    return clean | kept | chosen | more
