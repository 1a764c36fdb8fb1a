"""Random expert weights of every type: their bytes and their exact values in float64. The encoders and decoders here are
the tests' own and written from the formats' definitions; nothing is taken from the product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import quantised
from checkpoint_fixtures import E4M3

GGML_TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "FP8": 24, "BF16": 30}  # FP8 travels as I8
GGML_TYPES |= {name: f.ggml_type for name, f in quantised.FORMATS.items()}
GROUP = {"F32": 1, "F16": 1, "FP8": 1, "BF16": 1} | {name: f.n for name, f in quantised.FORMATS.items()}


@dataclass
class Weights:
    kind: str
    codes: np.ndarray  # uint8 [..., rows, row_bytes]
    values: np.ndarray  # float64 [..., rows, k]
    scales: np.ndarray | None = None  # float32 [..., ceil(rows / block0), ceil(k / block1)]
    block: tuple[int, int] = (0, 0)
    terms: np.ndarray | None = None  # magnitudes of what a kernel may add up for each value, where larger than that


def whole_groups(kind: str, k: int) -> int:
    """k, or the next multiple of what a row of that type must have."""
    return -(-k // GROUP[kind]) * GROUP[kind]


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
    codes, values, terms = quantised.random_rows(kind, shape, rng)
    return Weights(kind, codes, values, terms=terms)


FLOATS_FROM = {"Q8_0": 16, "NVFP4": 16, "MXFP4": 64}  # token rows of an expert from which on its weights are expanded


def met_by(kind: str, isa: str, x: np.ndarray, n_rows: int = 1) -> np.ndarray:
    """The activations [.., k] that weights of a type meet on an instruction set when n_rows token rows chose the expert, as
    float64: the fast kernels of quantised types round few of them to int8 as stock ggml does, but for rows with NaN,
    infinity or huge values."""
    if kind not in quantised.FORMATS or isa == "scalar" or n_rows >= FLOATS_FROM.get(kind, n_rows + 1):
        return x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        fits = np.all(np.abs(x) < 2.0**22, -1, keepdims=True)
    rounded = quantised.rounded(np.where(fits, x, 0).astype(np.float32), 256 if GROUP[kind] == 256 else 32)
    return np.where(fits, rounded, x.astype(np.float64))


def tolerance(w: Weights, x: np.ndarray, expert: int | None = None) -> np.ndarray:
    """Rounding of float32 dot products of this length, in any order: k x eps x sum of |w||x|, [m, rows]."""
    k = x.shape[-1]
    terms = np.abs(w.values) if w.terms is None else w.terms
    terms = terms if expert is None else terms[expert]
    return (2.0**-24) * max(k, 8) ** 0.5 * 8 * (np.abs(x).astype(np.float64) @ terms.T) + 1e-30
