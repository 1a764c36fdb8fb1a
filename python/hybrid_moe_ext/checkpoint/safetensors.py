"""The header of one safetensors file: names, types, shapes and absolute offsets. No tensor bytes are read or kept here.

Strict on purpose: expert bytes are used in place later, so a wrong offset must be caught before anything is mapped.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

REDOWNLOAD = "download the file again"


@dataclass(frozen=True)
class TensorRef:
    """Where one tensor's bytes lie. `offset` counts from the start of the file, not from the end of its header."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def read_header(path: Path) -> list[TensorRef]:
    """All tensors of a file, in the order of their bytes. Raises CheckpointError for anything the format forbids."""
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # the header, and no weights after it
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: {file_bytes} bytes are too few for a safetensors file: {REDOWNLOAD}")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header length {header_bytes} exceeds the format's limit of {MAX_HEADER_BYTES} bytes;"
                    f" this is not a safetensors file or it is damaged: {REDOWNLOAD}"
                )
            if header_bytes > file_bytes - 8:
                raise CheckpointError(
                    f"{path}: header length {header_bytes} exceeds the file ({file_bytes} bytes): {REDOWNLOAD}"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): {REDOWNLOAD}, or fix its rights") from error
    entries = _parse(path, text)
    data_start = 8 + header_bytes
    refs = [_tensor(path, name, entry, data_start) for name, entry in entries.items() if name != "__metadata__"]
    refs.sort(key=lambda ref: (ref.offset, ref.n_bytes))
    _check_layout(path, refs, data_start, file_bytes)
    return refs


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: header names {twice!r} twice: {REDOWNLOAD}")
        return entries

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON ({error}): {REDOWNLOAD}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: header is not a JSON object: {REDOWNLOAD}")
    return entries


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorRef:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its header entry is not a JSON object: {REDOWNLOAD}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; the format has {', '.join(DTYPE_BYTES)}")
    if not _is_counts(shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of non-negative integers: {REDOWNLOAD}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not [begin, end]: {REDOWNLOAD}")
    n_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if n_bytes != expected:
        raise CheckpointError(f"{where}: {dtype} {shape} needs {expected} bytes, but it spans {n_bytes}: {REDOWNLOAD}")
    return TensorRef(name, path, dtype, tuple(shape), data_start + offsets[0], n_bytes)


def _is_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, refs: list[TensorRef], data_start: int, file_bytes: int) -> None:
    """The format wants the data area covered exactly once: no overlap, no hole, nothing after the last tensor."""
    end = data_start
    for ref in refs:
        if ref.offset + ref.n_bytes > file_bytes:
            raise CheckpointError(
                f"{path}: tensor {ref.name!r} ends at byte {ref.offset + ref.n_bytes}, the file has {file_bytes}:"
                f" the file is truncated or its header is wrong: {REDOWNLOAD}"
            )
        if ref.offset != end:
            fault = "overlaps the tensor before it" if ref.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {ref.name!r} {fault} (bytes {ref.offset} and {end}): {REDOWNLOAD}")
        end = ref.offset + ref.n_bytes
    if end != file_bytes:
        raise CheckpointError(f"{path}: tensors end at byte {end}, the file has {file_bytes}: {REDOWNLOAD}")
