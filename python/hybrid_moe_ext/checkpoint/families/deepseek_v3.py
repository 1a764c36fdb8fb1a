"""DeepseekV3ForCausalLM (DeepSeek-V3, R1, V3.1) as llama.cpp's deepseek2. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from ..config import Fields
from ..family import Family, HeadSlice, Rule


@dataclass(frozen=True)
class Yarn:
    factor: float
    n_ctx_orig: int
    beta_fast: float
    beta_slow: float
    mscale: float


@dataclass(frozen=True)
class DeepseekV3:
    n_layer: int
    n_layer_dense: int  # leading layers without experts
    n_embd: int
    n_vocab: int
    n_ctx: int
    n_ff: int
    n_head: int
    q_lora: int  # 0: one query projection instead of two
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    n_expert: int
    n_expert_used: int
    n_expert_shared: int
    n_ff_expert: int
    n_group: int
    n_group_used: int
    weights_scale: float
    weights_norm: bool
    rms_eps: float
    rope_theta: float
    yarn: Yarn | None
    tied: bool


def read_hparams(c: Fields) -> DeepseekV3:
    c.only("hidden_act", ("silu",), "llama.cpp's deepseek2", default="silu")
    c.only("moe_layer_freq", (1,), "every layer after the dense ones has experts", default=1)
    c.only("topk_method", ("noaux_tc",), "how V3 selects experts", default="noaux_tc")
    c.only("rope_interleave", (True,), "llama.cpp's deepseek2", default=True)
    c.only("scoring_func", ("sigmoid",), "how V3 scores experts", default="sigmoid")
    n_layer = c.count("num_hidden_layers", most=512)
    n_expert = c.count("n_routed_experts", most=512)
    n_group = c.count("n_group", default=1)
    h = DeepseekV3(
        n_layer=n_layer,
        n_layer_dense=c.count("first_k_dense_replace", least=0, most=n_layer - 1),
        n_embd=c.count("hidden_size"),
        n_vocab=c.count("vocab_size"),
        n_ctx=c.count("max_position_embeddings"),
        n_ff=c.count("intermediate_size"),
        n_head=c.count("num_attention_heads"),
        q_lora=c.count("q_lora_rank", default=None) or 0,
        kv_lora=c.count("kv_lora_rank"),
        nope=c.count("qk_nope_head_dim"),
        rope=c.count("qk_rope_head_dim"),
        v_dim=c.count("v_head_dim"),
        n_expert=n_expert,
        n_expert_used=c.count("num_experts_per_tok", most=n_expert),
        n_expert_shared=c.count("n_shared_experts"),
        n_ff_expert=c.count("moe_intermediate_size"),
        n_group=n_group,
        n_group_used=c.count("topk_group", most=n_group, default=1),
        weights_scale=c.number("routed_scaling_factor", default=1.0),
        weights_norm=c.flag("norm_topk_prob", default=True),
        rms_eps=c.number("rms_norm_eps", default=1e-6),
        rope_theta=c.number("rope_theta", default=_rope(c).number("rope_theta", default=10000.0)),
        yarn=_read_yarn(c),
        tied=c.flag("tie_word_embeddings", default=False),
    )
    _check_together(c, h)
    return h


def _rope(c: Fields) -> Fields:
    """`rope_scaling` as released, `rope_parameters` as transformers 5 writes it."""
    return c.child("rope_scaling") or c.child("rope_parameters") or Fields(c.path, {}, "rope_scaling.")


def _read_yarn(c: Fields) -> Yarn | None:
    rope = _rope(c)
    key = "rope_type" if "rope_type" in rope.values else "type"
    if rope.only(key, ("yarn", "default"), "llama.cpp's deepseek2", default="default") == "default":
        return None
    if rope.get("attention_factor", None) is not None:
        raise rope.unsupported("attention_factor", "llama.cpp's deepseek2 derives it from mscale")
    mscale = rope.number("mscale", default=1.0)
    if mscale != rope.number("mscale_all_dim", default=0.0):
        raise rope.unsupported("mscale_all_dim", f"llama.cpp's deepseek2 needs it equal to mscale ({mscale:g})")
    return Yarn(
        factor=rope.number("factor"),
        n_ctx_orig=rope.count("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=mscale,
    )


def _check_together(c: Fields, h: DeepseekV3) -> None:
    if h.rope % 2:
        raise c.fail("qk_rope_head_dim", "but must be even")
    if h.n_expert % h.n_group:
        raise c.fail("n_group", f"but must divide n_routed_experts ({h.n_expert})")
    if h.n_group > 1 and h.n_expert // h.n_group < 2:
        raise c.fail("n_group", f"but each group needs two experts or more (n_routed_experts is {h.n_expert})")
    if h.n_expert_used > h.n_group_used * (h.n_expert // h.n_group):
        raise c.fail("num_experts_per_tok", f"but {h.n_group_used} of {h.n_group} groups hold fewer experts")
    # llama.cpp takes these layer counts for DeepSeek-V2-Lite and its kin and then ignores q_lora_rank.
    is_lite = h.n_layer in (26, 27) or (h.n_layer == 48 and h.n_vocab == 128256)
    if is_lite and h.q_lora:
        raise c.unsupported("q_lora_rank", f"llama.cpp expects none in a deepseek2 model of {h.n_layer} layers")


def write_hparams(w: gguf.GGUFWriter, h: DeepseekV3) -> None:
    w.add_block_count(h.n_layer)
    w.add_context_length(h.n_ctx)
    w.add_embedding_length(h.n_embd)
    w.add_feed_forward_length(h.n_ff)
    w.add_vocab_size(h.n_vocab)
    w.add_head_count(h.n_head)
    w.add_head_count_kv(1)  # absorbed MLA: one latent key/value head
    w.add_q_lora_rank(h.q_lora)
    w.add_kv_lora_rank(h.kv_lora)
    w.add_key_length(h.kv_lora + h.rope)
    w.add_value_length(h.kv_lora)
    w.add_key_length_mla(h.nope + h.rope)
    w.add_value_length_mla(h.v_dim)
    w.add_layer_norm_rms_eps(h.rms_eps)
    w.add_leading_dense_block_count(h.n_layer_dense)
    w.add_expert_feed_forward_length(h.n_ff_expert)
    w.add_expert_count(h.n_expert)
    w.add_expert_used_count(h.n_expert_used)
    w.add_expert_shared_count(h.n_expert_shared)
    w.add_expert_group_count(h.n_group)
    w.add_expert_group_used_count(h.n_group_used)
    w.add_expert_weights_scale(h.weights_scale)
    w.add_expert_weights_norm(h.weights_norm)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_rope_dimension_count(h.rope)
    w.add_rope_freq_base(h.rope_theta)
    if h.yarn:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(h.yarn.factor)
        w.add_rope_scaling_orig_ctx_len(h.yarn.n_ctx_orig)
        w.add_rope_scaling_yarn_beta_fast(h.yarn.beta_fast)
        w.add_rope_scaling_yarn_beta_slow(h.yarn.beta_slow)
        w.add_rope_scaling_yarn_log_mul(0.1 * h.yarn.mscale)  # llama.cpp divides the 0.1 out again


def model_tensors(h: DeepseekV3) -> dict[str, Rule]:
    rules = {
        "model.embed_tokens.weight": Rule((h.n_vocab, h.n_embd), "embeddings"),
        "model.norm.weight": Rule((h.n_embd,), "embeddings"),
    }
    if not h.tied:
        rules["lm_head.weight"] = Rule((h.n_vocab, h.n_embd), "embeddings")
    return rules


def layer_tensors(h: DeepseekV3, layer: int) -> dict[str, Rule]:
    def matrix(part: str, rows: int, k: int) -> Rule:
        return Rule((rows, k), part)

    rules = {
        "input_layernorm.weight": Rule((h.n_embd,), "attention"),
        "self_attn.kv_a_proj_with_mqa.weight": matrix("attention", h.kv_lora + h.rope, h.n_embd),
        "self_attn.kv_a_layernorm.weight": Rule((h.kv_lora,), "attention"),
        "self_attn.kv_b_proj.weight": Rule(
            (h.n_head * (h.nope + h.v_dim), h.kv_lora),
            "attention",
            slices=(
                HeadSlice("self_attn.k_b_proj.weight", h.n_head, 0, h.nope, transpose=True),
                HeadSlice("self_attn.v_b_proj.weight", h.n_head, h.nope, h.v_dim, transpose=False),
            ),
        ),
        "self_attn.o_proj.weight": matrix("attention", h.n_embd, h.n_head * h.v_dim),
        "post_attention_layernorm.weight": Rule((h.n_embd,), "ffn"),
    }
    n_query = h.n_head * (h.nope + h.rope)
    if h.q_lora:
        rules["self_attn.q_a_proj.weight"] = matrix("attention", h.q_lora, h.n_embd)
        rules["self_attn.q_a_layernorm.weight"] = Rule((h.q_lora,), "attention")
        rules["self_attn.q_b_proj.weight"] = matrix("attention", n_query, h.q_lora)
    else:
        rules["self_attn.q_proj.weight"] = matrix("attention", n_query, h.n_embd)
    if layer < h.n_layer_dense:
        prefix, n_ff = "mlp.", h.n_ff
    else:
        prefix, n_ff = "mlp.shared_experts.", h.n_ff_expert * h.n_expert_shared
        rules["mlp.gate.weight"] = Rule((h.n_expert, h.n_embd), "ffn", f32=True)
        rules["mlp.gate.e_score_correction_bias"] = Rule((h.n_expert,), "ffn")
    rules[prefix + "gate_proj.weight"] = matrix("ffn", n_ff, h.n_embd)
    rules[prefix + "up_proj.weight"] = matrix("ffn", n_ff, h.n_embd)
    rules[prefix + "down_proj.weight"] = matrix("ffn", h.n_embd, n_ff)
    return rules


def expert_shapes(h: DeepseekV3, layer: int) -> dict[str, tuple[int, int]]:
    if layer < h.n_layer_dense:
        return {}
    return {
        "gate_proj": (h.n_ff_expert, h.n_embd),
        "up_proj": (h.n_ff_expert, h.n_embd),
        "down_proj": (h.n_embd, h.n_ff_expert),
    }


DEEPSEEK_V3 = Family(
    hf_arch="DeepseekV3ForCausalLM",
    gguf_arch=gguf.MODEL_ARCH.DEEPSEEK2,
    read_hparams=read_hparams,
    write_hparams=write_hparams,
    model_tensors=model_tensors,
    layer_tensors=layer_tensors,
    expert_shapes=expert_shapes,
    ignored=(r".*\.rotary_emb\.inv_freq", r"lm_head\.weight"),  # an output matrix beside tied embeddings is a copy
)
