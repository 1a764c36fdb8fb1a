"""Tiny models of three families, dense weights F32, experts in one type: what a GPU host is compared on. Helpers, not tests."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as C
import numpy as np
from gguf import GGMLQuantizationType as Type

import checkpoint_fixtures as fixtures
from checkpoint_families import FAMILIES
from hosts.llama_archs.generator import generate
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.convert import convert
from models import FOLDER

# Whole groups of 256 in every expert row, for Q4_K, and more than one block of FP8 scales.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 3}
FAMILY = {"deepseek": "deepseek_v3", "qwen3moe": "qwen3_moe"}
# Of the fixtures' scales: at their full size a rounding in attention comes out ten to a thousand times as large in the logits.
TAMED = 0.25
N_EXPERT_LAYERS = {"deepseek": 2, "qwen3moe": 3, "gpt-oss": 2}
KINDS = {
    "deepseek": ("F32", "FP8", "Q8_0", "Q4_K", "MXFP4"),
    "qwen3moe": ("F32", "FP8", "Q8_0", "Q4_K", "MXFP4"),
    # No checkpoint of this family is FP8, and its generator's rows of down have 384 values: no whole groups of Q4_K.
    "gpt-oss": ("F32", "Q8_0", "MXFP4"),
}
# The writer sets these itself; an alignment that is only copied would not be kept.
WRITERS_OWN = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.ALIGNMENT)


@cache
def _fp8(arch: str) -> Path:
    directory = FOLDER / f"vulkan-{arch}-fp8"
    changes = SIZES | ({"num_nextn_predict_layers": 0} if arch == "deepseek" else {})
    tensors = fixtures.random_tensors(FAMILIES[FAMILY[arch]].config | changes, "fp8")
    for name, (dtype, _) in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = fixtures.pack(fixtures.unpack(tensors, name) * np.float32(TAMED), dtype)
    fixtures.write_checkpoint(directory, "fp8", tensors=tensors, family=FAMILY[arch], **changes)
    plain = directory.with_name(f"vulkan-{arch}-plain")
    fixtures.write_checkpoint(plain, "F32", tensors=fixtures.dequantised(tensors), family=FAMILY[arch], **changes)
    return directory


@cache
def _f32(arch: str) -> Path:
    if arch == "gpt-oss":
        folder = FOLDER / "vulkan-gpt-oss"
        folder.mkdir()
        return next(path for path in generate(folder) if path.name == "gpt-oss-moe.gguf")
    plain = _fp8(arch).with_name(f"vulkan-{arch}-plain")
    path = FOLDER / f"vulkan-{arch}-F32.gguf"
    open_checkpoint(plain).virtual_gguf("f32").write(path)
    return path


@cache
def model(arch: str, kind: str) -> Path:
    """The same weights for every `kind`, rounded to it; FP8's are F32's exactly."""
    if kind == "F32":
        return _f32(arch)
    path = FOLDER / f"vulkan-{arch}-{kind}.gguf"
    if kind == "FP8":
        return convert(_fp8(arch), path, dense_type="f32")[0]
    _rewrite(_f32(arch), path, lambda values: _quantised(values, Type[kind]), Type[kind])
    return path


@cache
def exact_twin(arch: str, kind: str) -> Path:
    """The experts of `kind` dequantised to F32: what is compared when nobody may round anything."""
    if kind in ("F32", "FP8"):
        return _f32(arch)
    path = FOLDER / f"vulkan-{arch}-{kind}-exact.gguf"
    _rewrite(_f32(arch), path, lambda values: gguf.dequantize(_quantised(values, Type[kind]), Type[kind]), Type.F32)
    return path


def _quantised(values: np.ndarray, kind: Type) -> np.ndarray:
    """float32 [.., rows, k] -> uint8 [.., rows, row bytes], by llama.cpp's own quantiser."""
    values = np.ascontiguousarray(values, np.float32)
    n, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty((*values.shape[:-1], values.shape[-1] // n * n_bytes), np.uint8)
    quantise = C._lib.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    written = quantise(int(kind), values.ctypes.data, out.ctypes.data, 0, values[..., 0].size, values.shape[-1], None)
    assert written == out.nbytes
    return out


def _rewrite(source: Path, path: Path, change: object, kind: Type) -> None:
    """`source` with its expert matrices changed; everything else as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for field in reader.fields.values():
        if field.name in WRITERS_OWN or field.name.startswith("GGUF."):
            continue
        value, kinds = field.contents(), field.types
        if value != []:  # the writer takes no empty array; llama.cpp's generator writes one where a key is optional
            writer.add_key_value(field.name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name.endswith("_exps.weight"):
            values = np.asarray(tensor.data, np.float32).reshape(tensor.shape[::-1])
            writer.add_tensor(tensor.name, change(values), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
