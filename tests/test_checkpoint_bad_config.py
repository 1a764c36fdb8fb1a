"""Directories, config.json and architectures that are refused, each with one clear sentence."""

from __future__ import annotations

import pytest

import checkpoint_fixtures as fx
from checkpoint_refusals import QWEN, edit, refused
from hybrid_moe_ext.errors import UnsupportedModelError


@pytest.fixture
def tensors() -> dict:
    return fx.random_tensors(fx.CONFIG, "fp8")


# --- directory and config.json


def test_path_is_neither(tmp_path):
    refused(tmp_path / "absent", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")


def test_no_config(tmp_path):
    refused(tmp_path, "config.json", "missing")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_config_is_not_json(tmp_path, text):
    fx.write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, "config.json", "JSON")


@pytest.mark.parametrize("architectures", [None, [], "DeepseekV3ForCausalLM", [3]])
def test_no_architecture(tmp_path, architectures):
    fx.write_checkpoint(tmp_path)
    edit(tmp_path / "config.json", architectures=architectures)
    refused(tmp_path, "architectures")


def test_unknown_architecture_lists_the_known(tmp_path):
    fx.write_checkpoint(tmp_path, architectures=["GPT2LMHeadModel"])
    refused(tmp_path, "GPT2LMHeadModel", "DeepseekV3ForCausalLM", kind=UnsupportedModelError)


NONSENSE = [
    (fx.DEFAULT, field, value)
    for field, value in [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", None),
        ("num_hidden_layers", "3"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 0),
        ("hidden_size", 96.0),
        ("num_experts_per_tok", 5),
        ("num_experts_per_tok", 3),  # more than one group holds
        ("first_k_dense_replace", 3),
        ("n_group", 3),
        ("n_group", 4),  # one expert per group
        ("topk_group", 3),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", "small"),
        ("rope_theta", float("nan")),
        ("norm_topk_prob", 1),
        ("qk_rope_head_dim", 31),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 4}),
        ("vocab_size", None),
        ("eos_token_id", 300),
        ("bos_token_id", "first"),
    ]
]
NONSENSE += [
    (QWEN, field, value)
    for field, value in [
        ("num_hidden_layers", None),
        ("hidden_size", 0),
        ("num_attention_heads", None),
        ("num_key_value_heads", None),
        ("num_key_value_heads", 3),  # does not divide the heads
        ("num_key_value_heads", 8),  # more than heads
        ("head_dim", 31),
        ("head_dim", 0),
        ("head_dim", "32"),
        ("num_experts", None),
        ("num_experts", 513),
        ("num_experts_per_tok", 5),
        ("moe_intermediate_size", None),
        ("max_position_embeddings", None),
        ("norm_topk_prob", None),  # transformers' default is false, which llama.cpp cannot run
        ("tie_word_embeddings", "no"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4}),
        ("vocab_size", None),
    ]
]


@pytest.mark.parametrize(("family", "field", "value"), NONSENSE)
def test_nonsense_in_config(tmp_path, family, field, value):
    fx.write_checkpoint(tmp_path, family=family)
    edit(tmp_path / "config.json", **{field: value})
    named = "original_max_position_embeddings" if isinstance(value, dict) else field
    refused(tmp_path, "config.json", named)


YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}
IMPOSSIBLE = [
    (fx.DEFAULT, field, value)
    for field, value in [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("moe_layer_freq", 2),
        ("rope_interleave", False),
        ("rope_scaling", {"type": "longrope"}),
        ("rope_scaling", YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
        ("rope_scaling", YARN),
        ("num_hidden_layers", 27),  # llama.cpp takes it for DeepSeek-V2-Lite and ignores q_lora_rank
    ]
]
IMPOSSIBLE += [
    (QWEN, field, value)
    for field, value in [
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_scaling", {"type": "dynamic", "factor": 4}),
        ("rope_scaling", YARN | {"mscale_all_dim": 1.0}),
        ("rope_scaling", YARN | {"attention_factor": 1.1}),
        ("rope_scaling", YARN | {"truncate": False}),
    ]
]


@pytest.mark.parametrize(("family", "field", "value"), IMPOSSIBLE)
def test_what_llama_cpp_cannot_run(tmp_path, family, field, value):
    fx.write_checkpoint(tmp_path, family=family)
    edit(tmp_path / "config.json", **{field: value})
    refused(tmp_path, "config.json", kind=UnsupportedModelError)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"bits": 4}, "missing"),
        ({**fx.QUANTIZATION, "fmt": "e5m2"}, "e5m2"),
    ],
)
def test_unsupported_quantisation(tmp_path, method, named):
    fx.write_checkpoint(tmp_path, quantization_config=method)
    refused(tmp_path, "quantization_config", named, "FP8", kind=UnsupportedModelError)


@pytest.mark.parametrize("block", [[128], [128, 0], "128", [128, 64.0]])
def test_bad_block(tmp_path, block):
    fx.write_checkpoint(tmp_path, quantization_config={**fx.QUANTIZATION, "weight_block_size": block})
    refused(tmp_path, "weight_block_size")


def test_block_scales_that_config_does_not_know_of(tmp_path):
    fx.write_checkpoint(tmp_path, quantization_config={**fx.QUANTIZATION, "weight_block_size": None})
    refused(tmp_path, "_scale_inv", "one scale per tensor", "one scale per channel")


def test_fp8_weights_without_quantization_config(tmp_path):
    fx.write_checkpoint(tmp_path)
    edit(tmp_path / "config.json", quantization_config=None)
    refused(tmp_path, "F8_E4M3", "quantization_config")
