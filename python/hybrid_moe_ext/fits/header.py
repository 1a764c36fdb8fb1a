"""Writes a GGUF that has only a header: its tensors are a hole in the file, which llama.cpp's accounting never reads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from ..errors import OptionError
from .shapes import Shape
from .tensors import Tensor

ALIGNMENT = 32  # GGUF's default


def write_header(path: Path, shape: Shape, tensors: list[Tensor]) -> None:
    w = gguf.GGUFWriter(path, shape.arch)
    write_metadata(w, shape)
    for t in tensors:
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    start = -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT
    size = start + sum(-(-t.n_bytes // ALIGNMENT) * ALIGNMENT for t in tensors)
    try:
        with path.open("r+b") as file:
            file.truncate(size)  # llama.cpp compares the file's size with what the header promises
    except OSError as error:
        raise OptionError(
            f"{path.parent}: no file of {size / 1e9:.0f} GB with holes can be made there ({error.strerror}): "
            "set TMPDIR to a folder of a file system that has them, such as ext4, XFS or tmpfs"
        ) from error


def write_metadata(w: gguf.GGUFWriter, s: Shape) -> None:
    w.add_vocab_size(s.n_vocab)
    w.add_tokenizer_model("no_vocab")
    w.add_context_length(s.n_ctx_train)
    w.add_block_count(s.n_layer)
    w.add_embedding_length(s.n_embd)
    w.add_feed_forward_length(s.n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(s.n_rot)
    w.add_expert_count(s.n_expert)
    w.add_expert_used_count(s.n_used)
    w.add_expert_feed_forward_length(s.n_ff_expert)
    w.add_leading_dense_block_count(s.n_layer_dense)
    if s.n_ff_shared:
        w.add_expert_shared_count(s.n_ff_shared // s.n_ff_expert)
    if s.arch in ("deepseek2", "glm4moe", "minimax-m2"):
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_weights_norm(True)
    if s.window:
        w.add_sliding_window(s.window)
    if s.mla:
        w.add_q_lora_rank(s.mla.q_lora)
        w.add_kv_lora_rank(s.mla.kv_lora)
        w.add_key_length(s.mla.kv_lora + s.mla.rope)
        w.add_value_length(s.mla.kv_lora)
        w.add_key_length_mla(s.mla.nope + s.mla.rope)
        w.add_value_length_mla(s.mla.v_dim)
    else:
        w.add_key_length(s.head_dim)
        w.add_value_length(s.head_dim)
