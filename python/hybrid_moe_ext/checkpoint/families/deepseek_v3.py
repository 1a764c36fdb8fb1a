"""DeepseekV3ForCausalLM (DeepSeek-V3, R1, V3.1) as llama.cpp's deepseek2. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from ..config import Fields
from ..family import Family, HeadSlice, Rule
from .decoder import Decoder, expert_shapes, mlp_shapes, model_tensors, read_decoder, rope_fields, write_decoder


@dataclass(frozen=True)
class DeepseekV3(Decoder):
    n_layer_dense: int  # leading layers without experts
    q_lora: int  # 0: one query projection instead of two
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    n_expert_shared: int
    n_group: int
    n_group_used: int
    weights_scale: float
    weights_norm: bool
    mscale: float


def read_hparams(c: Fields) -> DeepseekV3:
    c.only("moe_layer_freq", (1,), "every layer after the dense ones has experts", default=1)
    c.only("topk_method", ("noaux_tc",), "how V3 selects experts", default="noaux_tc")
    c.only("rope_interleave", (True,), "llama.cpp's deepseek2", default=True)
    c.only("scoring_func", ("sigmoid",), "how V3 scores experts", default="sigmoid")
    common = read_decoder(c, "deepseek2", experts="n_routed_experts")
    n_group = c.count("n_group", default=1)
    h = DeepseekV3(
        **common,
        n_layer_dense=c.count("first_k_dense_replace", least=0, most=common["n_layer"] - 1),
        q_lora=c.count("q_lora_rank", default=None) or 0,
        kv_lora=c.count("kv_lora_rank"),
        nope=c.count("qk_nope_head_dim"),
        rope=c.count("qk_rope_head_dim"),
        v_dim=c.count("v_head_dim"),
        n_expert_shared=c.count("n_shared_experts"),
        n_group=n_group,
        n_group_used=c.count("topk_group", most=n_group, default=1),
        weights_scale=c.number("routed_scaling_factor", default=1.0),
        weights_norm=c.flag("norm_topk_prob", default=True),
        mscale=_read_mscale(rope_fields(c)) if common["yarn"] else 1.0,
    )
    _check_together(c, h)
    return h


def _read_mscale(rope: Fields) -> float:
    mscale = rope.number("mscale", default=1.0)
    if mscale != rope.number("mscale_all_dim", default=0.0):
        raise rope.unsupported("mscale_all_dim", f"llama.cpp's deepseek2 needs it equal to mscale ({mscale:g})")
    return mscale


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
    write_decoder(w, h, n_rot=h.rope)
    w.add_head_count_kv(1)  # absorbed MLA: one latent key/value head
    w.add_q_lora_rank(h.q_lora)
    w.add_kv_lora_rank(h.kv_lora)
    w.add_key_length(h.kv_lora + h.rope)
    w.add_value_length(h.kv_lora)
    w.add_key_length_mla(h.nope + h.rope)
    w.add_value_length_mla(h.v_dim)
    w.add_leading_dense_block_count(h.n_layer_dense)
    w.add_expert_shared_count(h.n_expert_shared)
    w.add_expert_group_count(h.n_group)
    w.add_expert_group_used_count(h.n_group_used)
    w.add_expert_weights_scale(h.weights_scale)
    w.add_expert_weights_norm(h.weights_norm)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if h.yarn:
        w.add_rope_scaling_yarn_log_mul(0.1 * h.mscale)  # llama.cpp divides the 0.1 out again


def layer_tensors(h: DeepseekV3, layer: int) -> dict[str, Rule]:
    rules = {
        "input_layernorm.weight": Rule((h.n_embd,), "attention"),
        "self_attn.kv_a_proj_with_mqa.weight": Rule((h.kv_lora + h.rope, h.n_embd), "attention"),
        "self_attn.kv_a_layernorm.weight": Rule((h.kv_lora,), "attention"),
        "self_attn.kv_b_proj.weight": Rule(
            (h.n_head * (h.nope + h.v_dim), h.kv_lora),
            "attention",
            slices=(
                HeadSlice("self_attn.k_b_proj.weight", h.n_head, 0, h.nope, transpose=True),
                HeadSlice("self_attn.v_b_proj.weight", h.n_head, h.nope, h.v_dim, transpose=False),
            ),
        ),
        "self_attn.o_proj.weight": Rule((h.n_embd, h.n_head * h.v_dim), "attention"),
        "post_attention_layernorm.weight": Rule((h.n_embd,), "ffn"),
    }
    n_query = h.n_head * (h.nope + h.rope)
    if h.q_lora:
        rules["self_attn.q_a_proj.weight"] = Rule((h.q_lora, h.n_embd), "attention")
        rules["self_attn.q_a_layernorm.weight"] = Rule((h.q_lora,), "attention")
        rules["self_attn.q_b_proj.weight"] = Rule((n_query, h.q_lora), "attention")
    else:
        rules["self_attn.q_proj.weight"] = Rule((n_query, h.n_embd), "attention")
    if layer < h.n_layer_dense:
        prefix, n_ff = "mlp.", h.n_ff
    else:
        prefix, n_ff = "mlp.shared_experts.", h.n_ff_expert * h.n_expert_shared
        rules["mlp.gate.weight"] = Rule((h.n_expert, h.n_embd), "ffn", f32=True)
        rules["mlp.gate.e_score_correction_bias"] = Rule((h.n_expert,), "ffn")
    for name, shape in mlp_shapes(h.n_embd, n_ff).items():
        rules[f"{prefix}{name}.weight"] = Rule(shape, "ffn")
    return rules


DEEPSEEK_V3 = Family(
    hf_arch="DeepseekV3ForCausalLM",
    gguf_arch=gguf.MODEL_ARCH.DEEPSEEK2,
    read_hparams=read_hparams,
    write_hparams=write_hparams,
    model_tensors=model_tensors,
    layer_tensors=layer_tensors,
    expert_shapes=lambda h, layer: {} if layer < h.n_layer_dense else expert_shapes(h, layer),
)
