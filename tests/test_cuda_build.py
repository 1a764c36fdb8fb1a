"""What cpp/cuda/cuda.cmake does with HYBRID_MOE_CUDA=AUTO, ON and OFF, with compilers that work, fail or are not there."""

import os
import platform
import re
import stat
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT
from test_cuda import run, tools

PROJECT = f"""
cmake_minimum_required(VERSION 3.21)
project(probe LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
add_executable(probe probe.cpp)
include({ROOT}/cpp/cuda/cuda.cmake)
hybrid_moe_add_cuda(probe)
target_include_directories(probe PRIVATE {ROOT}/cpp)
target_link_libraries(probe PRIVATE ${{CMAKE_DL_LIBS}})
"""
PROBE = """
#include "cuda/cuda_device.h"
#include <cstdio>
int main() {
    std::string why;
    const auto device = hybrid_moe::open_cuda_device("0000:01:00.0", why, "/no/such/library");
    printf("%d [%s] [%s] %s", hybrid_moe::cuda_kernels_built(), hybrid_moe::kernel_image().architectures,
           hybrid_moe::kernel_image().toolkit, why.c_str());
    return device != nullptr;
}
"""
FAKE_NVCC = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$*" in
*--version*) echo "Cuda compilation tools, release 12.4, V12.4.131" ;;
*--list-gpu-code*) printf 'sm_52\\nsm_75\\nsm_80\\nsm_86\\nsm_90\\n' ;;
*) while [ "$1" != -o ]; do shift; done; printf '//\\n.version 8.4\\n.target sm_75\\n' > "$2" ;;
esac
"""


@pytest.fixture
def project(tmp_path) -> Path:
    tools()
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "probe.cpp").write_text(PROBE)
    return tmp_path


def configure(project: Path, *options: str, nvcc: str | None = None) -> subprocess.CompletedProcess[str]:
    if nvcc is not None:
        path = project / "nvcc"
        path.write_text(nvcc)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        options = (*options, f"-DHYBRID_MOE_NVCC={path}")
    return run("cmake", "-S", project, "-B", project / "build", *options)


def probe(project: Path) -> str:
    done = run("cmake", "--build", project / "build")
    assert done.returncode == 0, done.stdout + done.stderr
    return run(project / "build" / "probe").stdout


NO_DRIVER = "NVIDIA's driver library /no/such/library cannot be opened"


def without_nvcc() -> str:
    """An option that hides nvcc from CMake."""
    folders = {folder for folder in os.environ["PATH"].split(":") if (Path(folder) / "nvcc").exists()}
    return "-DCMAKE_IGNORE_PATH=" + ";".join([*folders, "/usr/local/cuda/bin", "/opt/cuda/bin"])


def test_auto_without_nvcc_builds_without_kernels(project):
    done = configure(project, without_nvcc())
    assert done.returncode == 0 and "CUDA kernels: none, nvcc is not found" in done.stdout
    assert probe(project).startswith(f"0 [] [] {NO_DRIVER}")


@pytest.mark.parametrize(
    "nvcc, reason",
    [
        ("#!/bin/sh\necho broken >&2\nexit 3\n", "broken"),
        (FAKE_NVCC.replace("printf '//", "echo no such header >&2; exit 1; printf '//"), "no such header"),
        (FAKE_NVCC.replace("release 12.4", "of some kind"), "names no release"),
        (FAKE_NVCC.replace("sm_75\\nsm_80\\nsm_86\\nsm_90", "sm_61"), "has none of the architectures 75 80"),
    ],
)
def test_a_broken_nvcc_breaks_no_build_unless_told_to(project, nvcc, reason):
    done = configure(project, nvcc=nvcc)
    assert done.returncode == 0, done.stderr
    assert re.search(f"CMake Warning .*CUDA kernels: none. .*{reason}", " ".join(done.stderr.split()))
    assert probe(project).startswith("0 [] []")
    done = configure(project, "-DHYBRID_MOE_CUDA=ON", nvcc=nvcc)
    assert done.returncode != 0
    assert re.search(f"HYBRID_MOE_CUDA=ON: .*{reason}", " ".join(done.stderr.split()))


def test_on_without_nvcc_says_so(project):
    done = configure(project, "-DHYBRID_MOE_CUDA=ON", without_nvcc())
    assert done.returncode != 0 and "HYBRID_MOE_CUDA=ON: nvcc is not found" in " ".join(done.stderr.split())


def test_off_asks_no_nvcc(project):
    done = configure(project, "-DHYBRID_MOE_CUDA=off", nvcc=FAKE_NVCC)
    assert done.returncode == 0 and "CUDA kernels: off" in done.stdout
    assert not (project / "calls").exists()


def test_another_word_is_refused(project):
    done = configure(project, "-DHYBRID_MOE_CUDA=maybe")
    assert done.returncode != 0 and "HYBRID_MOE_CUDA=maybe: must be AUTO, ON or OFF" in done.stderr


def test_a_cross_compilation_asks_no_nvcc(project):
    options = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={platform.machine()}"]
    done = configure(project, *options, nvcc=FAKE_NVCC)
    assert done.returncode == 0 and "off, because this is a cross-compilation" in done.stdout, done.stderr
    assert not (project / "calls").exists()


def test_an_older_nvcc_compiles_what_it_knows_and_only_once(project):
    """Four of the architectures; the second configuration finds nothing to do, a changed list does."""
    done = configure(project, nvcc=FAKE_NVCC)
    assert "CUDA kernels: sm_75 sm_80 sm_86 sm_90 compute_75 compute_90 (nvcc 12.4)" in done.stdout, done.stderr
    calls = (project / "calls").read_text()
    assert calls.count("-fatbin") == 1 and calls.count("-ptx") == 1
    assert "-gencode arch=compute_90,code=compute_90" in calls and "-fmad=false" in calls and "120" not in calls
    assert probe(project).startswith("1 [sm_75 sm_80 sm_86 sm_90 compute_75 compute_90] [12.4]")
    configure(project)
    assert (project / "calls").read_text().count("-fatbin") == 1
    done = configure(project, "-DHYBRID_MOE_CUDA_ARCHITECTURES=80")
    assert "CUDA kernels: sm_80 compute_80 (nvcc 12.4)" in done.stdout
    assert (project / "calls").read_text().count("-fatbin") == 2
