"""Kernels of every instruction set that runs here, against float64 on exact values. Shapes first, then inputs nobody lists."""

import ctypes

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_fixtures import E4M3
from conftest import BF16_KERNELS
from hybrid_moe_ext import _native
from quantised import FORMATS, decode
from weights import GROUP, Weights, met_by, random_weights, tolerance, whole_groups

LIB = _native.library()
ISAS = LIB.hybrid_moe_available_isas().decode().split()
KINDS = ["FP8", "BF16", "F16", "F32", *FORMATS]
DOT, GEMM = 0, 1


def matrix(w: Weights) -> _native.MatrixC:
    rows, k = w.values.shape
    scales = None if w.scales is None else np.ascontiguousarray(w.scales)
    c = _native.MatrixC(_native.WEIGHT_TYPES[w.kind], w.codes.ctypes.data, rows, k)
    if scales is not None:
        c.scales, c.block_rows, c.block_k = scales.ctypes.data, *w.block
    c.keep = scales
    return c


def matmul(isa: str, kernel: int, w: Weights, x: np.ndarray) -> np.ndarray:
    y = np.full((len(x), len(w.values)), np.nan, np.float32)
    _native.check(LIB.hybrid_moe_matmul(isa.encode(), kernel, matrix(w), len(x), x.ctypes.data, y.ctypes.data))
    return y


def met_in(kernel: int, kind: str, isa: str, x: np.ndarray) -> np.ndarray:
    return met_by(kind, isa, x) if kernel == DOT else x.astype(np.float64)


def limit_of(isa: str, kernel: int, w: Weights, met: np.ndarray) -> np.ndarray:
    if isa in BF16_KERNELS and kernel == DOT and w.kind == "FP8":  # activations are rounded to BF16 there
        return 2.0**-8 * (np.abs(met) @ np.abs(w.values).T)
    return tolerance(w, met)


