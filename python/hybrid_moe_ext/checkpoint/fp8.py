"""FP8 arithmetic on the host: E4M3FN codes x block scales, rounding to BF16, reading elements. NumPy only.

The experts' codes never pass here: the plug-in computes on them directly. This is for the dense tensors.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .quantization import Block
from .safetensors import TensorRef

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


def _e4m3_table() -> NDArray[np.float32]:
    """Value of each code; 0x7F and 0xFF are the two NaNs, there are no infinities."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[[0x7F, 0xFF]] = np.nan
    return np.where(codes & 0x80, -value, value).astype(np.float32)


E4M3 = _e4m3_table()
E8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)  # powers of two; 255 is NaN


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even. Overwrites `values`, which must be contiguous."""
    bits = values.view(np.uint32)
    nan = np.isnan(values)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    if nan.any():  # adding may have carried into the sign
        bits[nan] = 0x7FC0
    return bits.astype(np.uint16)


def read_elements(ref: TensorRef, first: int, count: int) -> NDArray[Any]:
    """Elements [first, first + count) of a tensor's flat bytes, in the file's own type."""
    dtype = NUMPY_DTYPE[ref.dtype]
    data = np.empty(count, dtype)
    view = data.data.cast("B")
    offset = ref.offset + first * dtype.itemsize
    try:
        with open(ref.path, "rb", buffering=0) as file:
            # Exactly these bytes: read-ahead, megabytes on some devices, would fetch the experts next to them.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            while view:
                n_read = os.preadv(file.fileno(), [view], offset)
                if n_read == 0:
                    raise CheckpointError(
                        f"{ref.path}: tensor {ref.name!r} ends early: the file has changed, open it again"
                    )
                view, offset = view[n_read:], offset + n_read
    except OSError as error:
        raise CheckpointError(f"{ref.path}: tensor {ref.name!r} cannot be read ({error.strerror})") from error
    return data


def to_f32(ref: TensorRef, data: NDArray[Any]) -> NDArray[np.float32]:
    """A fresh float32 array of BF16, F16, F32 or E8M0 elements."""
    if ref.dtype == "BF16":
        return bf16_to_f32(data)
    if ref.dtype == "F8_E8M0":
        return np.take(E8M0, data)
    return data.astype(np.float32)


def read_scale(ref: TensorRef, grid: tuple[int, int]) -> NDArray[np.float32]:
    """All scales of one matrix, [grid rows, grid columns]; they must be finite."""
    scale = to_f32(ref, read_elements(ref, 0, int(np.prod(ref.shape)))).reshape(grid)
    if not np.isfinite(scale).all():
        raise CheckpointError(f"{ref.path}: scale {ref.name!r} has an infinity or NaN: download the file again")
    return scale


def dequantise_rows(
    ref: TensorRef, codes: NDArray[np.uint8], scale: NDArray[np.float32], block: Block, first_row: int
) -> NDArray[np.float32]:
    """codes [n, k], rows from `first_row` of the matrix -> float32 [n, k]. NaN codes are refused."""
    if codes.size and int((codes & 0x7F).max()) == 0x7F:
        raise CheckpointError(
            f"{ref.path}: tensor {ref.name!r} has the NaN code 0x7F or 0xFF in rows from {first_row}:"
            f" the file is damaged, download it again"
        )
    n, k = codes.shape
    values = np.take(E4M3, codes)
    if scale.shape[1] == 1:  # one scale per row, whatever the number of rows that share it
        values *= scale[(first_row + np.arange(n)) // block[0]]
        return values
    row = 0
    while row < n:  # one block row at a time: its scales are a single vector over the columns
        i_block = (first_row + row) // block[0]
        end = min(n, (i_block + 1) * block[0] - first_row)
        values[row:end] *= np.repeat(scale[i_block], block[1])[:k]
        row = end
    return values
