"""Which llama.cpp this process loads: a patched build from the cache where one suits, otherwise llama-cpp-python's own.

llama-cpp-python opens its library when it is first imported, from LLAMA_CPP_LIB_PATH if that is set. So this package's
__init__ has `load_llama_cpp` called before anything else here imports it. What is loaded then stays: nothing is ever exchanged.

HYBRID_MOE_LLAMA: auto (the default), stock, or the key of a build (`hybrid-moe build-llama --list`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError, OptionError
from . import cache
from .cache import REMEDY, Build
from .cpu_features import cpu_features
from .patch_files import Patch, digest, patches_folder, read_patches
from .probe import probe_once

VARIABLE = "HYBRID_MOE_LLAMA"
HOST_VARIABLE = "LLAMA_CPP_LIB_PATH"  # llama-cpp-python's own
AUTO, STOCK = "auto", "stock"


@dataclass(frozen=True)
class Choice:
    """`kind`: "patched" (a build from the cache), "stock" (llama-cpp-python's own) or "given" (by LLAMA_CPP_LIB_PATH)."""

    kind: str
    build: Build | None = None  # also of a given folder, if it is one of ours
    why: str = ""  # not patched: the reason in one sentence, or "" when there is nothing to say
    error: str = ""  # HYBRID_MOE_LLAMA names what cannot be used


_choice = Choice(STOCK)


def patched_with() -> tuple[Patch, ...]:
    """The patches that the llama.cpp of this process has, switched on or not. Empty: it is as it was released."""
    return _choice.build.patches if _choice.build else ()


def in_use() -> Choice:
    return _choice


def why_not(key: str) -> str:
    """Why a process that is started now would not load this build, or ""."""
    wanted = os.environ.get(VARIABLE) or AUTO
    if HOST_VARIABLE in os.environ:
        return f"{HOST_VARIABLE} names another library"
    if wanted not in (AUTO, key):
        return f"{VARIABLE}={wanted}"
    try:
        _usable(key, is_forced=wanted == key)
    except BuildError as error:
        return str(error)
    return ""


def library_file() -> str:
    """The libllama.so of this process."""
    import llama_cpp.llama_cpp as C

    return str(C._lib._name)


def check() -> None:
    """Raises OptionError when HYBRID_MOE_LLAMA asks for what this process could not load."""
    if _choice.error:
        raise OptionError(_choice.error)


def load_llama_cpp() -> None:
    """Imports llama-cpp-python with the library that suits. Never raises for a build's sake: the stock library is there."""
    global _choice
    wanted = os.environ.get(VARIABLE) or AUTO
    if "llama_cpp.llama_cpp" in sys.modules:
        _choice = _too_late(wanted)
        return
    given = os.environ.get(HOST_VARIABLE)
    if given is not None:
        _choice = Choice(
            "given", _build_of(Path(given)), f"{HOST_VARIABLE} names it", _forced(wanted, f"{HOST_VARIABLE} is set")
        )
        return
    if wanted == STOCK:
        _choice = Choice(STOCK, why=f"{VARIABLE}={STOCK}")
        return
    refused: list[BuildError] = []
    for key in [wanted] if wanted != AUTO else cache.build_keys():
        try:
            build = _usable(key, is_forced=wanted != AUTO)
            _import_with(build)
        except BuildError as error:
            refused.append(error)
        else:
            _choice = Choice("patched", build)
            return
    why = str(refused[0]) if refused else ""
    missed = [error for error in refused if not isinstance(error, _Foreign)]
    if missed and wanted == AUTO:
        logging.getLogger("hybrid_moe_ext").warning("the patched llama.cpp is not used: %s", missed[0])
    _choice = Choice(STOCK, why=why, error=_forced(wanted, why))


def _too_late(wanted: str) -> Choice:
    """llama-cpp-python is loaded already, with whatever library."""
    sentence = "llama_cpp was imported before hybrid_moe_ext: import hybrid_moe_ext first to use a patched llama.cpp"
    build = _build_of(Path(library_file()).parent)
    if os.environ.get(HOST_VARIABLE) is not None:
        return Choice("given", build, f"{HOST_VARIABLE} names it", _forced(wanted, sentence))
    return Choice(STOCK, build, sentence if cache.build_keys() and wanted != STOCK else "", _forced(wanted, sentence))


def _forced(wanted: str, reason: str) -> str:
    return (
        ""
        if wanted in (AUTO, STOCK)
        else f"{VARIABLE}={wanted} cannot be used: {reason}; choose auto, stock or another build"
    )


def _build_of(lib: Path) -> Build | None:
    """Of a folder of libraries, if this package built it."""
    try:
        build = cache.read_build_file(Path(os.path.abspath(lib)).parent / "build.json")
    except BuildError:
        return None
    return build if file_is_of(build, lib) else None


def file_is_of(build: Build, lib: Path) -> bool:
    """Whether the folder's libllama.so is the one of that build."""
    return cache.file_facts(lib / "libllama.so") == build.files.get("libllama.so")


class _Foreign(BuildError):
    """A build with another's patches while this package has none: nobody misses it."""


def _usable(key: str, is_forced: bool) -> Build:
    """Raises BuildError, one sentence, when it must not be loaded here. `is_forced`: it was named, so it may be another's."""
    if is_forced and key not in cache.build_keys():
        raise BuildError(f"there is no build {key} in {cache.cache_folder()} (`hybrid-moe build-llama --list`)")
    build = cache.read_build(key)
    if build.key != key:
        raise BuildError(f"{cache.cache_folder() / key}: its record is another build's: {REMEDY}")
    try:
        installed = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError(
            f"no llama-cpp-python is installed by pip: pip install llama-cpp-python=={build.release}"
        ) from error
    if build.release != installed:
        raise BuildError(f"build {key} is for llama-cpp-python {build.release}, {installed} is installed: {REMEDY}")
    if not is_forced and digest(list(build.patches)) != digest(_own_patches()):
        by_name = f"choose it by {VARIABLE}={key}"
        if not _own_patches():
            raise _Foreign(f"build {key} has patches that are not this package's, which brings none: {by_name}")
        raise BuildError(f"build {key} has other patches than this package brings: {REMEDY}, or {by_name}")
    if changed := build.changed_file():
        raise BuildError(f"{build.lib / changed} is not as it was built: {REMEDY}")
    if lacking := sorted(set(build.cpu) - set(cpu_features())):
        raise BuildError(f"build {key} is for a CPU with {', '.join(lacking)}, which this one lacks: {REMEDY}")
    if not is_forced and (lost := sorted(set(stock_backends()) - set(build.backends))):
        raise BuildError(
            f"build {key} lacks {', '.join(lost)}, which the installed llama-cpp-python has: {REMEDY} with "
            f"{' '.join(f'--backend {name}' for name in lost)}, or choose it by {VARIABLE}={key}"
        )
    probe_once(build)
    return build


@functools.cache
def _own_patches() -> list[Patch]:
    return read_patches(patches_folder())


def stock_backends() -> list[str]:
    """Of the installed llama-cpp-python, without cpu, by the libraries it brings."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return []
    names = (re.fullmatch(r"libggml-(\w+)\.so", path.name) for path in (Path(spec.origin).parent / "lib").glob("*.so"))
    return sorted({name[1] for name in names if name} - {"base", "cpu"})


def _import_with(build: Build) -> None:
    """Raises BuildError, with everything as before, when llama-cpp-python cannot be imported with this build."""
    before = set(sys.modules)
    os.environ[HOST_VARIABLE] = str(build.lib)
    try:
        importlib.import_module("llama_cpp")
    except Exception as error:  # whatever it is: the stock library may do
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "llama_cpp":
                del sys.modules[name]
        if _is_mapped(build.lib):
            raise  # half of it is in this process: with the stock library there would be two ggml, each half known
        raise BuildError(f"llama-cpp-python cannot load {build.lib} ({error}): {REMEDY}") from error
    finally:
        del os.environ[HOST_VARIABLE]  # programs started from here choose for themselves


def _is_mapped(lib: Path) -> bool:
    try:
        return str(lib) in Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return True
