"""E4M3 and BF16 as NumPy bit patterns: round, expand, per-block scales. No files, no torch, no ml_dtypes."""

from __future__ import annotations

import numpy as np

BLOCK = (128, 128)
E4M3_MAX = 448.0


def _e4m3_values() -> np.ndarray:
    """[256] float32: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


E4M3_VALUES = _e4m3_values()
_POSITIVE = E4M3_VALUES[:127].astype(np.float64)  # ascending with the code: 0 .. 448
_MIDPOINTS = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 -> uint8 codes of the same shape, nearest, ties to the even code; clamps to +-448, never a NaN code."""
    size = np.abs(values.astype(np.float64))
    if not np.isfinite(size).all():
        raise ValueError("cannot store NaN or infinity as E4M3")
    below = np.searchsorted(_MIDPOINTS, size, side="left")  # a tie stays at the lower code
    tie = (below < len(_MIDPOINTS)) & (size == _MIDPOINTS[np.minimum(below, len(_MIDPOINTS) - 1)])
    code = np.where(tie & (below % 2 == 1), below + 1, below).astype(np.uint8)
    return code | (np.signbit(values).astype(np.uint8) << 7)


def block_grid(shape: tuple[int, int], block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def expand_scale(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int] = BLOCK) -> np.ndarray:
    """[grid] -> [rows, cols]; the last block of a ragged edge is cut, not rescaled."""
    if tuple(scale.shape) != block_grid(shape, block):
        raise ValueError(f"scale grid {scale.shape} for {shape} in blocks of {block}: want {block_grid(shape, block)}")
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def quantise(weight: np.ndarray, block: tuple[int, int] = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, cols] -> codes uint8 [rows, cols], scale_inv float32 [ceil(rows/128), ceil(cols/128)]."""
    rows, cols = weight.shape
    grid = block_grid(weight.shape, block)
    padded = np.zeros((grid[0] * block[0], grid[1] * block[1]), np.float32)
    padded[:rows, :cols] = np.abs(weight)
    amax = padded.reshape(grid[0], block[0], grid[1], block[1]).max((1, 3))
    scale = np.where(amax > 0, amax / np.float32(E4M3_MAX), np.float32(1)).astype(np.float32)
    return to_e4m3(weight / expand_scale(scale, weight.shape, block)), scale


def dequantise(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    """codes uint8 [rows, cols] and scale float32 [grid] -> float32 [rows, cols]; the product is rounded once."""
    return E4M3_VALUES[codes] * expand_scale(scale, codes.shape, block)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16, nearest even. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
