"""The patches that this package brings for llama.cpp: which there are, what they are called and how they are switched on.

`patches/NNNN-short-subject.patch`, applied in order. The message of each has a line `Switch: ...`, which says in a few
words how a user turns it on; without that line it always works.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from .unified_diff import PatchFault, apply_patch

_NAME = re.compile(r"\d{4}-[\w.-]+\.patch")
_SUBJECT = re.compile(r"^Subject: *(?:\[PATCH[^\]]*\] *)?(.*(?:\n[ \t].*)*)", re.M)
_SWITCH = re.compile(r"^Switch: *(.+)$", re.M)
ALWAYS_ON = "always on"


@dataclass(frozen=True)
class Patch:
    name: str  # 0001-short-subject
    subject: str
    switch: str  # how it is switched on, in words
    sha256: str


def patches_folder() -> Path:
    """Inside the installed package, or in the source tree next to it."""
    package = Path(__file__).parent.parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent.parent / "patches"


def read_patches(folder: Path) -> list[Patch]:
    """In the order they are applied in. Raises BuildError for a file that is none."""
    if not folder.is_dir():
        return []
    return [_read(path) for path in sorted(folder.glob("*.patch"))]


def _read(path: Path) -> Patch:
    if not _NAME.fullmatch(path.name):
        raise BuildError(f"{path} has no number to be applied by: call it 0001-short-subject.patch")
    content = path.read_bytes()
    message = re.split(r"^(?:---$|diff --git )", content.decode("utf-8", "replace"), maxsplit=1, flags=re.M)[0]
    subject, switch = _SUBJECT.search(message), _SWITCH.search(message)
    return Patch(
        name=path.stem,
        subject=" ".join(subject[1].split()) if subject else path.stem,
        switch=switch[1].strip() if switch else ALWAYS_ON,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def digest(patches: list[Patch]) -> str:
    """Of all of them, in order."""
    return hashlib.sha256("\n".join(f"{p.name} {p.sha256}" for p in patches).encode()).hexdigest()


def apply_patches(folder: Path, patches: list[Patch], sources: Path) -> None:
    """`folder`: where the patches lie; `sources`: llama.cpp's. Raises BuildError with the name of the one that does not apply."""
    for patch in patches:
        try:
            apply_patch((folder / f"{patch.name}.patch").read_bytes(), sources)
        except PatchFault as fault:
            raise BuildError(
                f"patch {patch.name} does not apply to the pinned llama.cpp: {fault}: correct the patch, or take it out of "
                f"{folder} with those that need it"
            ) from fault
