"""Whether llama-cpp-python can load a build: tried in a process of its own, for a library that was loaded here stays here."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from . import cache

# Importing looks up every function that the bindings know. The child gets this process's sys.path, so the same bindings.
_CHILD = """
import ctypes, json, sys
sys.path[:] = json.loads(sys.argv[1])
import llama_cpp, llama_cpp.llama_cpp as C
ggml_version = ctypes.CFUNCTYPE(ctypes.c_char_p)(("ggml_version", C._lib))
C.llama_backend_init()
print(json.dumps({"release": llama_cpp.__version__, "ggml": ggml_version().decode(), "loaded": C._lib._name}))
"""
_PROBED = "probed.json"


@dataclass(frozen=True)
class Probed:
    release: str  # of llama-cpp-python
    ggml: str


def probe(lib: Path) -> Probed:
    """Raises BuildError with the reason when llama-cpp-python cannot load the folder's libllama.so."""
    arguments = [sys.executable, "-c", _CHILD, json.dumps([os.path.abspath(p) for p in sys.path])]
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(lib)}
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=120,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"llama-cpp-python cannot be tried with {lib} ({error})") from error
    if done.returncode < 0:
        raise BuildError(f"llama-cpp-python dies of signal {-done.returncode} when it loads {lib}")
    if done.returncode:
        said = next(reversed(done.stderr.strip().splitlines()), "it says nothing")
        raise BuildError(f"llama-cpp-python cannot load {lib} ({said})")
    told = json.loads(done.stdout.splitlines()[-1])
    if Path(told["loaded"]).parent != lib:
        raise BuildError(f"llama-cpp-python does not look at LLAMA_CPP_LIB_PATH: it loaded {told['loaded']}")
    return Probed(told["release"], told["ggml"])


def probe_once(build: cache.Build) -> None:
    """The same, but what went well is remembered for these bindings with this Python: half a second saved per start."""
    remembered = cache.cache_folder() / build.key / _PROBED
    identity = _bindings()
    try:
        known = set(json.loads(remembered.read_text()))
    except (OSError, ValueError, TypeError):
        known = set()
    if identity in known:
        return
    told = probe(build.lib)
    if told.ggml != build.ggml:
        raise BuildError(f"{build.lib} is ggml {told.ggml}, not the {build.ggml} it was built as")
    fresh = remembered.with_name(f"{_PROBED}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(sorted(known | {identity})))
        fresh.replace(remembered)
    except OSError:
        pass  # a cache of another user: tried again next time


def _bindings() -> str:
    """llama-cpp-python's module with the functions, as it is on disk, and this Python."""
    spec = importlib.util.find_spec("llama_cpp")
    module = Path((spec and spec.origin) or "").with_name("llama_cpp.py")
    return hashlib.sha256(f"{sys.executable} {sys.version} {module} {cache.file_facts(module)}".encode()).hexdigest()
