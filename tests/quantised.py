"""GGUF's quantised blocks, encoded and decoded from the formats' definitions in float64, and the rounding of activations
that goes with them. The tests' own; nothing is taken from the product or from gguf-py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = np.concatenate([E2M1, -E2M1])
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)


@dataclass(frozen=True)
class Format:
    ggml_type: int
    n: int  # values per block
    n_bytes: int


FORMATS = {
    "Q4_0": Format(2, 32, 18),
    "Q8_0": Format(8, 32, 34),
    "Q4_K": Format(12, 256, 144),
    "Q5_K": Format(13, 256, 176),
    "Q6_K": Format(14, 256, 210),
    "IQ4_XS": Format(23, 256, 136),
    "MXFP4": Format(39, 32, 17),
    "NVFP4": Format(40, 64, 36),
}


def random_rows(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Bytes [.., row bytes] of random blocks, their values, and the magnitudes of the terms a value is made of."""
    f = FORMATS[kind]
    n_blocks = int(np.prod(shape)) // f.n
    blocks = rng.integers(0, 256, (n_blocks, f.n_bytes), np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": ()}.get(kind, (0,)):
        scales = rng.uniform(1e-3, 1e-2, n_blocks) * rng.choice([-1, 1], n_blocks)
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(110, 125, n_blocks)
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(0, 0x50, (n_blocks, 4))
    values, terms = decode(kind, blocks)
    return blocks.reshape(*shape[:-1], -1), values.reshape(shape), terms.reshape(shape)


def decode(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks [n, bytes] -> values [n, values per block], and the magnitudes of their terms."""
    values, offset = _DECODERS[kind](blocks)
    return values, np.abs(values) + np.abs(offset)


def _f16(b: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float64)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """[.., bytes] -> [.., 2 x bytes]: the low ones, then the high ones."""
    return np.concatenate([q & 15, q >> 4], -1)


def _q8_0(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _f16(b, 0) * b[:, 2:].view(np.int8), np.zeros(1)


def _q4_0(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _f16(b, 0) * (_nibbles(b[:, 2:]) - 8.0), 8 * _f16(b, 0)


def _mxfp4(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = 2.0 ** (b[:, :1].astype(np.float64) - 127)
    return scale * FP4[_nibbles(b[:, 1:])], 6 * scale


def _nvfp4(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    code = b[:, :4].astype(int)
    exponent, mantissa = code >> 3 & 15, code & 7
    scale = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    scale[code == 0x7F] = 0
    return (scale[..., None] * FP4[_nibbles(b[:, 4:].reshape(-1, 4, 8))]).reshape(len(b), 64), np.zeros(1)


def _six_bits(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minimums in the 12 bytes of a Q4_K or Q5_K block."""
    a, b, c = s[:, :4], s[:, 4:8], s[:, 8:]
    return (
        np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], -1).astype(np.float64),
        np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], -1).astype(np.float64),
    )


def _k45(b: np.ndarray, fifth: bool) -> tuple[np.ndarray, np.ndarray]:
    q = _nibbles(b[:, -128:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float64)
    if fifth:
        q += 16 * (b[:, None, 16:48] >> np.arange(8)[:, None] & 1)
    scale, low = _six_bits(b[:, 4:16])
    less = np.repeat((_f16(b, 2) * low)[..., None], 32, -1)
    return ((_f16(b, 0) * scale)[..., None] * q - less).reshape(-1, 256), less.reshape(-1, 256)


def _q6_k(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> (2 * np.arange(4))[:, None] & 3).reshape(-1, 256)
    scale = np.repeat(_f16(b, 208) * b[:, 192:208].view(np.int8), 16, -1)
    return scale * ((low | high << 4) - 32.0), 32 * scale


def _iq4_xs(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = b[:, 2:3].astype(int) | b[:, 3:4].astype(int) << 8
    low = b[:, 4:8].repeat(2, -1) >> np.array([0, 4] * 4) & 15
    scale = _f16(b, 0) * ((low | (high >> 2 * np.arange(8) & 3) << 4) - 32.0)
    return (scale[..., None] * IQ4[_nibbles(b[:, 8:].reshape(-1, 8, 16))]).reshape(-1, 256), np.zeros(1)


_DECODERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q4_K": lambda b: _k45(b, False),
    "Q5_K": lambda b: _k45(b, True),
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """float32 [.., k] -> float64: what is left after int8 blocks of 32 with an F16 scale (ggml's Q8_0) or of 256 with a
    float32 scale (Q8_K). The arithmetic is float32, as it is there."""
    b = x.reshape(-1, block)
    first = np.take_along_axis(b, np.abs(b).argmax(-1)[:, None], -1)
    most = np.abs(first)
    some = most >= np.float32(2.0**-100)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = np.where(some, np.float32(127) / most if block == 32 else np.float32(-127) / first, np.float32(0))
        scale = (most / np.float32(127)).astype(np.float16) if block == 32 else np.float32(1) / factor
    scale = np.where(some, scale, 0).astype(np.float64)
    return (np.rint(b * factor).astype(np.float64) * scale).reshape(x.shape)
