"""The FP8 scales at the end of a GGUF file: table, scales, footer (docs/fp8-gguf.md). The plug-in's own reader, with
the checksum, is cpp/checkpoint/trailer.h; both know the same format."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import CheckpointError
from .fp8 import read_elements, to_f32
from .inventory import ExpertTensor
from .quantization import grid_shape

VERSION = 1
VERSION_KEY = "hybrid_moe.fp8.version"
ALIGNMENT = 64  # of scales and of the trailer's start
SCALE_TYPES = ("F32", "BF16", "F8_E8M0")  # by number; safetensors' names
SCALE_BYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1}
FOOTER = struct.Struct("<8sIIQQ8x8s")  # magic, version, crc32, offset, length, zeros, magic
MAGIC = b"HMOEFP8\n"
_NUMBERS = struct.Struct("<6I2Q")  # n_expert, n_rows, k, block rows, block columns, scale type, codes at, scales at
REMEDY = "convert the checkpoint again"


@dataclass(frozen=True)
class Entry:
    name: str  # GGUF name
    n_expert: int
    n_rows: int
    k: int
    block: tuple[int, int]
    scale_type: str
    data_offset: int  # of the codes, in the file
    scales_offset: int  # in the file

    @property
    def scale_bytes(self) -> int:
        rows, columns = grid_shape(self.n_rows, self.k, self.block)
        return self.n_expert * rows * columns * SCALE_BYTES[self.scale_type]

    def pack(self) -> bytes:
        name = self.name.encode()
        type_ = SCALE_TYPES.index(self.scale_type)
        numbers = (self.n_expert, self.n_rows, self.k, *self.block, type_, self.data_offset, self.scales_offset)
        return struct.pack("<I", len(name)) + name + _NUMBERS.pack(*numbers)


def padded(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def packed_bytes(tensor: ExpertTensor) -> int:
    """At most what a tensor adds to a trailer."""
    assert tensor.scales is not None
    return 4 + len(tensor.name.encode()) + _NUMBERS.size + padded(sum(ref.n_bytes for ref in tensor.scales))


class Trailer:
    """The trailer of one file, before it is written: `start` is the end of the file's tensor data."""

    def __init__(self, placed: list[tuple[ExpertTensor, int]], start: int):
        assert start % ALIGNMENT == 0
        self._tensors = [tensor for tensor, _ in placed]
        self.start = start
        blank = [_entry(tensor, at, 0) for tensor, at in placed]
        at = start + 4 + sum(len(entry.pack()) for entry in blank)
        self.entries = []
        for tensor, data_at in placed:
            at = padded(at)
            self.entries.append(_entry(tensor, data_at, at))
            at += self.entries[-1].scale_bytes
        self.n_bytes = at - start + FOOTER.size

    def pieces(self) -> Iterator[bytes]:
        """The bytes, a tensor's scales at a time. Raises CheckpointError when a scale is not finite."""
        at, crc = self.start, 0
        for piece in self._checked_pieces():
            at, crc = at + len(piece), zlib.crc32(piece, crc)
            yield piece
        yield FOOTER.pack(MAGIC, VERSION, crc, self.start, at - self.start, MAGIC)

    def _checked_pieces(self) -> Iterator[bytes]:
        table = struct.pack("<I", len(self.entries)) + b"".join(entry.pack() for entry in self.entries)
        at = self.start + len(table)
        yield table
        for entry, tensor in zip(self.entries, self._tensors, strict=True):
            scales = _read_scales(tensor)
            yield bytes(entry.scales_offset - at) + scales
            at = entry.scales_offset + len(scales)


def _entry(tensor: ExpertTensor, data_offset: int, scales_offset: int) -> Entry:
    assert tensor.scales is not None and tensor.block is not None
    type_ = tensor.scales[0].dtype
    return Entry(tensor.name, *tensor.shape, tensor.block, type_, data_offset, scales_offset)


def _read_scales(tensor: ExpertTensor) -> bytes:
    """[n_expert][grid] as stored."""
    parts = []
    for ref in tensor.scales or ():
        data = read_elements(ref, 0, int(np.prod(ref.shape)))
        if not np.isfinite(to_f32(ref, data)).all():
            raise CheckpointError(f"{ref.path}: scale {ref.name!r} has an infinity or NaN: download the file again")
        parts.append(data.tobytes())
    return b"".join(parts)


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """The table of a converted file. Checks everything but the checksum, for which all scales would have to be read."""
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - FOOTER.size))
        footer = file.read(FOOTER.size)
        if len(footer) < FOOTER.size or not (footer.startswith(MAGIC) and footer.endswith(MAGIC)):
            raise CheckpointError(
                f"{path}: is marked as FP8 ({VERSION_KEY}) but has no trailer with the scales at its end:"
                f" it is cut short or was rewritten by a tool that does not know it: {REMEDY}"
            )
        _, version, _, start, length, _ = FOOTER.unpack(footer)
        if version != VERSION:
            raise CheckpointError(
                f"{path}: its FP8 trailer has version {version}, this release reads {VERSION}:"
                f" update hybrid-moe-ext or {REMEDY}"
            )
        if start + length != size - FOOTER.size:
            raise CheckpointError(f"{path}: its FP8 trailer does not lie where its footer says: {REMEDY}")
        file.seek(start)
        try:
            (n_tensors,) = struct.unpack("<I", file.read(4))
            return [_read_entry(file, start, start + length) for _ in range(n_tensors)]
        except (struct.error, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: the table of its FP8 trailer is damaged ({error}): {REMEDY}") from error


def _read_entry(file: BinaryIO, start: int, end: int) -> Entry:
    (n,) = struct.unpack("<I", file.read(4))
    if n > end - start:
        raise ValueError(f"a name of {n} bytes")
    name = file.read(n).decode()
    numbers = _NUMBERS.unpack(file.read(_NUMBERS.size))
    n_expert, n_rows, k, block_rows, block_k, type_, data_at, scales_at = numbers
    if min(n_expert, n_rows, k, block_rows, block_k) < 1:
        raise ValueError(f"{name!r} has a size of 0")
    entry = Entry(name, n_expert, n_rows, k, (block_rows, block_k), SCALE_TYPES[type_], data_at, scales_at)
    if scales_at < start or scales_at + entry.scale_bytes > end:
        raise ValueError(f"the scales of {name!r} leave the trailer")
    return entry
