"""Tiny random models of several families, written from a Shape, for what llama.cpp computes and allocates. A helper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from hybrid_moe_ext.fits.header import write_metadata
from hybrid_moe_ext.fits.shapes import SHAPES, Mla, Shape
from hybrid_moe_ext.fits.tensors import tensors_of

N_VOCAB = 64
_SMALL = {
    "n_layer": 4, "n_embd": 128, "n_head": 8, "head_dim": 32, "n_rot": 32, "n_ff": 64, "n_ff_expert": 64, "n_expert": 8,
    "n_used": 2, "n_vocab": N_VOCAB, "n_ctx_train": 256, "expert_type": "F32",
}  # fmt: skip
_MLA = Mla(q_lora=64, kv_lora=64, nope=32, rope=32, v_dim=32)


def tiny(name: str) -> Shape:
    """A shape of the same architecture; two key and value heads, so that two GPUs can share them."""
    shape = replace(SHAPES[name], **_SMALL)
    shape = replace(shape, n_layer_dense=min(1, shape.n_layer_dense), n_ff_shared=64 if shape.n_ff_shared else 0)
    if shape.mla:
        return replace(shape, mla=_MLA)
    return replace(shape, n_head_kv=2, window=16 if shape.window else 0)


def write_model(path: Path, shape: Shape) -> Path:
    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(path, shape.arch)
    write_metadata(w, shape)
    for t in tensors_of(shape, "F32", "f32"):
        scale = 1.0 if t.name.endswith("norm.weight") else 0.1
        w.add_tensor(t.name, (rng.standard_normal(t.shape) * 0.2 * scale + (scale == 1.0)).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