def check(isa: str, kernel: int, w: Weights, m: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((m, w.values.shape[1])).astype(np.float32)
    met = met_in(kernel, w.kind, isa, x)
    error = np.abs(matmul(isa, kernel, w, x) - met @ w.values.T)
    assert np.all(error <= limit_of(isa, kernel, w, met)), f"largest error {error.max()}"


def test_the_fast_kernels_are_there():
    """A green run on scalar code alone would prove little: x86-64 machines of this decade have AVX2."""
    assert ISAS[-1] == "scalar"
    with open("/proc/cpuinfo") as cpu:
        flags = cpu.read()
    assert ("avx2" in ISAS) == (" avx2" in flags)


@pytest.mark.parametrize("isa", ISAS)
def test_every_fp8_code(isa):
    """All 256 codes against the definition of E4M3FN; NaN codes are found, and only those."""
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    for length in (254, 253, 8, 1):  # vector body and tail
        w = Weights(
            "FP8",
            finite[:length].reshape(1, -1).copy(),
            E4M3[finite[:length]][None],
            np.ones((1, 2), np.float32),
            (128, 128),
        )
        out = np.empty(length, np.float32)
        _native.check(LIB.hybrid_moe_expand(isa.encode(), matrix(w), out.ctypes.data))
        assert np.array_equal(out, E4M3[finite[:length]])
    for code in range(256):
        for at in (0, 31, 32, 40):
            some = np.full(41, 0x38, np.uint8)
            some[at] = code
            assert LIB.hybrid_moe_has_nan(isa.encode(), some.tobytes(), 41) == (code & 0x7F == 0x7F)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", [DOT, GEMM])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, k", [(1, 32), (3, 64), (16, 128), (5, 160), (192, 96), (130, 576), (33, 1184), (7, 2080)]
)
def test_shapes(isa, kernel, kind, rows, k):
    rng = np.random.default_rng(rows * k)
    w = random_weights(kind, rows, whole_groups(kind, k), rng)
    for m in (1, 2, 3, 4, 7, 100):
        check(isa, kernel, w, m, rng)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 150),
    groups=st.integers(1, 300),
    m=st.integers(0, 20),
    block=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    kernel=st.sampled_from([DOT, GEMM]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(kind, rows, groups, m, block, kernel, seed):
    """Rows and columns that are no multiple of anything, scale blocks of any size, no tokens at all."""
    rng = np.random.default_rng(seed)
    k = groups * GROUP[kind] if GROUP[kind] == 1 else max(1, groups % (2048 // GROUP[kind])) * GROUP[kind]
    w = random_weights(kind, rows, k, rng, block)
    for isa in ISAS:
        check(isa, kernel, w, m, rng)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_weights(isa, kind):
    """Safetensors promise no alignment."""
    rng = np.random.default_rng(5)
    w = random_weights(kind, 9, whole_groups(kind, 96), rng)
    shifted = np.empty(w.codes.size + 1, np.uint8)
    shifted[1:] = w.codes.reshape(-1)
    check(isa, DOT, Weights(kind, shifted[1:].reshape(w.codes.shape), w.values, w.scales, w.block), 2, rng)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", [DOT, GEMM])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_propagate(isa, kernel, kind):
    rng = np.random.default_rng(6)
    w = random_weights(kind, 20, whole_groups(kind, 96), rng)
    x = rng.standard_normal((8, w.values.shape[1])).astype(np.float32)
    x[3, 17], x[5, 95] = np.nan, np.inf
    y = matmul(isa, kernel, w, x)
    met = met_in(kernel, kind, isa, x)
    with np.errstate(invalid="ignore"):
        exact = met @ w.values.T
    assert np.array_equal(np.isnan(y), np.isnan(exact))
    assert np.array_equal(np.isinf(y), np.isinf(exact))
    good = np.isfinite(x).all(-1)
    assert np.all(np.abs(y[good] - exact[good]) <= limit_of(isa, kernel, w, met[good])), (
        "a bad token row spoils no other"
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_codes(isa, kind):
    """Every bit pattern of random blocks against the definition, and the definition as the tests have it against gguf-py's."""
    rng = np.random.default_rng(7)
    w = random_weights(kind, 50, 512, rng)
    out = np.empty(w.values.shape, np.float32)
    _native.check(LIB.hybrid_moe_expand(isa.encode(), matrix(w), out.ctypes.data))
    assert np.array_equal(out, w.values.astype(np.float32))
    theirs = gguf.quants.dequantize(w.codes, gguf.GGMLQuantizationType[kind])
    np.testing.assert_allclose(w.values, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind, at", [("MXFP4", 0), ("NVFP4", 0)])
def test_every_scale_code(isa, kind, at):
    """All codes of 8-bit scales. Two have another value in ggml than in their formats' definitions: NaN there."""
    f = FORMATS[kind]
    codes = np.zeros((256, f.n_bytes), np.uint8)
    codes[:, at] = np.arange(256)
    codes[:, f.n_bytes - f.n // 2 :] = np.arange(f.n // 2) * 37
    values = decode(kind, codes)[0]
    if kind == "NVFP4":
        codes, values = codes[:128], values[:128]
    out = np.empty(values.shape, np.float32)
    c = _native.MatrixC(_native.WEIGHT_TYPES[kind], codes.ctypes.data, len(codes), f.n)
    _native.check(LIB.hybrid_moe_expand(isa.encode(), c, out.ctypes.data))
    with np.errstate(over="ignore"):
        assert np.array_equal(out, values.astype(np.float32))
    x = np.ones((1, f.n), np.float32)
    y = np.empty((1, len(codes)), np.float32)
    _native.check(LIB.hybrid_moe_matmul(isa.encode(), DOT, c, 1, x.ctypes.data, y.ctypes.data))
    met = met_by(kind, isa, x)
    w = Weights(kind, codes, values, terms=decode(kind, codes)[1])
    small = np.abs(values).max(-1) < 1e33  # beyond, sums overflow
    assert np.all((np.abs(y - met @ values.T) <= tolerance(w, met) + 1e-36)[:, small])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_long_rows_and_many_tokens(isa, kind):
    """More columns than activations are rounded at once, more token rows than share a pass, group sizes of every kind."""
    rng = np.random.default_rng(9)
    w = random_weights(kind, 3, 8192 + 4096 + GROUP[kind], rng)
    for m in (1, 2, 3, 4, 5, 8, 9, 33):
        check(isa, DOT if m != 5 else GEMM, w, m, rng)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-33, 1e-7, 1e5, 4e6, 5e6, 1e30])
def test_activations_of_any_size(isa, kind, size):
    """Zeros, values that no int8 block can hold, F16 scales at both ends of their range, several largest magnitudes."""
    rng = np.random.default_rng(10)
    w = random_weights(kind, 5, 512, rng)
    x = (rng.uniform(-1, 1, (2, 512)) * size).astype(np.float32)
    x[1] = np.where(rng.integers(0, 2, 512), size, -size)
    y = matmul(isa, DOT, w, x)
    met = met_by(kind, isa, x)
    assert np.all(np.abs(y - met @ w.values.T) <= tolerance(w, met) + size * 1e-6 * (size < 2.0**-100))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", [DOT, GEMM])
@pytest.mark.parametrize("block", [(16, 16), (1, 96), (20, 96), (7, 9)])
@pytest.mark.parametrize("size", [2.0**7, 2.0**8, -300.0, 1e5, 2.0**40])
def test_large_scales(isa, kernel, block, size):
    """Codes are decoded in units of 2^-120 on some instruction sets: a scale times 2^120 is no float from 256 on."""
    rng = np.random.default_rng(11)
    w = random_weights("FP8", 20, 96, rng, block)
    factor = np.float32(size) / w.scales.max()
    grown = (w.scales * factor).astype(np.float32)
    wide = np.repeat(np.repeat(grown.astype(np.float64), block[0], 0), block[1], 1)[:20, :96]
    check(isa, kernel, Weights("FP8", w.codes, E4M3.astype(np.float64)[w.codes] * wide, grown, block), 8, rng)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block", [(7, 9), (128, 128)])
def test_small_activations_keep_their_precision(isa, block):
    """In units of 2^-120 the products with them would be float subnormals."""
    rng = np.random.default_rng(12)
    w = random_weights("FP8", 20, 96, rng, block)
    x = (rng.standard_normal((3, 96)) * 1e-12).astype(np.float32)
    error = np.abs(matmul(isa, DOT, w, x) - x.astype(np.float64) @ w.values.T)
    limit = 2.0**-8 * np.abs(x).astype(np.float64) @ np.abs(w.values).T if isa in BF16_KERNELS else tolerance(w, x)
    assert np.all(error <= limit)


@pytest.mark.parametrize("isa", ISAS)
def test_flush_to_zero_of_the_host_does_no_harm(isa):
    """Hosts may have denormals flushed (fast-math libraries do); E4M3 subnormals must not vanish, nor the setting."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_byte * 64)()
    libm.fegetenv(environment)
    flushed = (ctypes.c_byte * 64)(*environment)
    if ctypes.sizeof(ctypes.c_void_p) != 8 or np.dtype("l").itemsize != 8 or not _x86():
        pytest.skip("MXCSR exists on x86-64 only")
    ctypes.c_uint32.from_buffer(flushed, 28).value |= 0x8040  # x86-64 fenv_t: MXCSR at byte 28
    w = Weights(
        "FP8", np.full((1, 64), 1, np.uint8), np.full((1, 64), 2.0**-9), np.ones((1, 1), np.float32), (128, 128)
    )
    x = np.ones((1, 64), np.float32)
    try:
        libm.fesetenv(flushed)
        y = matmul(isa, DOT, w, x)
        libm.fegetenv(environment_after := (ctypes.c_byte * 64)())
    finally:
        libm.fesetenv(environment)
    assert y[0, 0] == 64 * 2.0**-9
    assert ctypes.c_uint32.from_buffer(environment_after, 28).value & 0x8040 == 0x8040


def _x86() -> bool:
    import platform

    return platform.machine() == "x86_64"


def test_a_forced_isa_that_is_unknown_lists_the_choices():
    x = np.zeros((1, 32), np.float32)
    w = random_weights("F32", 1, 32, np.random.default_rng(0))
    assert LIB.hybrid_moe_matmul(b"avx1024", DOT, matrix(w), 1, x.ctypes.data, x.ctypes.data) == -1
    message = LIB.hybrid_moe_error().decode()
    assert "avx1024" in message and all(isa in message for isa in ISAS)
