"""The config.json of a tiny model in the released style, its tensor list and random weights. NumPy only; no files.

The config is written by hand on purpose: a config that transformers 5 *saves* loses `scoring_func`, and a loader then
routes with softmax instead of sigmoid without a word.
"""

from __future__ import annotations

import copy
import json
import zlib

import numpy as np

State = dict[str, np.ndarray]  # released tensor name -> float32 array, one tensor per expert, without scales

QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

# Key order and spelling follow the released DeepSeek-V3 file; `quantization_config` is added by the writer.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_lora_rank": 128,
    "max_position_embeddings": 1024,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 64,
    "vocab_size": 2048,
}

ARCHS = {"deepseek_v3": DEEPSEEK_V3}


def make_config(arch: str = "deepseek_v3", **fields) -> dict:
    """A released-style config; `fields` replace defaults. An unknown field is an error, not a silent extra key."""
    if arch not in ARCHS:
        raise ValueError(f"unknown arch {arch!r}: choose one of {sorted(ARCHS)}")
    config = copy.deepcopy(ARCHS[arch])
    unknown = sorted(set(fields) - set(config))
    if unknown:
        raise ValueError(f"unknown config field {unknown}: {arch} has {sorted(config)}")
    config.update(fields)
    check_config(config)
    return config


def check_config(config: dict) -> None:
    """Refuses what no router could run, so that a test's typing error does not become a puzzling loader error."""
    n_expert, n_group = config["n_routed_experts"], config["n_group"]
    if n_expert % n_group:
        raise ValueError(f"n_routed_experts {n_expert} is no multiple of n_group {n_group}: set n_group=1 topk_group=1")
    if n_expert // n_group < 2:
        raise ValueError(f"{n_expert // n_group} experts per group, but a group's score is the sum of its best two")
    reachable = config["topk_group"] * (n_expert // n_group)
    if config["topk_group"] > n_group or config["num_experts_per_tok"] > reachable:
        raise ValueError(f"num_experts_per_tok {config['num_experts_per_tok']} of {reachable} reachable experts")
    if config["qk_rope_head_dim"] % 2:
        raise ValueError(f"qk_rope_head_dim {config['qk_rope_head_dim']} must be even")


def parse_fields(pairs: list[str]) -> dict:
    """["hidden_size=320", "q_lora_rank=null"] -> fields for make_config; values are JSON, `none` is accepted too."""
    fields = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set wants key=value, got {pair!r}")
        try:
            fields[key] = json.loads("null" if text.lower() == "none" else text)
        except json.JSONDecodeError:
            fields[key] = text
    return fields


def attention_shapes(config: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, n_head = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    if q_rank is None:
        shapes = {"q_proj.weight": (n_head * (nope + rope), hidden)}
    else:
        shapes = {
            "q_a_proj.weight": (q_rank, hidden),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (n_head * (nope + rope), q_rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (n_head * (nope + value), kv_rank),
        "o_proj.weight": (hidden, n_head * value),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def ffn_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def layer_shapes(config: dict, i_layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    prefix = f"model.layers.{i_layer}."
    shapes = attention_shapes(config, prefix + "self_attn.")
    if i_layer < config["first_k_dense_replace"]:
        shapes |= ffn_shapes(prefix + "mlp.", hidden, config["intermediate_size"])
    else:
        for i_expert in range(config["n_routed_experts"]):
            shapes |= ffn_shapes(f"{prefix}mlp.experts.{i_expert}.", hidden, inner)
        shapes |= ffn_shapes(prefix + "mlp.shared_experts.", hidden, inner * config["n_shared_experts"])
        shapes[prefix + "mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        shapes[prefix + "mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
    shapes[prefix + "input_layernorm.weight"] = (hidden,)
    shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes


def mtp_shapes(config: dict, i_layer: int) -> dict[str, tuple[int, ...]]:
    """The multi-token-prediction layer: a MoE layer plus its own norms, projection, embedding and head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    prefix = f"model.layers.{i_layer}."
    return {
        prefix + "embed_tokens.weight": (vocab, hidden),
        prefix + "enorm.weight": (hidden,),
        prefix + "hnorm.weight": (hidden,),
        prefix + "eh_proj.weight": (hidden, 2 * hidden),
        **layer_shapes(config, i_layer),
        prefix + "shared_head.norm.weight": (hidden,),
        prefix + "shared_head.head.weight": (vocab, hidden),
    }


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint in released order, without the FP8 scales."""
    hidden, vocab, n_layer = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i_layer in range(n_layer):
        shapes |= layer_shapes(config, i_layer)
    for i_layer in range(n_layer, n_layer + config["num_nextn_predict_layers"]):
        shapes |= mtp_shapes(config, i_layer)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def is_fp8_linear(name: str) -> bool:
    """What the release stores as E4M3: every linear of attention, dense MLP and experts; not router, eh_proj, heads."""
    return name.endswith(("_proj.weight", "_with_mqa.weight")) and not name.endswith("eh_proj.weight")


def random_state_dict(config: dict, seed: int = 0) -> State:
    """Random float32 weights by released name. Each tensor has its own stream, so changing one field leaves the other
    tensors as they were."""
    state = {name: random_tensor(name, shape, seed) for name, shape in tensor_shapes(config).items()}
    if config["tie_word_embeddings"]:  # the embedding is the head too, and takes the head's size
        state["model.embed_tokens.weight"] *= np.float32(2 / np.sqrt(config["hidden_size"]))
    return state


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise  # not all ones: a loader that drops a norm must show
    if name.endswith("e_score_correction_bias"):
        return np.float32(0.1) * noise  # large enough to change choices, small enough that scores still matter
    if name.endswith("embed_tokens.weight"):
        return noise
    # Outputs of unit variance, the head twice that: logits of std 2 have a clear winner and no one-hot softmax.
    gain = 2.0 if name.endswith("head.weight") else 1.0
    return noise * np.float32(gain / np.sqrt(shape[-1]))
