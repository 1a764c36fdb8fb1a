"""What the families share: sizes, rotary position, embeddings, gated MLPs. A family's file adds what is its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from ..config import Fields
from ..family import Rule


@dataclass(frozen=True)
class Yarn:
    factor: float
    n_ctx_orig: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Decoder:
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    n_ff: int  # of a dense MLP, whether or not a layer has one
    n_head: int
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    rms_eps: float
    rope_theta: float
    yarn: Yarn | None
    tied: bool


def read_decoder(c: Fields, arch: str, experts: str) -> dict[str, Any]:
    """Decoder's fields. `arch` is llama.cpp's, for messages; `experts` the key of the number of experts."""
    why = f"llama.cpp's {arch}"
    c.only("hidden_act", ("silu",), why, default="silu")
    c.only("attention_bias", (False,), why, default=False)
    n_expert = c.count(experts, most=512)
    decoder = Decoder(
        n_layer=c.count("num_hidden_layers", most=512),
        n_embd=c.count("hidden_size"),
        n_vocab=c.count("vocab_size"),
        n_ctx=c.count("max_position_embeddings"),
        n_ff=c.count("intermediate_size"),
        n_head=c.count("num_attention_heads"),
        n_expert=n_expert,
        n_expert_used=c.count("num_experts_per_tok", most=n_expert),
        n_ff_expert=c.count("moe_intermediate_size"),
        rms_eps=c.number("rms_norm_eps", default=1e-6),
        rope_theta=c.number("rope_theta", default=rope_fields(c).number("rope_theta", default=10000.0)),
        yarn=_read_yarn(rope_fields(c), why),
        tied=c.flag("tie_word_embeddings", default=False),
    )
    return dict(vars(decoder))


def rope_fields(c: Fields) -> Fields:
    """`rope_scaling` as released, `rope_parameters` as transformers 5 writes it."""
    return c.child("rope_scaling") or c.child("rope_parameters") or Fields(c.path, {}, "rope_scaling.")


def _read_yarn(rope: Fields, why: str) -> Yarn | None:
    key = "rope_type" if "rope_type" in rope.values else "type"
    if rope.only(key, ("yarn", "default"), why, default="default") == "default":
        return None
    if rope.get("attention_factor", None) is not None:
        raise rope.unsupported("attention_factor", f"{why} derives it from factor and mscale")
    rope.only("truncate", (True,), why, default=True)
    return Yarn(
        factor=rope.number("factor"),
        n_ctx_orig=rope.count("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
    )


def write_decoder(w: gguf.GGUFWriter, h: Decoder, n_rot: int) -> None:
    """`n_rot`: how many of a head's dimensions are rotated."""
    w.add_block_count(h.n_layer)
    w.add_context_length(h.n_ctx)
    w.add_embedding_length(h.n_embd)
    w.add_feed_forward_length(h.n_ff)
    w.add_vocab_size(h.n_vocab)
    w.add_head_count(h.n_head)
    w.add_layer_norm_rms_eps(h.rms_eps)
    w.add_expert_feed_forward_length(h.n_ff_expert)
    w.add_expert_count(h.n_expert)
    w.add_expert_used_count(h.n_expert_used)
    w.add_rope_dimension_count(n_rot)
    w.add_rope_freq_base(h.rope_theta)
    if h.yarn:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(h.yarn.factor)
        w.add_rope_scaling_orig_ctx_len(h.yarn.n_ctx_orig)
        w.add_rope_scaling_yarn_beta_fast(h.yarn.beta_fast)
        w.add_rope_scaling_yarn_beta_slow(h.yarn.beta_slow)


def model_tensors(h: Decoder) -> dict[str, Rule]:
    rules = {
        "model.embed_tokens.weight": Rule((h.n_vocab, h.n_embd), "embeddings"),
        "model.norm.weight": Rule((h.n_embd,), "embeddings"),
    }
    if not h.tied:
        rules["lm_head.weight"] = Rule((h.n_vocab, h.n_embd), "embeddings")
    return rules


def mlp_shapes(n_embd: int, n_ff: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (n_ff, n_embd), "up_proj": (n_ff, n_embd), "down_proj": (n_embd, n_ff)}


def expert_shapes(h: Decoder, layer: int) -> dict[str, tuple[int, int]]:
    """Experts in every layer."""
    return mlp_shapes(h.n_embd, h.n_ff_expert)
