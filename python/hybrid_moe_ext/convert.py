"""A Hugging Face directory written to disk as GGUF: the virtual GGUF's bytes, and for FP8 experts a trailer with their
scales (docs/fp8-gguf.md). All or nothing: files get their names when everything is written.

    paths = convert("DeepSeek-V3/", "DeepSeek-V3.gguf", split_max_size=50 * 10**9)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from . import _native
from .checkpoint import Checkpoint, ExpertTensor, VirtualGguf, open_checkpoint
from .checkpoint import trailer as fp8
from .checkpoint.dense import DenseTensor
from .checkpoint.virtual_gguf import Region
from .errors import CheckpointError, HybridMoeError, OptionError

ALIGNMENT = 64  # of tensors in the file: a cache line; llama.cpp itself asks for 32
# Read, checked and written at a time. 4, 16 and 64 MiB were equally fast (1.6 GB in RAM: 70 % of a plain copy's speed).
PIECE_BYTES = 16 << 20
N_AHEAD = 2  # pieces read while one is written: no gain with everything in RAM, there for disks that are slow both ways
PART = ".hybrid-moe-part"  # of a file that is being written
FP8_TYPE = Type.I8
MAX_FILES = 65535  # split.count is 16 bits wide

Tensors = list[tuple[DenseTensor | ExpertTensor, Type]]
Piece = bytes | memoryview
Progress = Callable[[float], None]


def convert(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dense_type: str = "bf16",
    split_max_size: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes the model as one GGUF, or as several of at most `split_max_size` bytes each (a larger tensor gets a file
    to itself). Returns their paths; llama.cpp wants the first.

    Raises OptionError for an `out` that cannot be written, CheckpointError for a damaged checkpoint or one that
    changes meanwhile, HybridMoeError when writing fails. After an exception, also KeyboardInterrupt, nothing is left
    behind, and a file that `force` was to replace is as it was.
    """
    before = _snapshot(Path(directory))
    checkpoint = open_checkpoint(directory)
    files = _plan(checkpoint, dense_type, split_max_size)
    paths = _paths(Path(out), len(files))
    _check_target(paths, force, sum(file.n_bytes for file in files))
    with _Parts(paths) as parts:
        done, total = 0, sum(file.n_bytes for file in files)
        for file, part in zip(files, parts.files, strict=True):
            for n in part.write(file.pieces()):
                done += n
                if progress is not None:
                    progress(done / total)
        _check_unchanged(checkpoint, before)
        parts.publish(force)
    return paths


def parse_size(text: str) -> int:
    """Bytes, with K, M, G or T for powers of 1000, as llama.cpp's own tools count them."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise OptionError(f"size {text!r} is not possible: give a number of bytes, such as 50G or 700M")
    return int(match[1]) * int(1000 ** " KMGT".index(match[2] or " "))


# --- What is written: files, their tensors, their bytes.


@dataclass(frozen=True)
class _File:
    virtual: VirtualGguf
    trailer: fp8.Trailer | None

    @property
    def n_bytes(self) -> int:
        return self.virtual.size + (self.trailer.n_bytes if self.trailer else 0)

    def pieces(self) -> Generator[Piece, None, None]:
        """All of the file in order, read ahead by a second thread while the caller writes."""
        todo = iter(
            (region, at)
            for region in self.virtual.regions
            for at in range(region.start, self.virtual.end_of(region), PIECE_BYTES)
        )
        with ThreadPoolExecutor(1, "convert-read") as reader:
            ahead: deque[Future[memoryview]] = deque()
            for region, at in todo:
                ahead.append(reader.submit(self._piece, region, at))
                if len(ahead) > N_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        if self.trailer:
            yield from self.trailer.pieces()

    def _piece(self, region: Region, at: int) -> memoryview:
        out = np.empty(min(PIECE_BYTES, self.virtual.end_of(region) - at), np.uint8)
        self.virtual.read_into(at, out, with_experts=True)
        if isinstance(region.tensor, ExpertTensor) and region.tensor.ggml_type == FP8_TYPE:
            _refuse_nan(region.tensor, at - region.start, out)
        return out.data


def _refuse_nan(tensor: ExpertTensor, first: int, codes: NDArray[np.uint8]) -> None:
    """`codes` are a tensor's bytes from `first` on; padding after them is zero."""
    if not _native.check(_native.library().hybrid_moe_has_nan(b"", ctypes.c_char_p(codes.ctypes.data), len(codes))):
        return
    at = first + int(np.flatnonzero((codes & 0x7F) == 0x7F)[0])
    expert, at = divmod(at, tensor.n_rows * tensor.k)
    ref = tensor.codes[expert]
    raise CheckpointError(
        f"{ref.path}: tensor {ref.name!r} has a NaN code (0x7F or 0xFF) in row {at // tensor.k}, column"
        f" {at % tensor.k}: the file is damaged, download it again"
    )


