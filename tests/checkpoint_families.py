"""A release of each family in small: config, tensor shapes, quantisation, special tokens. No weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BLOCK = (128, 128)
N_VOCAB = 300
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "kv_lora_rank": 64,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 160,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 48,
    "vocab_size": N_VOCAB,
}

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 260,
    "decoder_sparse_step": 1,
    "eos_token_id": 262,
    "head_dim": 32,  # 4 x 32 is not the hidden size
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "mlp_only_layers": [],
    "moe_intermediate_size": 160,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": N_VOCAB,
}

QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK)}
NOT_CONVERTED = ["input_layernorm", "mlp.gate", "post_attention_layernorm"]  # of every layer

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
        {**BYTE_LEVEL, "use_regex": False},
    ],
}


@dataclass(frozen=True)
class Release:
    config: dict
    shapes: Callable[[dict], dict[str, tuple[int, ...]]]  # released name -> shape
    n_experts: str  # config's key
    quantization: dict
    scale_dtype: str
    first_tokens: tuple[str, ...]  # special tokens before the bytes
    added_tokens: tuple[tuple[str, bool], ...]  # behind the merges: text, flagged special
    pre_tokenizer: dict
    normalizer: dict
    tokenizer_config: dict
    generation_config: dict | None = None


def _mlp(n_ff: int, d: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj.weight": (n_ff, d), "up_proj.weight": (n_ff, d), "down_proj.weight": (d, n_ff)}


def _deepseek_v3_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Multi-token prediction layers included."""
    d, heads, kv = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    n_layer = c["num_hidden_layers"]
    for layer in range(n_layer + c["num_nextn_predict_layers"]):
        p = f"model.layers.{layer}."
        attention = {
            "kv_a_proj_with_mqa.weight": (kv + rope, d),
            "kv_a_layernorm.weight": (kv,),
            "kv_b_proj.weight": (heads * (nope + v), kv),
            "o_proj.weight": (d, heads * v),
        }
        if c["q_lora_rank"]:
            attention["q_a_proj.weight"] = (c["q_lora_rank"], d)
            attention["q_a_layernorm.weight"] = (c["q_lora_rank"],)
            attention["q_b_proj.weight"] = (heads * (nope + rope), c["q_lora_rank"])
        else:
            attention["q_proj.weight"] = (heads * (nope + rope), d)
        found |= {p + "self_attn." + name: shape for name, shape in attention.items()}
        found[p + "input_layernorm.weight"] = found[p + "post_attention_layernorm.weight"] = (d,)
        if layer < c["first_k_dense_replace"]:
            mlps = {"mlp.": c["intermediate_size"]}
        else:
            mlps = {f"mlp.experts.{e}.": c["moe_intermediate_size"] for e in range(c["n_routed_experts"])}
            mlps["mlp.shared_experts."] = c["moe_intermediate_size"] * c["n_shared_experts"]
            found[p + "mlp.gate.weight"] = (c["n_routed_experts"], d)
            found[p + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for mlp, n_ff in mlps.items():
            found |= {p + mlp + name: shape for name, shape in _mlp(n_ff, d).items()}
        if layer >= n_layer:
            found[p + "eh_proj.weight"] = (d, 2 * d)
            found[p + "enorm.weight"] = found[p + "hnorm.weight"] = found[p + "shared_head.norm.weight"] = (d,)
    found["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], d)
    return found


def _qwen3_moe_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    d, head = c["hidden_size"], c["head_dim"]
    n_query, n_key = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        attention = {"q_proj": (n_query, d), "k_proj": (n_key, d), "v_proj": (n_key, d), "o_proj": (d, n_query)}
        found |= {f"{p}self_attn.{name}.weight": shape for name, shape in attention.items()}
        found[p + "self_attn.q_norm.weight"] = found[p + "self_attn.k_norm.weight"] = (head,)
        found[p + "input_layernorm.weight"] = found[p + "post_attention_layernorm.weight"] = (d,)
        found[p + "mlp.gate.weight"] = (c["num_experts"], d)
        for e in range(c["num_experts"]):
            found |= {f"{p}mlp.experts.{e}.{k}": shape for k, shape in _mlp(c["moe_intermediate_size"], d).items()}
    found["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], d)
    return found


FAMILIES = {
    "deepseek_v3": Release(
        config=DEEPSEEK_V3,
        shapes=_deepseek_v3_shapes,
        n_experts="n_routed_experts",
        quantization=QUANTIZATION,
        scale_dtype="F32",
        first_tokens=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        added_tokens=(("<｜User｜>", False), ("<think>", False)),
        pre_tokenizer=BYTE_LEVEL,
        normalizer={"type": "Sequence", "normalizers": []},
        tokenizer_config={
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>"},
            "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"},
            "pad_token": "<｜end▁of▁sentence｜>",
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "tokenizer_class": "LlamaTokenizerFast",
        },
    ),
    "qwen3_moe": Release(
        config=QWEN3_MOE,
        shapes=_qwen3_moe_shapes,
        n_experts="num_experts",
        quantization=QUANTIZATION
        | {"modules_to_not_convert": ["lm_head"] + [f"model.layers.{i}.{n}" for i in range(2) for n in NOT_CONVERTED]},
        scale_dtype="BF16",
        first_tokens=(),
        added_tokens=(
            ("<|endoftext|>", True),
            ("<|im_start|>", True),
            ("<|im_end|>", True),
            ("<tool_call>", False),
            ("<|fim_prefix|>", False),
            ("<think>", False),
        ),
        pre_tokenizer=QWEN2_PRE_TOKENIZER,
        normalizer={"type": "NFC"},
        tokenizer_config={
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "chat_template": CHATML,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
        generation_config={"bos_token_id": 260, "do_sample": True, "eos_token_id": [262, 260], "pad_token_id": 260},
    ),
}
