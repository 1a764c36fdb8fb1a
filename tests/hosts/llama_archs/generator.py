"""llama.cpp's generator of a tiny model per architecture, test-llama-archs: found, or compiled. Helpers, not tests."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import llama_cpp
import pytest

HERE = Path(__file__).parent
PROGRAM = "test-llama-archs"
REASON = (
    f"no {PROGRAM}: set LLAMA_CPP_BIN to a folder that has it (docs/hosts.md says how to build it), or LLAMA_CPP_SDIST to"
    " the source archive of llama-cpp-python, to compile it from"
)


def generate(folder: Path) -> list[Path]:
    """A GGUF for every architecture, of random weights. Skips the test when the program cannot be had."""
    out = folder / "models"
    out.mkdir()
    subprocess.run([_program(folder), "-s", "1", "-o", out], check=True, capture_output=True, timeout=600)
    return sorted(out.glob("*.gguf"))


def _program(folder: Path) -> Path:
    if built := os.environ.get("LLAMA_CPP_BIN"):
        program = Path(built) / PROGRAM
        if program.exists():
            return program
    archive = os.environ.get("LLAMA_CPP_SDIST")
    if not archive:
        pytest.skip(REASON)
    return _compile(Path(archive), folder)


def _compile(archive: Path, folder: Path) -> Path:
    """One file of the sources, against the installed libraries: seconds, where building llama.cpp takes many minutes."""
    top = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp"
    wanted = (f"{top}/include/", f"{top}/ggml/include/", f"{top}/src/", f"{top}/tests/{PROGRAM}.cpp")
    with tarfile.open(archive) as tar:
        members = [
            m for m in tar if m.isreg() and m.name.startswith(wanted) and m.name.endswith((".h", f"{PROGRAM}.cpp"))
        ]
        tar.extractall(folder, members, filter="data")
    sources, program = folder / top, folder / PROGRAM
    libraries = Path(llama_cpp.__file__).parent / "lib"
    command = ["g++", "-std=c++17", "-O1", "-w", f"-I{HERE}", f"-I{sources}/include", f"-I{sources}/ggml/include"]
    command += [f"{sources}/tests/{PROGRAM}.cpp", "-o", str(program), f"-Wl,-rpath,{libraries}"]
    command += [str(libraries / name) for name in ("libllama.so", "libggml.so", "libggml-base.so")]
    subprocess.run(command, check=True, timeout=600)
    return program