def _plan(checkpoint: Checkpoint, dense_type: str, max_bytes: int | None) -> list[_File]:
    whole = checkpoint.virtual_gguf(dense_type)
    is_fp8 = any(type_ == FP8_TYPE for _, type_ in whole.tensors)
    groups = [whole.tensors] if max_bytes is None else _split(whole, is_fp8, max_bytes)
    return [_file(whole, is_fp8, i, groups) for i in range(len(groups))]


def _file(whole: VirtualGguf, is_fp8: bool, i_file: int, groups: list[Tensors]) -> _File:
    def write_fields(w: gguf.GGUFWriter) -> None:
        if is_fp8:
            w.add_uint32(fp8.VERSION_KEY, fp8.VERSION)
        if len(groups) > 1:
            w.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, i_file)
            w.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, len(groups))
            w.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, sum(len(group) for group in groups))

    virtual = whole.file(groups[i_file], write_fields, with_metadata=i_file == 0, alignment=ALIGNMENT)
    if not is_fp8:
        return _File(virtual, None)
    placed = [(r.tensor, r.start) for r in virtual.regions if isinstance(r.tensor, ExpertTensor) and r.type == FP8_TYPE]
    return _File(virtual, fp8.Trailer(placed, virtual.size))


def _split(whole: VirtualGguf, is_fp8: bool, max_bytes: int) -> list[Tensors]:
    """Tensors in order, as many to a file as fit."""
    # Of a file without tensors; the first has the vocabulary.
    fixed = [_file(whole, is_fp8, i, [[], []]).n_bytes + 2 * ALIGNMENT for i in range(2)]
    groups: list[Tensors] = [[]]
    n_bytes = fixed[0]
    for tensor, type_ in whole.tensors:
        n_data = tensor.n_bytes(type_) if isinstance(tensor, DenseTensor) else tensor.n_bytes
        n = n_data + 2 * ALIGNMENT + len(tensor.name.encode()) + 64  # with its place in the header
        if isinstance(tensor, ExpertTensor) and type_ == FP8_TYPE:
            n += fp8.packed_bytes(tensor)
        if groups[-1] and n_bytes + n > max_bytes:
            groups.append([])
            n_bytes = fixed[1]
        groups[-1].append((tensor, type_))
        n_bytes += n
    if len(groups) > MAX_FILES:
        raise OptionError(f"this would be {len(groups)} files, GGUF numbers up to {MAX_FILES}: allow larger ones")
    return groups


# --- Where it is written.


def _paths(out: Path, n_files: int) -> list[Path]:
    """llama.cpp finds the files of a split model by these names."""
    if out.suffix != ".gguf" or not out.stem:
        raise OptionError(f"{out}: a model is written as NAME.gguf: give such a name")
    if n_files == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{i + 1:05d}-of-{n_files:05d}.gguf") for i in range(n_files)]


