"""Parts of streaming by themselves, in C++ (tests/cpp/stream), under ThreadSanitizer where the compiler has it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cpp" / "stream"


def has_thread_sanitizer(folder: Path) -> bool:
    (folder / "nothing.cpp").write_text("int main() {}\n")
    command = ["c++", "-fsanitize=thread", "-o", str(folder / "nothing"), str(folder / "nothing.cpp")]
    built = subprocess.run(command, capture_output=True)
    # It may link and still not run: it wants addresses of its own where the kernel puts the program.
    return built.returncode == 0 and subprocess.run([folder / "nothing"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    if not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("no CMake or no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("stream_units")
    options = [f"-DHYBRID_MOE_LLAMA_SDIST={os.environ.get('LLAMA_CPP_SDIST', '')}"]
    if has_thread_sanitizer(folder):
        options.append("-DSTREAM_SANITIZE=thread")
    configured = subprocess.run(["cmake", "-S", SOURCE, "-B", folder, *options], capture_output=True, text=True)
    if "could not be fetched" in configured.stderr:
        pytest.skip("llama.cpp's headers cannot be fetched here: LLAMA_CPP_SDIST names the source archive for that")
    assert configured.returncode == 0, configured.stderr
    built = subprocess.run(["cmake", "--build", folder, "--parallel", "2"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.parametrize("program", ["test-expert-queue", "test-layer-job"])
def test_program(programs, tmp_path, program):
    arguments = [tmp_path] if program == "test-expert-queue" else []
    done = subprocess.run([programs / program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr
