"""Random expert weights of every type: their bytes and their exact values in float64. The encoders and decoders here are
the tests' own and written from the formats' definitions; nothing is taken from the product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkpoint_fixtures import E4M3

GGML_TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "FP8": 24, "BF16": 30}  # FP8 travels as I8
GROUP = {"F32": 1, "F16": 1, "Q8_0": 32, "FP8": 1, "BF16": 1}


@dataclass
class Weights:
    kind: str
    codes: np.ndarray  # uint8 [..., rows, row_bytes]
    values: np.ndarray  # float64 [..., rows, k]
    scales: np.ndarray | None = None  # float32 [..., ceil(rows / block0), ceil(k / block1)]
    block: tuple[int, int] = (0, 0)


def random_weights(
    kind: str,
    rows: int,
    k: int,
    rng: np.random.Generator,
    block: tuple[int, int] = (128, 128),
    n_expert: int | None = None,
) -> Weights:
    lead = () if n_expert is None else (n_expert,)
    shape = (*lead, rows, k)
    if kind == "FP8":
        codes = rng.integers(0, 256, shape, np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x01  # a subnormal instead of NaN
        grid = (*lead, -(-rows // block[0]), -(-k // block[1]))
        scales = rng.uniform(1e-4, 1e-2, grid).astype(np.float32)
        full = np.repeat(np.repeat(scales, block[0], -2), block[1], -1)[..., :rows, :k]
        return Weights(kind, codes, E4M3.astype(np.float64)[codes] * full, scales, block)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "F32":
        return Weights(kind, x.view(np.uint8), x.astype(np.float64))
    if kind == "F16":
        h = x.astype(np.float16)
        h.reshape(-1)[::97] = np.float16(3e-6)  # subnormal halves
        return Weights(kind, h.view(np.uint8), h.astype(np.float64))
    if kind == "BF16":
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        return Weights(kind, bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64))
    assert kind == "Q8_0"
    d = rng.uniform(1e-3, 1e-1, (*lead, rows, k // 32)).astype(np.float16)
    q = rng.integers(-128, 128, (*lead, rows, k // 32, 32), np.int8)
    codes = np.concatenate([d[..., None].view(np.uint8), q.view(np.uint8)], -1).reshape(*lead, rows, k // 32 * 34)
    values = (q.astype(np.float64) * d[..., None].astype(np.float64)).reshape(shape)
    return Weights(kind, codes, values)


def tolerance(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rounding of float32 dot products of this length, in any order: k x eps x sum of |w||x|, [m, rows]."""
    k = x.shape[-1]
    return (2.0**-24) * max(k, 8) ** 0.5 * 8 * (np.abs(x).astype(np.float64) @ np.abs(weights).T) + 1e-30
