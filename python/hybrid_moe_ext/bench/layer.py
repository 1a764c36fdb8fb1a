"""Times one MoE layer on us, on stock ggml and (where installed) in PyTorch: same weights per type, same inputs, one run."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..checkpoint import ExpertTensor, TensorRef
from ..errors import OptionError, PluginError
from . import torch_peer
from .graph import LayerGraph, Shape, Unsupported
from .limits import Limits
from .timing import Result, in_turn, result
from .values import Experts

QUANTISED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4")
OURS = ("FP8", "BF16", "F16", "F32", *QUANTISED)
STOCK = ("BF16", "F16", *QUANTISED)
# Where the F16 numbers of a block lie that scale all of it (gguf has no quantiser for these types: codes are random).
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
# Random blocks that a matrix repeats: a prime, so that no two rows are alike. Alike, they would make h constant, and the sums
# over it cancel to where rounding is all that is left.
N_BLOCKS = 4099
# How far an engine's layer may be from float64, as NMSE: activations are rounded to what the type is multiplied in, twice in a
# layer. Measured on 2 and 32 rows of the three shapes: F32 and exact kernels 7e-13, F16 2e-7, BF16 1e-5, torch 5e-5, int8 sums
# 1e-4 (Q8_0) to 8e-4 (Q4_K).
TOLERANCE = {"F32": 1e-10, "FP8": 1e-4, "F16": 1e-5, "BF16": 1e-4, "torch": 1e-3} | dict.fromkeys(QUANTISED, 5e-3)
_ONE_TOKEN = 6  # times the tolerance: 1e-2 for one token of random Q4_K, where stock's result is the same to 1e-8
SHAPES = {
    "deepseek": Shape(7168, 2048, 32, 8),
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "gpt-oss": Shape(2880, 2880, 32, 4),
}


def random_codes(kind: str, rows: int, k: int, n_expert: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random valid weight bytes: [n_expert, rows, row bytes]. Blocks are repeated: their values do not matter for time."""
    if kind != "FP8":
        qtype = gguf.GGMLQuantizationType[kind]
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
        if kind in SCALES_AT:
            block = rng.integers(0, 256, (N_BLOCKS, n_bytes), np.uint8)
            for at, scale in zip(SCALES_AT[kind], (1e-3, 1e-4), strict=False):
                block[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        elif kind in ("MXFP4", "NVFP4"):
            block = rng.integers(0, 256, (N_BLOCKS, n_bytes), np.uint8)
            block[:, : 1 if kind == "MXFP4" else 4] = 120 if kind == "MXFP4" else 0x10
        else:
            values = (rng.standard_normal((4096 // n_block * 64, n_block)) * 0.02).astype(np.float32)
            block = gguf.quants.quantize(values, qtype).view(np.uint8).reshape(len(values), -1)
        n = rows * k // n_block
        one = np.resize(block, (n, block.shape[1])).reshape(rows, -1)
    else:
        one = np.resize(_e4m3_of_normal(1 << 20, rng), (rows, k))
    return np.ascontiguousarray(np.broadcast_to(one, (n_expert, *one.shape)))


def _e4m3_of_normal(n: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Codes as checkpoints have them: normally distributed, the largest of a block at 448. Rounding is toward zero."""
    magnitude = np.minimum(np.abs(rng.standard_normal(n)) * (448 / 4), 448)
    exponent = np.clip(np.floor(np.log2(np.maximum(magnitude, 2.0**-6))), -6, 8)
    fraction = np.floor(magnitude / 2.0**exponent * 8).astype(np.int64)  # below 8: subnormal
    codes = np.where(fraction < 8, fraction, (exponent.astype(np.int64) + 6) * 8 + fraction)
    return (np.minimum(codes, 0x7E) | rng.integers(0, 2, n) << 7).astype(np.uint8)


def _write_fp8(folder: Path, name: str, codes: NDArray[np.uint8], rng: np.random.Generator) -> ExpertTensor:
    n_expert, rows, k = codes.shape
    path = folder / f"{name}.bin"
    grid = (-(-rows // 128), -(-k // 128))
    scale = rng.uniform(1e-4, 2e-4, grid).astype(np.float32)
    refs: dict[str, list[TensorRef]] = {"codes": [], "scales": []}
    with path.open("wb") as file:
        for i in range(n_expert):
            for part, data, dtype in (("codes", codes[i], "F8_E4M3"), ("scales", scale, "F32")):
                refs[part].append(TensorRef(f"{name}.{i}", path, dtype, data.shape, file.tell(), data.nbytes))
                file.write(data.tobytes())
    full = f"blk.0.ffn_{name}_exps.weight"
    return ExpertTensor(
        full, gguf.GGMLQuantizationType.I8, n_expert, rows, k, tuple(refs["codes"]), tuple(refs["scales"]), (128, 128)
    )


def random_experts(
    kind: str, name: str, rows: int, k: int, n_expert: int, folder: Path, rng: np.random.Generator
) -> Experts:
    codes = random_codes(kind, rows, k, n_expert, rng)
    return Experts(kind, codes, _write_fp8(folder, name, codes, rng) if kind == "FP8" else None)


def check_choice(shape_names: list[str], kinds: list[str]) -> None:
    for name in shape_names:
        if name not in SHAPES:
            raise OptionError(f"unknown shape {name!r}: choose among {', '.join(SHAPES)}")
    for kind in kinds:
        if kind not in (*OURS, *STOCK):
            raise OptionError(f"unknown type {kind!r}: choose among {', '.join(dict.fromkeys((*OURS, *STOCK)))}")
        n_block = 1 if kind == "FP8" else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        for name in shape_names:
            if SHAPES[name].n_embd % n_block or SHAPES[name].n_ff % n_block:
                raise OptionError(f"{kind} has blocks of {n_block} values, which the rows of {name} do not divide into")


def _inputs(shape: Shape, n_tokens: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    x = rng.standard_normal((n_tokens, shape.n_embd)).astype(np.float32)
    ids = np.stack([rng.permutation(shape.n_expert)[: shape.n_used] for _ in range(n_tokens)]).astype(np.int32)
    return x, ids, rng.uniform(0.05, 0.2, ids.shape).astype(np.float32)


class _Reference:
    """A layer in float64. All experts are alike, so the routing only decides their weights."""

    def __init__(self, experts: dict[str, Experts]):
        self._w = {name: e.values().astype(np.float64) for name, e in experts.items()}

    def check(self, engine: str, kind: str, y: NDArray[np.float32], x: NDArray[Any], weights: NDArray[Any]) -> None:
        """The first and the last token of a batch."""
        some = [0, -1]
        rows = x[some].astype(np.float64)
        gate = rows @ self._w["gate"].T
        want = (gate / (1 + np.exp(-gate)) * (rows @ self._w["up"].T)) @ self._w["down"].T
        want *= weights[some].sum(1, dtype=np.float64)[:, None]
        nmse = float(((y[some] - want) ** 2).sum() / (want**2).sum())
        limit = TOLERANCE["torch" if engine == "torch" else kind] * (_ONE_TOKEN if len(y) == 1 else 1)
        if not nmse <= limit:
            raise PluginError(
                f"{kind}: the layer of {engine} is wrong (NMSE {nmse:.1e} > {limit:.0e}), no use timing it"
            )


def bench_layer(
    shape_name: str, kinds: list[str], rows: list[int], n_threads: int, limits: Limits, rounds: int = 5
) -> Iterator[Result]:
    """Yields results as they come, engines of one type next to each other. Weights exist once per type at a time."""
    check_choice([shape_name], kinds)
    shape = SHAPES[shape_name]
    rng = np.random.default_rng(0)
    for kind in kinds:
        with TemporaryDirectory(prefix="hybrid-moe-bench-") as folder:
            experts = {
                name: random_experts(kind, name, r, k, shape.n_expert, Path(folder), rng)
                for name, (r, k) in shape.weights().items()
            }
            reference = _Reference(experts)
            flops = 2.0 * shape.n_used * sum(r * k for r, k in shape.weights().values())  # per token
            for n_tokens in rows:
                x, ids, weights = _inputs(shape, n_tokens, rng)
                engines = start_engines(LayerGraph, shape, experts, n_tokens, n_threads)
                for name, engine in engines.items():
                    engine.set(x, ids, weights)
                    engine.run()
                    reference.check(name, kind, engine.output(), x, weights)
                seconds = in_turn({name: engine.run for name, engine in engines.items()}, rounds)
                n_bytes = len(np.unique(ids)) * sum(e.bytes_per_expert for e in experts.values())
                for name, times in seconds.items():
                    median = statistics.median(times)
                    yield result(shape_name, name, kind, n_tokens, n_bytes, n_tokens * flops, median, limits)
                for engine in engines.values():
                    engine.close()


def start_engines(
    graph: type[LayerGraph], shape: Shape, experts: dict[str, Experts], n_tokens: int, n_threads: int
) -> dict[str, Any]:
    """Ours first; those that can compute this type on this machine."""
    kind = next(iter(experts.values())).kind
    weights = {name: e.for_graph for name, e in experts.items()}
    engines: dict[str, Any] = {}
    with contextlib.suppress(Unsupported):
        engines["hybrid-moe"] = graph("HybridMoE", shape, kind, weights, n_tokens, n_threads)
    if kind in STOCK:
        engines["ggml"] = graph("CPU", shape, kind, weights, n_tokens, n_threads)
        with contextlib.suppress(Unsupported):
            engines["ggml repacked"] = graph("CPU", shape, kind, weights, n_tokens, n_threads, repacked=True)
    if kind in torch_peer.KINDS and torch_peer.is_installed():
        engines["torch"] = torch_peer.TorchLayer(shape, experts, n_threads)
    return engines
