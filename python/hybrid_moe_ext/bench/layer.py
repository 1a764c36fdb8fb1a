"""Times one MoE layer on us, on stock ggml and (where installed) in PyTorch: same weights per type, same inputs, one run.

Rounds go through all engines in turn, so that a machine whose speed drifts slows them alike; medians are compared.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..checkpoint import ExpertTensor, TensorRef
from ..errors import OptionError, PluginError
from .graph import LayerGraph, Shape, Unsupported
from .limits import Limits

QUANTISED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4")
OURS = ("FP8", "BF16", "F16", "F32", *QUANTISED)
STOCK = ("BF16", "F16", *QUANTISED)
# Where the F16 numbers of a block lie that scale all of it (gguf has no quantiser for these types: codes are random).
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
SHAPES = {
    "deepseek": Shape(7168, 2048, 32, 8),
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "gpt-oss": Shape(2880, 2880, 32, 4),
}


@dataclass(frozen=True)
class Result:
    engine: str  # "hybrid-moe", "ggml", "ggml repacked"
    kind: str
    n_tokens: int
    ms: float  # median
    gbps: float  # bytes of the distinct experts that the batch uses, per second
    gflops: float
    read_share: float  # of the measured read bandwidth
    fma_share: float  # of the measured multiply-add rate


def _codes(kind: str, rows: int, k: int, n_expert: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random valid weight bytes: [n_expert, rows, row bytes]. Blocks are repeated: their values do not matter for time."""
    if kind != "FP8":
        qtype = gguf.GGMLQuantizationType[kind]
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
        if kind in SCALES_AT:
            block = rng.integers(0, 256, (64, n_bytes), np.uint8)
            for at, scale in zip(SCALES_AT[kind], (1e-3, 1e-4), strict=False):
                block[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        elif kind in ("MXFP4", "NVFP4"):
            block = rng.integers(0, 256, (64, n_bytes), np.uint8)
            block[:, : 1 if kind == "MXFP4" else 4] = 120 if kind == "MXFP4" else 0x10
        else:
            values = (rng.standard_normal((4096 // n_block * 64, n_block)) * 0.02).astype(np.float32)
            block = gguf.quants.quantize(values, qtype).view(np.uint8).reshape(len(values), -1)
        n = rows * k // n_block
        one = np.resize(block, (n, block.shape[1])).reshape(rows, -1)
    else:
        one = rng.integers(0, 0x7F, (rows, k), np.uint8) | (rng.integers(0, 2, (rows, k), np.uint8) << 7)
    return np.ascontiguousarray(np.broadcast_to(one, (n_expert, *one.shape)))


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


def _inputs(shape: Shape, n_tokens: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    x = rng.standard_normal((n_tokens, shape.n_embd)).astype(np.float32)
    ids = np.stack([rng.permutation(shape.n_expert)[: shape.n_used] for _ in range(n_tokens)]).astype(np.int32)
    return x, ids, rng.uniform(0.05, 0.2, ids.shape).astype(np.float32)


def _validate(graph: LayerGraph, kind: str, reference: LayerGraph | None) -> None:
    graph.run()
    if reference is None:
        if not np.isfinite(graph.output()).all():
            raise PluginError(f"{kind}: the layer's output is not finite")
        return
    reference.run()
    ours, stock = graph.output().astype(np.float64), reference.output().astype(np.float64)
    nmse = float(((ours - stock) ** 2).sum() / (stock**2).sum())
    if nmse > 1e-3:  # stock rounds activations to the weights' type
        raise PluginError(f"{kind}: our layer differs from stock ggml's (NMSE {nmse:.1e}), no use timing it")


def bench_layer(
    shape_name: str, kinds: list[str], rows: list[int], n_threads: int, limits: Limits, rounds: int = 5
) -> Iterator[Result]:
    """Yields results as they come, engines of one type next to each other. Weights exist once per type at a time."""
    if shape_name not in SHAPES:
        raise OptionError(f"unknown shape {shape_name!r}: choose one of {', '.join(SHAPES)}")
    for kind in kinds:
        if kind not in (*OURS, *STOCK):
            raise OptionError(f"unknown type {kind!r}: choose among {', '.join(dict.fromkeys((*OURS, *STOCK)))}")
    shape = SHAPES[shape_name]
    rng = np.random.default_rng(0)
    for kind in kinds:
        with TemporaryDirectory(prefix="hybrid-moe-bench-") as folder:
            codes = {name: _codes(kind, r, k, shape.n_expert, rng) for name, (r, k) in shape.weights().items()}
            experts: dict[str, Any] = dict(codes)
            if kind == "FP8":
                experts = {name: _write_fp8(Path(folder), name, data, rng) for name, data in codes.items()}
            yield from _bench_type(shape, kind, experts, rows, n_threads, limits, rounds, rng)


def _bench_type(
    shape: Shape,
    kind: str,
    experts: dict[str, Any],
    rows: list[int],
    n_threads: int,
    limits: Limits,
    rounds: int,
    rng: Any,
) -> Iterator[Result]:
    for n_tokens in rows:
        graphs: dict[str, LayerGraph] = {}
        if kind in OURS:
            graphs["hybrid-moe"] = LayerGraph("HybridMoE", shape, kind, experts, n_tokens, n_threads)
        if kind in STOCK:
            graphs["ggml"] = LayerGraph("CPU", shape, kind, experts, n_tokens, n_threads)
            with contextlib.suppress(Unsupported):
                graphs["ggml repacked"] = LayerGraph("CPU", shape, kind, experts, n_tokens, n_threads, repacked=True)
        x, ids, weights = _inputs(shape, n_tokens, rng)
        for graph in graphs.values():
            graph.set(x, ids, weights)
        if "hybrid-moe" in graphs:
            _validate(graphs["hybrid-moe"], kind, graphs.get("ggml"))
        seconds = _in_turn({name: graph.run for name, graph in graphs.items()}, rounds)
        for name, times in seconds.items():
            yield _result(name, kind, shape, experts, ids, statistics.median(times), limits)
        for graph in graphs.values():
            graph.close()


def _in_turn(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return times


def _result(
    engine: str, kind: str, shape: Shape, experts: dict[str, Any], ids: NDArray[Any], seconds: float, limits: Limits
) -> Result:
    n_distinct = len(np.unique(ids))
    per_expert = sum((e.nbytes if isinstance(e, np.ndarray) else e.n_bytes) // shape.n_expert for e in experts.values())
    flops = 2.0 * ids.size * sum(r * k for r, k in shape.weights().values())
    gbps = n_distinct * per_expert / seconds / 1e9
    gflops = flops / seconds / 1e9
    return Result(
        engine, kind, len(ids), seconds * 1e3, gbps, gflops, gbps / limits.read_gbps, gflops / limits.fma_gflops
    )
