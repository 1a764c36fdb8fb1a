"""What a build is made of, the key that follows from it, and the programs it needs. Runs nothing but `--version`.

Two builds with one key are the same build: the archive, the patches, the back ends, every CMake argument, the compilers,
their flags, and, as llama.cpp compiles for the CPU it is built on, what that CPU can do.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import BuildError, OptionError
from .cpu_features import cpu_features
from .patch_files import Patch
from .source import SDIST_SHA256

# ggml's back ends: what turns each on, and what it needs besides a C++ compiler.
BACKENDS = {
    "cpu": ("", ""),
    "cuda": ("GGML_CUDA", "NVIDIA's CUDA toolkit (nvcc, cuBLAS)"),
    "hip": ("GGML_HIP", "AMD's ROCm (hipcc, hipBLAS, rocBLAS)"),
    "vulkan": (
        "GGML_VULKAN",
        "Vulkan headers and glslc (apt-get install libvulkan-dev glslc; headers of 1.4 or newer)",
    ),
    "sycl": ("GGML_SYCL", "Intel's oneAPI (icx, icpx)"),
    "musa": ("GGML_MUSA", "Moore Threads' MUSA toolkit"),
    "opencl": ("GGML_OPENCL", "OpenCL headers and an ICD loader"),
    "blas": ("GGML_BLAS", "a BLAS with its headers (apt-get install libopenblas-dev)"),
    "rpc": ("GGML_RPC", ""),
}
# Only the libraries, with each other next to them, in a folder that may be moved.
_ALWAYS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON",
)  # fmt: skip
# As CMake calls the languages: the variable that names a compiler, and those looked for without it.
_COMPILERS = {"C": ("CC", ("cc", "gcc", "clang")), "CXX": ("CXX", ("c++", "g++", "clang++"))}
_FLAG_VARIABLES = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", "HIPFLAGS", "CUDAARCHS")
_OFF = ("OFF", "0", "NO", "FALSE", "N")


@dataclass(frozen=True)
class Recipe:
    patches: tuple[Patch, ...]
    backends: tuple[str, ...]  # of BACKENDS
    cmake_args: tuple[str, ...]  # the user's
    compilers: tuple[str, ...]  # first lines of their --version
    flags: tuple[str, ...]  # NAME=VALUE
    cpu: tuple[str, ...]  # what the CPU must have; empty: it was not compiled for the CPU at hand

    @property
    def key(self) -> str:
        parts = asdict(self) | {"sdist": SDIST_SHA256, "always": _ALWAYS}
        # A patch counts by its name and bytes; what is read out of them follows.
        parts["patches"] = [(p.name, p.sha256) for p in self.patches]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def configure(self, cmake: str, generator: str, sources: Path, build: Path) -> list[str]:
        """The command line. The user's arguments come last, so they win."""
        turned_on = [f"-D{BACKENDS[name][0]}=ON" for name in self.backends if BACKENDS[name][0]]
        return [cmake, "-S", str(sources), "-B", str(build), "-G", generator, *_ALWAYS, *turned_on, *self.cmake_args]

    def needs(self) -> str:
        """In words, what its back ends need."""
        return ", ".join(f"{name} needs {BACKENDS[name][1]}" for name in self.backends if BACKENDS[name][1])


def make_recipe(
    patches: Sequence[Patch],
    backends: Sequence[str],
    cmake_args: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> Recipe:
    """`cmake_args` as the user wrote them, after those of CMAKE_ARGS, which llama-cpp-python's own build reads too.

    Raises OptionError for an unknown back end or what is no argument of CMake, BuildError when there is no compiler.
    """
    environ = os.environ if environ is None else environ
    for name in backends:
        if name not in BACKENDS:
            raise OptionError(f"--backend {name} is unknown: choose of {', '.join(BACKENDS)}")
    arguments = tuple(_argument(text) for text in (*shlex.split(environ.get("CMAKE_ARGS", "")), *cmake_args))
    compilers = [_version(_compiler(language, arguments, environ)) for language in _COMPILERS]
    if "cuda" in backends or _setting(arguments, "GGML_CUDA").upper() in ("ON", "1", "YES", "TRUE"):
        compilers.append(_version(_nvcc(arguments, environ)))
    return Recipe(
        patches=tuple(patches),
        backends=tuple(sorted(set(backends) - {"cpu"})),
        cmake_args=arguments,
        compilers=tuple(compilers),
        flags=tuple(f"{name}={environ[name]}" for name in _FLAG_VARIABLES if environ.get(name)),
        cpu=() if _setting(arguments, "GGML_NATIVE").upper() in _OFF else cpu_features(),
    )


def find_tool(name: str) -> str | None:
    """In PATH, or next to this Python, where pip puts it."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def find_cmake() -> tuple[str, str]:
    """CMake and the generator to use. Raises BuildError with what to install."""
    cmake = find_tool("cmake")
    if cmake is None:
        raise BuildError("cmake is not installed: pip install 'hybrid-moe-ext[build]' or apt-get install cmake")
    if find_tool("ninja"):
        return cmake, "Ninja"
    if find_tool("make"):
        return cmake, "Unix Makefiles"
    raise BuildError(
        "neither ninja nor make is installed: pip install 'hybrid-moe-ext[build]' or apt-get install ninja-build"
    )


def _argument(text: str) -> str:
    if text.startswith("-"):
        return text
    if "=" in text:
        return f"-D{text}"
    raise OptionError(f"--cmake-arg {text} is no argument of CMake: write -DNAME=VALUE")


def _setting(arguments: Sequence[str], name: str) -> str:
    """The last value that the arguments give a variable, or ""."""
    value = ""
    for text in arguments:
        variable, is_set, given = text.removeprefix("-D").partition("=")
        if text.startswith("-D") and is_set and variable.partition(":")[0] == name:
            value = given
    return value


def _compiler(language: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """The one that CMake will take."""
    variable, usual = _COMPILERS[language]
    named = _setting(arguments, f"CMAKE_{language}_COMPILER") or next(iter(shlex.split(environ.get(variable, ""))), "")
    found = next(filter(None, map(shutil.which, [named] if named else usual)), None)
    if found is None:
        what = f"the compiler {named} is not there" if named else f"there is no {language} compiler"
        raise BuildError(f"{what}: apt-get install g++, or name one by the variables CC and CXX")
    return found


def _nvcc(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    named = _setting(arguments, "CMAKE_CUDA_COMPILER") or environ.get("CUDACXX")
    found = shutil.which(named or "nvcc") or (None if named else shutil.which("/usr/local/cuda/bin/nvcc"))
    if found is None:
        raise BuildError(
            f"{named or 'nvcc'} is not there: install {BACKENDS['cuda'][1]}, or name it by the variable CUDACXX"
        )
    return found


def _version(program: str) -> str:
    """What it says it is; nvcc says so in its last lines, others in their first."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{program} --version fails ({error}): is it a compiler?") from error
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        raise BuildError(f"{program} --version fails with exit code {done.returncode}: is it a compiler?")
    return lines[-1] if Path(program).name == "nvcc" else lines[0]
