"""FP8 checkpoints with every kind of scales that releases have, and their values by definition. Helpers, not tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import checkpoint_fixtures as fx

Tensors = dict[str, tuple[str, np.ndarray]]


def compressed_tensors(strategy: str, **more: object) -> dict:
    """As llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights |= {"group_size": None, "actorder": None, "block_structure": None, "observer": "minmax", **more}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


@dataclass(frozen=True)
class Scheme:
    quantization: dict
    suffix: str
    shape: Callable[[int, int], tuple[int, ...]]  # of the scales of a [rows, k] matrix
    dtype: str = "F32"
    activation_scale: str = ""  # beside the weights


def _grid(rows: int, k: int) -> tuple[int, int]:
    return -(-rows // fx.BLOCK[0]), -(-k // fx.BLOCK[1])


SCHEMES = {
    "block-e8m0": Scheme(fx.QUANTIZATION, "_scale_inv", _grid, "F8_E8M0"),
    "block-compressed": Scheme(compressed_tensors("block", block_structure=list(fx.BLOCK)), "_scale", _grid, "BF16"),
    "channel": Scheme(compressed_tensors("channel"), "_scale", lambda rows, k: (rows, 1), "BF16"),
    "channel-flat": Scheme(PER_TENSOR, "_scale", lambda rows, k: (rows,)),
    "channel-e8m0": Scheme(compressed_tensors("channel"), "_scale", lambda rows, k: (rows, 1), "F8_E8M0"),
    "tensor": Scheme(compressed_tensors("tensor"), "_scale", lambda rows, k: (1,), "BF16", ".input_scale"),
    "tensor-scalar": Scheme(PER_TENSOR, "_scale", lambda rows, k: (), "F32", ".input_scale"),
    "tensor-inverse": Scheme(PER_TENSOR, "_scale_inv", lambda rows, k: (), "BF16", ".activation_scale"),
}


def block_of(scheme: str, rows: int, k: int) -> tuple[int, int]:
    kind = scheme.split("-")[0]
    return {"block": fx.BLOCK, "channel": (1, k), "tensor": (rows, k)}[kind]


def random_tensors(config: dict, scheme: str, seed: int = 3) -> Tensors:
    """fx.random_tensors with scales of another kind."""
    how, rng = SCHEMES[scheme], np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, (dtype, bits) in fx.random_tensors(config, "fp8").items():
        if name.endswith("_scale_inv"):
            continue
        tensors[name] = dtype, bits
        if dtype == "F8_E4M3":
            tensors[name + how.suffix] = _scales(how.dtype, how.shape(*bits.shape), rng)
            if how.activation_scale:
                beside = name.removesuffix(".weight") + how.activation_scale
                tensors[beside] = fx.pack(np.full((1,), 0.02, np.float32), "F32")
    return tensors


def _scales(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[str, np.ndarray]:
    if dtype == "F8_E8M0":
        return dtype, rng.integers(116, 119, shape, np.uint8)
    return fx.pack(np.asarray(rng.uniform(0.5e-3, 2e-3, shape), np.float32), dtype)


def values(tensors: Tensors, name: str, scheme: str) -> np.ndarray:
    """float32, by the definition: code times the scale of its block."""
    dtype, bits = tensors[name]
    if dtype != "F8_E4M3":
        return fx.unpack(tensors, name)
    scale_dtype, scale = tensors[name + SCHEMES[scheme].suffix]
    if scale_dtype == "F8_E8M0":
        scale = np.float32(2) ** (scale.astype(np.float32) - 127)
    else:
        scale = fx.from_bf16(scale) if scale_dtype == "BF16" else scale
    block = block_of(scheme, *bits.shape)
    return fx.dequantise(bits, scale.reshape(-(-bits.shape[0] // block[0]), -1), block)


def dequantised(tensors: Tensors, scheme: str) -> Tensors:
    """The same model in F32."""
    extra = ("_scale", "_scale_inv")
    return {name: ("F32", values(tensors, name, scheme)) for name in tensors if not name.endswith(extra)}
