"""The folder of finished builds, `$XDG_CACHE_HOME/hybrid-moe/llama`: what lies there, read and removed. Nothing is built here.

KEY/lib/          libllama.so and the libggml*.so it needs
KEY/build.json    what they were made of, and each file's size and time
KEY.log           what CMake and the compiler said
last              the key that was built, or asked for, last
llama_cpp_python-*.tar.gz, lock, work/     of the one build that may be running
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError
from .patch_files import Patch

_KEY = re.compile(r"[0-9a-f]{16}")
_FORMAT = 1
REMEDY = "run `hybrid-moe build-llama` again"


@dataclass(frozen=True)
class Build:
    """A finished one."""

    key: str
    built: str  # when, ISO 8601
    release: str  # of llama-cpp-python
    ggml: str  # ggml's version
    patches: tuple[Patch, ...]
    backends: tuple[str, ...]  # by the libraries that came out, without cpu
    cmake_args: tuple[str, ...]
    compilers: tuple[str, ...]
    cpu: tuple[str, ...]  # what the CPU must have
    files: dict[str, tuple[int, int]]  # in lib/: bytes, modification time in ns

    @property
    def lib(self) -> Path:
        return cache_folder() / self.key / "lib"

    def write(self, folder: Path) -> None:
        (folder / "build.json").write_text(json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n")

    def changed_file(self) -> str | None:
        """The name of a file that is not as it was built."""
        return next((name for name, facts in self.files.items() if file_facts(self.lib / name) != facts), None)


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "hybrid-moe" / "llama"


def file_facts(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def build_keys() -> list[str]:
    """Of what lies there, whether it can be used or not; the one built or asked for last is first, then the newest."""
    folder = cache_folder()
    try:
        found = [entry for entry in os.scandir(folder) if _KEY.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []
    last = _read_last()
    return [e.name for e in sorted(found, key=lambda e: (e.name != last, -e.stat().st_mtime_ns))]


def _read_last() -> str:
    try:
        return (cache_folder() / "last").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def prefer(key: str) -> None:
    """This one is taken from now on, where several would do."""
    fresh = cache_folder() / f"last.{os.getpid()}"
    fresh.write_text(key + "\n")
    fresh.replace(cache_folder() / "last")


def read_build(key: str) -> Build:
    """Raises BuildError when it is not there or is none of ours."""
    return read_build_file(cache_folder() / key / "build.json")


def read_build_file(path: Path) -> Build:
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        if told.pop("format") != _FORMAT:
            raise ValueError("another format")
        patches = tuple(Patch(**patch) for patch in told.pop("patches"))
        files: dict[str, tuple[int, int]] = {
            name: (int(size), int(time)) for name, (size, time) in told.pop("files").items()
        }
        lists: dict[str, Any] = {name: tuple(told.pop(name)) for name in ("backends", "cmake_args", "compilers", "cpu")}
        return Build(patches=patches, files=files, **lists, **told)
    except FileNotFoundError as error:
        raise BuildError(f"{path} does not exist: {REMEDY}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path} cannot be read ({type(error).__name__}: {error}): {REMEDY}") from error


@contextlib.contextmanager
def locked(on_wait: Callable[[str], None]) -> Iterator[int]:
    """One at a time, of all processes. `on_wait` is told once when another one is at work.

    Yields the lock's file descriptor: a program that inherits it holds the lock as well, also when we are killed.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115  closed below
    except OSError as error:
        raise BuildError(
            f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            on_wait(f"process {lock.read().strip() or 'unknown'} is building here: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield lock.fileno()  # closing the file ends the lock, as the end of all who have it does


def remove_all(on_wait: Callable[[str], None]) -> int:
    """Every build, log, archive and remainder. Bytes freed; a process that runs one of them keeps it."""
    folder = cache_folder()
    if not folder.is_dir():
        return 0
    with locked(on_wait):
        paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        freed = sum(path.stat().st_size for path in paths)
        for entry in folder.iterdir():
            if entry.name == "lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return freed
