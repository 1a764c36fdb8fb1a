"""The C++ test programs: here, and the kernels' on emulated CPUs with AVX-512, with the choice among kernels there.

HYBRID_MOE_AVX512_RUNNER is a program that runs `RUNNER [--cpu NAME] BINARY ARGS` on an emulated core."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUNNER = os.environ.get("HYBRID_MOE_AVX512_RUNNER")
CPP = Path(__file__).parent / "cpp"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler on this machine")
    build = tmp_path_factory.mktemp("kernels")
    subprocess.run(["cmake", "-S", CPP, "-B", build], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "-j2"], check=True, capture_output=True)
    return build


@pytest.fixture(scope="module")
def program(programs):
    return programs / "test-kernels"


def test_a_layer_in_steady_state_allocates_nothing(programs):
    done = subprocess.run([programs / "test-layer-memory"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


def test_here(program):
    """Natively, whatever this CPU has; where it has AVX-512, that is the proof."""
    done = subprocess.run([program, "scalar"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(RUNNER is None, reason="HYBRID_MOE_AVX512_RUNNER names no emulator for AVX-512")
@pytest.mark.parametrize(
    "cpu, tables",
    [
        ("sapphire-rapids", ["avx512_gfni", "avx512_bf16", "avx512_vbmi", "avx512"]),
        ("icelake", ["avx512_vbmi", "avx512"]),
        ("haswell", ["avx2"]),
    ],
)
def test_on_an_emulated_cpu(program, cpu, tables):
    """Haswell traps on any AVX-512 instruction: no table may leak its instructions into the choice or into others."""
    option = [] if cpu == "sapphire-rapids" else ["--cpu", cpu]
    done = subprocess.run([RUNNER, *option, program, *tables], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" ok")]
    assert ran == [*tables, *([] if "avx2" in tables else ["avx2"]), "scalar"]
