"""The llama-cpp-python release that everything here is about, and the sources of llama.cpp in its archive.

The same version and SHA-256 as in CMakeLists.txt, which compiles the plug-in against that archive's headers.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from ..errors import BuildError

RELEASE = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
ARCHIVE = f"llama_cpp_python-{RELEASE}.tar.gz"

_SOURCES = f"llama_cpp_python-{RELEASE}/vendor/llama.cpp/"
_LEFT_OUT = ("models/", "docs/", "media/")  # two thirds of it, and nothing that is compiled


def find_sdist(given: Path | None, keep: Path) -> Path:
    """The archive: `given`, or the one in folder `keep`, or fetched into it. Raises BuildError, also when its hash is another."""
    if given is not None:
        if not given.is_file():
            raise BuildError(f"--sdist {given} is no file: give {ARCHIVE}, as `pip download` fetches it")
        _check(given)
        return given
    kept = keep / ARCHIVE
    if kept.is_file() and _sha256(kept) == SDIST_SHA256:
        return kept
    _download(keep)
    _check(kept)
    return kept


def _download(folder: Path) -> None:
    """By this Python's own pip, so that its index settings hold."""
    folder.mkdir(parents=True, exist_ok=True)
    reason = ""
    # pip asks the package's own build back end for its name: the one at hand, if there is one, else pip's own copy of it.
    for isolation in (["--no-build-isolation"], []):
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *isolation,
            "--no-binary", "llama-cpp-python", "--dest", str(folder), f"llama-cpp-python=={RELEASE}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return
        reason = next(reversed(done.stderr.strip().splitlines()), "pip said nothing")  # its last line says it
    raise BuildError(
        f"llama-cpp-python {RELEASE} could not be fetched ({reason}): without a network give its source archive, "
        f"--sdist /path/to/{ARCHIVE}"
    )


def _check(archive: Path) -> None:
    found = _sha256(archive)
    if found != SDIST_SHA256:
        raise BuildError(
            f"{archive} has SHA-256 {found}, not the pinned {SDIST_SHA256}: give {ARCHIVE} as it was released"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def unpack(sdist: Path, folder: Path) -> Path:
    """llama.cpp's sources, in a folder below `folder`."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # not in the first releases of Python 3.10 and 3.11
            archive.extraction_filter = tarfile.data_filter
        for member in archive:
            below = member.name.removeprefix(_SOURCES)
            if below != member.name and not below.startswith(_LEFT_OUT):
                archive.extract(member, folder)
    sources = folder / _SOURCES
    if not (sources / "CMakeLists.txt").is_file():
        shutil.rmtree(folder)
        raise BuildError(f"{sdist} has no llama.cpp in {_SOURCES}")
    return sources
