"""Applies patches as `git format-patch` writes them to a folder of sources, exactly or not at all: no fuzz, renames, binaries.

In Python because neither git nor patch is on every machine that has a compiler, and because all of them must do the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")
_UNKNOWN = (b"GIT binary patch", b"Binary files ", b"rename from ", b"copy from ")


class PatchFault(Exception):
    """What is wrong, without the patch's name."""


@dataclass
class Hunk:
    """`old` and `new`: lines with their ends; `first`: where `old` begins in the file as it was, from 0."""

    first: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass
class FileDiff:
    old: str | None  # path below the folder; None: the file is new
    new: str | None  # None: the file is deleted
    hunks: list[Hunk] = field(default_factory=list)


def apply_patch(patch: bytes, folder: Path) -> list[str]:
    """The paths changed. Raises PatchFault before it writes anything."""
    results: dict[str, bytes | None] = {}
    for diff in parse(patch):
        path = diff.old or diff.new
        if path is None:
            raise PatchFault("a part of it names no file")
        if diff.old is None and (folder / path).exists():
            raise PatchFault(f"{path} is there already")
        if diff.old is not None and not (folder / path).is_file():
            raise PatchFault(f"{path} does not exist")
        if diff.new not in (None, path):
            raise PatchFault(f"{path} is renamed, which is not supported")
        before = (folder / path).read_bytes() if diff.old is not None else b""
        after = _apply(diff.hunks, before, path)
        if diff.new is None and after:
            raise PatchFault(f"{path} is deleted, but has more lines than the patch knows")
        results[path] = after if diff.new is not None else None
    if not results:
        raise PatchFault("it changes no file")
    for path, content in results.items():
        if content is None:
            (folder / path).unlink()
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    return list(results)


def parse(patch: bytes) -> list[FileDiff]:
    lines = _LINES.findall(patch)
    diffs: list[FileDiff] = []
    at, in_message = 0, True
    while at < len(lines):
        line = lines[at]
        in_message = in_message and not line.startswith(b"diff --git ")
        if line.startswith(_UNKNOWN) and not in_message:
            raise PatchFault(f"line {at + 1} is a rename, copy or binary change, which are not supported")
        if line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            diffs.append(FileDiff(_path(line, b"a/"), _path(lines[at + 1], b"b/")))
            at += 2
        elif line.startswith(b"@@ "):
            if not diffs:
                raise PatchFault(f"line {at + 1} is a hunk that belongs to no file")
            hunk, at = _hunk(lines, at)
            diffs[-1].hunks.append(hunk)
        else:
            at += 1
    if len({diff.old or diff.new for diff in diffs}) < len(diffs):
        raise PatchFault("it names a file twice")
    return diffs


def _path(line: bytes, prefix: bytes) -> str | None:
    name = line[4:].split(b"\t")[0].strip()
    if name == b"/dev/null":
        return None
    path = PurePosixPath(name.removeprefix(prefix).decode())
    if not name.startswith(prefix) or path.is_absolute() or ".." in path.parts:
        raise PatchFault(f"{name.decode()} is no path below {prefix.decode()}")
    return str(path)


def _hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    """The hunk that begins at line `at`, and the line after it."""
    head = _HUNK.match(lines[at])
    if head is None:
        raise PatchFault(f"line {at + 1} is no head of a hunk")
    n_old, n_new = (int(n) if n is not None else 1 for n in (head[2], head[4]))
    hunk = Hunk(int(head[1]) - 1 if n_old else int(head[1]))
    begin, at = at, at + 1
    while at < len(lines) and (len(hunk.old) < n_old or len(hunk.new) < n_new or lines[at].startswith(b"\\")):
        mark, text = lines[at][:1], lines[at][1:]
        if mark == b"\\":  # "\ No newline at end of file", about the line before
            for side, marks in ((hunk.old, b" -"), (hunk.new, b" +")):
                if side and lines[at - 1][:1] in marks:
                    side[-1] = side[-1].removesuffix(b"\n")
        elif mark in (b" ", b"\n"):  # mail programs strip the blank of an empty line
            hunk.old.append(text or b"\n")
            hunk.new.append(text or b"\n")
        elif mark == b"-":
            hunk.old.append(text)
        elif mark == b"+":
            hunk.new.append(text)
        else:
            break
        at += 1
    if (len(hunk.old), len(hunk.new)) != (n_old, n_new):
        raise PatchFault(f"the hunk at line {begin + 1} is cut off or damaged")
    return hunk, at


def _apply(hunks: list[Hunk], content: bytes, path: str) -> bytes:
    lines = _LINES.findall(content)
    done: list[bytes] = []
    at, shift = 0, 0  # lines of the file used up; how far earlier hunks were from where they said
    for number, hunk in enumerate(hunks, 1):
        begin = _find(hunk.old, lines, at, hunk.first + shift)
        if begin is None:
            raise PatchFault(f"{path} is not what hunk {number} (line {hunk.first + 1}) expects")
        shift = begin - hunk.first
        done += lines[at:begin] + hunk.new
        at = begin + len(hunk.old)
    return b"".join(done + lines[at:])


def _find(old: list[bytes], lines: list[bytes], low: int, expected: int) -> int | None:
    """Where `old` lies in lines[low:], nearest to `expected`; a hunk without old lines lies where it says."""
    if not old:
        return expected if low <= expected <= len(lines) else None
    places = range(low, len(lines) - len(old) + 1)
    return next((p for p in sorted(places, key=lambda p: abs(p - expected)) if lines[p : p + len(old)] == old), None)
