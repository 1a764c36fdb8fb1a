"""Qwen3MoeForCausalLM (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder) as llama.cpp's qwen3moe. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from ..config import Fields
from ..family import Family, Rule
from .decoder import Decoder, expert_shapes, model_tensors, read_decoder, rope_fields, write_decoder


@dataclass(frozen=True)
class Qwen3Moe(Decoder):
    n_head_kv: int
    head_dim: int


def read_hparams(c: Fields) -> Qwen3Moe:
    why = "llama.cpp's qwen3moe"
    c.only("decoder_sparse_step", (1,), f"{why} has experts in every layer", default=1)
    c.only("mlp_only_layers", ([],), f"{why} has experts in every layer", default=[])
    c.only("norm_topk_prob", (True,), why)  # no default: transformers' own is false
    c.only("use_sliding_window", (False,), why, default=False)
    common = read_decoder(c, "qwen3moe", experts="num_experts")
    rope, n_head = rope_fields(c), common["n_head"]
    if common["yarn"] and rope.get("mscale_all_dim", None) is not None:
        raise rope.unsupported("mscale_all_dim", f"{why} derives the scale from factor alone")
    h = Qwen3Moe(
        **common,
        n_head_kv=c.count("num_key_value_heads", most=n_head),
        head_dim=c.count("head_dim", default=common["n_embd"] // n_head),
    )
    if h.n_head % h.n_head_kv:
        raise c.fail("num_key_value_heads", f"but must divide num_attention_heads ({h.n_head})")
    if h.head_dim == 0 or h.head_dim % 2:
        raise c.fail("head_dim", "but must be even")
    return h


def write_hparams(w: gguf.GGUFWriter, h: Qwen3Moe) -> None:
    write_decoder(w, h, n_rot=h.head_dim)
    w.add_head_count_kv(h.n_head_kv)
    w.add_key_length(h.head_dim)
    w.add_value_length(h.head_dim)


def layer_tensors(h: Qwen3Moe, layer: int) -> dict[str, Rule]:
    n_query, n_key = h.n_head * h.head_dim, h.n_head_kv * h.head_dim
    return {
        "input_layernorm.weight": Rule((h.n_embd,), "attention"),
        "self_attn.q_proj.weight": Rule((n_query, h.n_embd), "attention"),
        "self_attn.k_proj.weight": Rule((n_key, h.n_embd), "attention"),
        "self_attn.v_proj.weight": Rule((n_key, h.n_embd), "attention"),
        "self_attn.q_norm.weight": Rule((h.head_dim,), "attention"),
        "self_attn.k_norm.weight": Rule((h.head_dim,), "attention"),
        "self_attn.o_proj.weight": Rule((h.n_embd, n_query), "attention"),
        "post_attention_layernorm.weight": Rule((h.n_embd,), "ffn"),
        "mlp.gate.weight": Rule((h.n_expert, h.n_embd), "ffn", f32=True),
    }


QWEN3_MOE = Family(
    hf_arch="Qwen3MoeForCausalLM",
    gguf_arch=gguf.MODEL_ARCH.QWEN3MOE,
    read_hparams=read_hparams,
    write_hparams=write_hparams,
    model_tensors=model_tensors,
    layer_tensors=layer_tensors,
    expert_shapes=expert_shapes,
)