def _check_target(paths: list[Path], force: bool, n_bytes: int) -> None:
    folder = paths[0].parent
    if not folder.is_dir():
        raise OptionError(f"{folder}: this folder does not exist: make it, or give another output")
    _refuse_existing(paths, force)
    n_free = shutil.disk_usage(folder).free
    if n_free < n_bytes:
        raise OptionError(
            f"{folder}: the model needs {n_bytes} bytes ({n_bytes / 1e9:.1f} GB), but the disk has {n_free} bytes"
            f" ({n_free / 1e9:.1f} GB) free: make room, or write to another disk"
        )


def _refuse_existing(paths: list[Path], force: bool) -> None:
    for path in paths:
        if path.is_dir():
            raise OptionError(f"{path}: is a folder: give the name of a file")
        if not force and os.path.lexists(path):
            raise OptionError(f"{path}: exists: give another name, or replace it with --force (force=True)")


class _Part:
    """A file under a temporary name, locked while it is written: a forgotten one can be told from one in use."""

    def __init__(self, path: Path):
        self.path = path
        self.part = path.with_name(path.name + PART)
        try:
            self.fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OptionError(f"{self.part}: cannot be written ({error.strerror}): give another output") from error
        self.is_mine = False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A conversion that ended between open and lock has renamed or removed what we opened.
            self.is_mine = os.path.samestat(os.fstat(self.fd), os.lstat(self.part))
        except (BlockingIOError, FileNotFoundError):
            pass
        if not self.is_mine:
            os.close(self.fd)
            raise OptionError(f"{self.part}: another conversion is writing it: wait for it, or give another name")
        os.ftruncate(self.fd, 0)

    def write(self, pieces: Generator[Piece, None, None]) -> Iterator[int]:
        """Yields how many bytes went into the file, piece by piece."""
        with contextlib.closing(pieces):
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    n = _or_explain(self.part, os.write, self.fd, view)
                    view = view[n:]
                    yield n
        _or_explain(self.part, os.fsync, self.fd)

    def remove(self) -> None:
        if self.is_mine:
            with contextlib.suppress(OSError):
                os.unlink(self.part)
        os.close(self.fd)


class _Parts:
    """All files of one conversion. Leaving the block removes what has not been published."""

    def __init__(self, paths: list[Path]):
        self._paths = paths
        self.files: list[_Part] = []

    def __enter__(self) -> _Parts:
        try:
            for path in self._paths:
                self.files.append(_Part(path))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.remove()

    def publish(self, force: bool) -> None:
        """The first file last: it is the one that hosts are given, and it then finds all others."""
        _refuse_existing(self._paths, force)
        published = []
        try:
            for file in reversed(self.files):
                _or_explain(file.path, os.replace, file.part, file.path)
                file.is_mine = False
                published.append(file.path)
        except BaseException:
            for path in published:
                path.unlink(missing_ok=True)
            raise
        folder = os.open(self._paths[0].parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError:
            pass  # file systems without it
        finally:
            os.close(folder)


def _or_explain(path: Path, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room, or write to another disk" if full else "check the disk"
        raise HybridMoeError(f"{path}: writing failed ({error.strerror}): {remedy}; nothing is left of it") from error


# --- The checkpoint must stay as it is meanwhile.

_Identity = tuple[int, int, int, int]  # device, inode, size, time of change


def _identity(path: Path) -> _Identity | None:
    try:
        s = os.stat(path)
    except OSError:
        return None
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def _snapshot(directory: Path) -> dict[Path, _Identity | None]:
    """Taken before anything is read: headers and weights must be of the same files."""
    return {path: _identity(path) for path in directory.rglob("*.safetensors")}


def _check_unchanged(checkpoint: Checkpoint, before: dict[Path, _Identity | None]) -> None:
    refs = [ref for t in checkpoint.experts for ref in (*t.codes, *(t.scales or ()))]
    refs += [ref for t in checkpoint.dense for ref in (t.source, t.scale) if ref is not None]
    for path in sorted({ref.path for ref in refs}):
        now = _identity(path)
        if now is None or now != before.get(path, now):
            what = "disappeared" if now is None else "changed"
            raise CheckpointError(
                f"{path}: {what} while it was converted; a checkpoint must stay as it is meanwhile:"
                f" wait until its download is complete, then convert it again"
            )
