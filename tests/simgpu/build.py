"""Builds the simulated GPU, once per session; later sessions only compile what changed. A helper, not a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


def library(folder: Path) -> Path:
    """The library, built in `folder`; or the one that LIBGGML_SIMGPU names (a sanitizer build, for one).
    Skips where nothing can be built."""
    if chosen := os.environ.get("LIBGGML_SIMGPU"):
        return Path(chosen)
    built = build_in(folder)
    return built if isinstance(built, Path) else pytest.skip(built)


@cache
def build_in(folder: Path) -> Path | str:
    """The library, or why it cannot be built here."""
    if not shutil.which("cmake") or not (shutil.which("c++") or os.environ.get("CXX")):
        return "no CMake or no C++ compiler on this machine"
    # Half the time to build, and nothing here is slow.
    options = ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DPython3_EXECUTABLE={sys.executable}"]
    if archive := os.environ.get("LLAMA_CPP_SDIST"):
        options.append(f"-DHYBRID_MOE_LLAMA_SDIST={archive}")
    configured = _run("cmake", "-S", SOURCE, "-B", folder, *options)
    if "could not be fetched" in configured.stderr:
        return "llama.cpp's headers cannot be fetched here: LLAMA_CPP_SDIST names the source archive for that"
    assert configured.returncode == 0, configured.stderr
    built = _run("cmake", "--build", folder, "--parallel", "2")
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "libggml-simgpu.so"
