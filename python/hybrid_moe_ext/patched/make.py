"""Builds llama.cpp with the patches, aside, and puts it into the cache when it is whole and llama-cpp-python can load it."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from . import cache
from .cache import Build
from .patch_files import apply_patches
from .probe import probe
from .recipe import Recipe, find_cmake, find_tool
from .source import RELEASE, find_sdist, unpack

# "[12/345] Building ..." is ninja's, "[ 12%] Building ..." make's.
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"\[ *(\d+)%\]")
_LIBRARY = re.compile(r"lib(ggml|llama)[\w-]*\.so[.\d]*")
_TAIL = 15  # lines of the log that are shown


@dataclass(frozen=True)
class Progress:
    """Who is told what: `step` a sentence per step; inside `compiling`, its function how much is done, 0 to 1."""

    step: Callable[[str], None]
    compiling: Callable[[], contextlib.AbstractContextManager[Callable[[float], None]]]


def build(recipe: Recipe, patches_folder: Path, sdist: Path | None, jobs: int, progress: Progress) -> Build:
    """The finished build, at once when it is there already.

    Raises BuildError. Then, as when it is interrupted, nothing is left but a log.
    """
    cmake, generator = find_cmake()
    with cache.locked(progress.step) as lock:
        key = recipe.key
        with contextlib.suppress(BuildError):
            done = cache.read_build(key)
            if done.changed_file() is None:
                cache.prefer(key)
                return done
        folder = cache.cache_folder()
        work, log = folder / "work", folder / f"{key}.log"
        shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
        work.mkdir()
        try:
            sources = _sources(recipe, patches_folder, sdist, work, progress)
            with _Runner(log, lock) as runner:
                progress.step(f"configuring for {'; '.join(dict.fromkeys(recipe.compilers[1:]))}")
                runner.run(recipe.configure(cmake, generator, sources, work / "build"), _configure_remedy(recipe))
                progress.step(f"compiling with {jobs} jobs; this takes minutes, with GPU back ends up to an hour")
                compile_ = [cmake, "--build", str(work / "build"), "--parallel", str(jobs)]
                with progress.compiling() as share:
                    runner.run(compile_, "with too little memory try fewer jobs, -j 1", share)
            whole = work / "whole"
            _collect(work / "build", whole / "lib")
            progress.step("loading it into llama-cpp-python, in a process of its own")
            _finish(recipe, whole)
            shutil.rmtree(folder / key, ignore_errors=True)  # one that changed since it was built
            whole.rename(folder / key)
            cache.prefer(key)
        except OSError as error:
            raise BuildError(
                f"the build stopped: {error}: make room or set XDG_CACHE_HOME to another folder"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return cache.read_build(key)


def _sources(recipe: Recipe, patches_folder: Path, sdist: Path | None, work: Path, progress: Progress) -> Path:
    progress.step(f"llama-cpp-python {RELEASE}: its sources")
    sources = unpack(find_sdist(sdist, cache.cache_folder()), work / "sources")
    progress.step(f"patches: {', '.join(patch.name for patch in recipe.patches) or 'none'}")
    apply_patches(patches_folder, list(recipe.patches), sources)
    return sources


def _configure_remedy(recipe: Recipe) -> str:
    return recipe.needs() or "install what it misses (apt-get install g++ cmake ninja-build)"


def _collect(built: Path, lib: Path) -> None:
    """The libraries and the links between their names: ctypes opens libllama.so, which wants libggml.so.0 and others."""
    lib.mkdir(parents=True)
    for path in built.rglob("*.so*"):
        if _LIBRARY.fullmatch(path.name):
            shutil.copy2(path, lib / path.name, follow_symlinks=False)
    if not (lib / "libllama.so").exists():
        raise BuildError("the build made no libllama.so: a --cmake-arg must not turn BUILD_SHARED_LIBS off")


def _finish(recipe: Recipe, whole: Path) -> None:
    lib = whole / "lib"
    told = probe(lib)
    if told.release != RELEASE:
        raise BuildError(
            f"llama-cpp-python {told.release} is installed, the patches are for {RELEASE}: install that release"
        )
    files = {path.name: cache.file_facts(path) for path in lib.iterdir()}
    names = (re.fullmatch(r"libggml-(\w+)\.so", name) for name in files)
    Build(
        key=recipe.key,
        built=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        release=RELEASE,
        ggml=told.ggml,
        patches=recipe.patches,
        backends=tuple(sorted({name[1] for name in names if name} - {"base", "cpu"})),
        cmake_args=recipe.cmake_args,
        compilers=recipe.compilers,
        cpu=recipe.cpu,
        files={name: facts for name, facts in files.items() if facts is not None},
    ).write(whole)


class _Runner:
    """Runs programs one after the other, all they say going to one log."""

    def __init__(self, log: Path, lock: int):
        self._log = log
        self._lock = lock

    def __enter__(self) -> _Runner:
        self._file = self._log.open("w", buffering=1)  # by lines, for `tail -f`
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def run(self, command: list[str], remedy: str, share: Callable[[float], None] = lambda _: None) -> None:
        """Raises BuildError, with `remedy`, when it fails. Interrupted, it ends the program and all that it started."""
        print(*command, file=self._file, flush=True)
        tail: deque[str] = deque(maxlen=_TAIL)
        with _started(command, self._lock) as process:
            for line in process.stdout or ():
                self._file.write(line)
                tail.append(line.rstrip())
                _tell(line, share)
            failed = process.wait()
        if failed:
            self._file.flush()
            what = "compiling" if "--build" in command else "configuring"
            raise BuildError(f"{what} llama.cpp failed: {remedy}; all of its log is in {self._log}", tuple(tail))


def _tell(line: str, share: Callable[[float], None]) -> None:
    if ninja := _NINJA.match(line):
        share(int(ninja[1]) / max(1, int(ninja[2])))
    elif make := _MAKE.match(line):
        share(int(make[1]) / 100)


@contextlib.contextmanager
def _started(command: list[str], lock: int) -> Iterator[subprocess.Popen[str]]:
    # A session of its own: a build is a tree of processes, and Ctrl-C must end it once, from here. Were we killed, the next
    # builder must not write where this one still does: it inherits the lock.
    environment = os.environ | {"CLICOLOR_FORCE": "0", "LC_ALL": "C.UTF-8"}
    if ninja := find_tool("ninja"):
        environment["PATH"] = f"{Path(ninja).parent}{os.pathsep}{environment.get('PATH', '')}"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace",
        env=environment, start_new_session=True, pass_fds=(lock,),
    )  # fmt: skip
    try:
        yield process
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    finally:
        if process.stdout:
            process.stdout.close()
