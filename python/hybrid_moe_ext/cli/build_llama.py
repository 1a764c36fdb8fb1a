"""`hybrid-moe build-llama`: the flags, the progress and the report around hybrid_moe_ext.patched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .. import patched
from ..errors import BuildError, OptionError
from ..options import Options
from ..patched import cache
from ..patched.cache import Build
from ..patched.make import Progress, build
from ..patched.patch_files import Patch, patches_folder, read_patches
from ..patched.recipe import BACKENDS, make_recipe
from .info_text import size
from .llama_text import patch_lines
from .signals import termination_as_interrupt
from .terminal import note, progress_bar, write


def register(app: typer.Typer) -> None:
    app.command()(build_llama)


def build_llama(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", help=f"Once per back end: {', '.join(BACKENDS)}. [those of llama-cpp-python as installed]"
        ),
    ] = None,
    cmake_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--cmake-arg", metavar="-DNAME=VALUE", help="Once per argument of CMake; CMAKE_ARGS counts as well."
        ),
    ] = None,
    sdist: Annotated[
        Path | None,
        typer.Option("--sdist", metavar="FILE", help="llama-cpp-python's source archive, where there is no network."),
    ] = None,
    patches: Annotated[
        Path | None, typer.Option("--patches", metavar="FOLDER", help="Other patches than those of this package.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, max=1024, help="Compilers at a time; one per CPU by default.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the finished builds, and which one is used.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove all builds, logs and the kept archive.")] = False,
) -> None:
    """Build llama.cpp with this package's patches, once; `run`, `serve` and Python use it from then on."""
    Options.resolve()
    if show_list or clean:
        if backend or cmake_arg or sdist or patches or jobs or (show_list and clean):
            raise OptionError("--list and --clean build nothing: give no other option with them")
        return _list() if show_list else _clean()
    _build(_Request(backend, cmake_arg or [], sdist, patches, jobs or len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class _Request:
    backends: list[str] | None
    cmake_args: list[str]
    sdist: Path | None
    patches: Path | None
    jobs: int


def _build(r: _Request) -> None:
    if r.patches is not None and not r.patches.is_dir():
        raise OptionError(f"--patches {r.patches} is no folder: give the one that holds 0001-....patch")
    folder = r.patches or patches_folder()
    found = read_patches(folder)
    if not found:
        raise BuildError(
            f"{folder} holds no patches: llama-cpp-python's own library is the same, nothing is to be built"
        )
    if r.backends is None:
        installed = [name for name in patched.stock_backends() if name in BACKENDS]
        note(f"back ends: {', '.join(['cpu', *installed])}, as llama-cpp-python is installed")
        recipe = make_recipe(found, installed, r.cmake_args)
    else:
        recipe = make_recipe(found, r.backends, r.cmake_args)
    try:
        with termination_as_interrupt():
            done = build(recipe, folder, r.sdist, r.jobs, Progress(note, _compiling))
    except BuildError as error:
        for line in error.log_tail:
            note(f"  {line}")
        raise
    _report(done, found)


@contextlib.contextmanager
def _compiling() -> Iterator[Callable[[float], None]]:
    with progress_bar("compiling") as bar:
        yield bar or _tenths()


def _tenths() -> Callable[[float], None]:
    """For pipes and logs, where no bar can be drawn: a line per tenth."""
    told = 0

    def share(done: float) -> None:
        nonlocal told
        if int(done * 10) > told:
            told = int(done * 10)
            note(f"compiling: {told * 10} %")

    return share


def _report(done: Build, patches: list[Patch]) -> None:
    write(f"{done.lib}\n")
    for line in patch_lines(patches):
        note(line)
    reason = patched.why_not(done.key)
    note(f"not used: {reason}" if reason else "used from now on; HYBRID_MOE_LLAMA=stock leaves it out")


def _list() -> None:
    chosen = patched.in_use()
    for key in cache.build_keys():
        try:
            found = cache.read_build(key)
        except BuildError as error:
            write(f"{key}  cannot be used: {error}\n")
            continue
        mark = "  in use" if chosen.build == found and chosen.kind == "patched" else ""
        n_bytes = sum(n for n, _ in found.files.values())
        write(
            f"{key}  {found.built}  {size(n_bytes)}  {', '.join(('cpu', *found.backends))}  "
            f"{', '.join(p.name for p in found.patches) or 'no patches'}{mark}\n"
        )
    if chosen.why:
        note(f"not used: {chosen.why}")
    note(f"builds are in {cache.cache_folder()}")


def _clean() -> None:
    freed = cache.remove_all(note)
    note(f"{size(freed)} removed from {cache.cache_folder()}")
