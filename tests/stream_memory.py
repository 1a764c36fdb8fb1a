"""Child processes of test_stream_memory: python stream_memory.py LIBRARY SCENARIO N_TOKENS. Runs layers whose experts lie in
files, or are of a type without a kernel of ours, twice, and prints how far the result is from float64, and the report."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

import layer_graph
from ggml_graph import G, bind
from hybrid_moe_ext import _native, register
from hybrid_moe_ext.machine import copies
from layer_graph import Layer, random_layer, random_route, reference, run_layers
from weights import GGML_TYPES, Weights

load = _native.ggml_function("ggml_backend_load", layer_graph.P, [layer_graph.ctypes.c_char_p])
GGML_TYPES["Q3_K"] = layer_graph.GGML_TYPES["Q3_K"] = 11


def in_files(rng: np.random.Generator) -> list[Layer]:
    return [random_layer(rng, 256, 128, 8, 3, "FP8") for _ in range(2)]


def q3_k(rng: np.random.Generator, rows: int, k: int, n_expert: int = 8) -> Weights:
    """Random codes; gguf's own decoder says what they mean."""
    blocks = rng.integers(0, 256, (n_expert, rows, k // 256, 110), np.uint8)
    blocks[..., 108:] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)  # the scale of a block
    codes = blocks.reshape(n_expert, rows, -1)
    values = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.Q3_K)
    return Weights("Q3_K", codes, values.astype(np.float64))


def foreign(rng: np.random.Generator) -> list[Layer]:
    names = ("gate", "up", "down")
    return [Layer({name: q3_k(rng, 256, 256) for name in names}, 3) for _ in range(2)]


def foreign_alone(rng: np.random.Generator) -> list[Layer]:
    return foreign(rng)[:1]


def main(library: str, scenario: str, n_tokens: str) -> None:
    assert load(library.encode()), "the simulated GPU did not load"
    register()
    rng = np.random.default_rng(5)
    layers = {f.__name__: f for f in (in_files, foreign, foreign_alone)}[scenario](rng)
    x = (0.1 * rng.standard_normal((int(n_tokens), layers[0].n_embd))).astype(np.float32)
    routes = [random_route(rng, layer, len(x)) for layer in layers]
    expected = x.astype(np.float64)
    for layer, route in zip(layers, routes, strict=True):
        expected = reference(layer, expected.astype(np.float32), route)
    errors, statuses = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            status, y = run_layers(layers, x, routes, folder=Path(folder), whole=scenario != "foreign_alone")
            if scenario == "foreign_alone":  # not a whole layer: the sum over experts is left out
                y = y.sum(1)
            statuses.append(status)
            errors.append(float(((y - expected) ** 2).sum() / (expected**2).sum()))
    report = json.loads(_native.library().hybrid_moe_stream_report())
    print(
        json.dumps({"statuses": statuses, "nmse": errors, "report": report, "memory_troubles": list(copies().troubles)})
    )


assert bind and G  # the functions above are of this process's ggml

if __name__ == "__main__":
    main(*sys.argv[1:])
