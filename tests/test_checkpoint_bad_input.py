"""Every damaged or foreign checkpoint is refused with one clear sentence. Good checkpoints are in the other files."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoint_fixtures as fx
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.errors import CheckpointError, OptionError, UnsupportedModelError

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def tensors() -> dict:
    return fx.random_tensors(fx.CONFIG, "fp8")


def refused(directory: Path, *words: str, kind: type[CheckpointError] = CheckpointError) -> None:
    """The message names what is in `words` and is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert caught.type is kind, caught.value
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def edit(path: Path, **changes: object) -> None:
    """Replaces fields of a JSON file; None removes one."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    fx.write_json(path, {key: v for key, v in value.items() if v is not None})


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


QWEN = "qwen3_moe"
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
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors"),
        ({"bits": 4}, "missing"),
        ({**fx.QUANTIZATION, "fmt": "e5m2"}, "e5m2"),
        ({**fx.QUANTIZATION, "weight_block_size": None}, "weight_block_size"),
    ],
)
def test_unsupported_quantisation(tmp_path, method, named):
    fx.write_checkpoint(tmp_path, quantization_config=method)
    refused(tmp_path, "quantization_config", named, "FP8", kind=UnsupportedModelError)


@pytest.mark.parametrize("block", [[128], [128, 0], "128", [128, 64.0]])
def test_bad_block(tmp_path, block):
    fx.write_checkpoint(tmp_path, quantization_config={**fx.QUANTIZATION, "weight_block_size": block})
    refused(tmp_path, "weight_block_size")


def test_fp8_weights_without_quantization_config(tmp_path):
    fx.write_checkpoint(tmp_path)
    edit(tmp_path / "config.json", quantization_config=None)
    refused(tmp_path, "F8_E4M3", "quantization_config")


# --- shards and index


def test_no_weights(tmp_path):
    fx.write_checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    refused(tmp_path, "model.safetensors.index.json", "download")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "PyTorch")


def test_shards_without_index(tmp_path):
    fx.write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "no model.safetensors.index.json")


def test_missing_shard(tmp_path):
    fx.write_checkpoint(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere")
    refused(tmp_path, shard.name, "missing")
    shard.symlink_to(tmp_path / "gone")
    refused(tmp_path, shard.name, "link is broken")
    shard.unlink()
    shard.mkdir()
    refused(tmp_path, shard.name, "missing")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:\\b", "", 7, "a\0b"])
def test_index_points_outside(tmp_path, name):
    directory = tmp_path / "model"
    fx.write_checkpoint(directory)
    (tmp_path / "other.safetensors").touch()
    edit(directory / "model.safetensors.index.json", weight_map={GATE: name})
    refused(directory, "model.safetensors.index.json", "shard name")


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_index_without_map(tmp_path, weight_map):
    fx.write_checkpoint(tmp_path)
    edit(tmp_path / "model.safetensors.index.json", weight_map=weight_map)
    refused(tmp_path, "weight_map")


def test_index_names_a_tensor_that_is_not_there(tmp_path):
    fx.write_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=weight_map | {"model.ghost.weight": "model-00001-of-00002.safetensors"})
    refused(tmp_path, "model.ghost.weight", "00001")


def test_tensor_in_two_shards(tmp_path, tensors):
    fx.write_checkpoint(tmp_path, tensors=tensors)
    names = list(tensors)
    second = {name: tensors[name] for name in [*names[1::2], names[0]]}
    fx.write_safetensors(tmp_path / "model-00002-of-00002.safetensors", second)
    refused(tmp_path, names[0], "two shards")


# --- one file's header


@pytest.fixture
def single(tmp_path, tensors) -> Path:
    fx.write_checkpoint(tmp_path, n_shards=1, tensors=tensors)
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("n_bytes", [0, 7, 8, 200, -1])
def test_truncated(single, n_bytes):
    data = single.read_bytes()
    single.write_bytes(data[:n_bytes])
    refused(single.parent, "model.safetensors")


def test_trailing_bytes(single):
    with open(single, "ab") as file:
        file.write(b"\0")
    refused(single.parent, "model.safetensors", "end at byte")


@pytest.mark.parametrize("length", [2**63, 100_000_001, 2**64 - 1, 90_000_000])
def test_absurd_header_length(single, length):
    data = single.read_bytes()
    single.write_bytes(struct.pack("<Q", length) + data[8:])
    refused(single.parent, "header length", str(length))


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xff", b"[" * 20000, b'{"a": {}, "a": {}}'])
def test_bad_header_text(single, text):
    single.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(single.parent, "model.safetensors", "header")


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {},
        {"dtype": "F4", "shape": [96], "data_offsets": [0, 192]},
        {"dtype": "BF16", "shape": [-96], "data_offsets": [0, 192]},
        {"dtype": "BF16", "shape": 96, "data_offsets": [0, 192]},
        {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [96], "data_offsets": [192, 0]},
        {"dtype": "BF16", "shape": [96], "data_offsets": [0]},
        {"dtype": "BF16", "shape": [96], "data_offsets": [0, 190]},  # bytes do not fit dtype x shape
        {"dtype": "BF16", "shape": [96], "data_offsets": [0, 192]},  # overlaps the first tensor
        {"dtype": "BF16", "shape": [96], "data_offsets": [10**12, 10**12 + 192]},
        {"dtype": "BF16", "shape": [10**12, 10**12], "data_offsets": [0, 2 * 10**24]},
    ],
)
def test_lying_entry(single, tensors, entry):
    fx.write_safetensors(single, tensors, {NORM: entry})
    refused(single.parent, "model.safetensors", "tensor")


def test_hole(single, tensors):
    fx.write_safetensors(single, tensors, {NORM: None})
    refused(single.parent, "hole")


def test_zero_size_and_scalar_tensors_do_not_crash(tmp_path, tensors):
    extra = {"model.empty": ("F32", np.zeros((0, 4), np.float32)), "model.scalar": ("F32", np.float32(1).reshape(()))}
    fx.write_checkpoint(tmp_path, n_shards=1, tensors=tensors | extra)
    refused(tmp_path, "model.", "no place")


# --- tensors and their roles


def without(tensors: dict, *names: str) -> dict:
    return {name: value for name, value in tensors.items() if name not in names}


@pytest.mark.parametrize("name", [GATE, GATE + "_scale_inv", O_PROJ, NORM, "lm_head.weight"])
def test_missing_tensor(tmp_path, tensors, name):
    fx.write_checkpoint(tmp_path, tensors=without(tensors, name))
    refused(tmp_path, name, "missing")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv",
    ],
)
def test_qwen_tensor_missing_or_misshapen(tmp_path, name):
    tensors = fx.random_tensors(fx.FAMILIES[QWEN].config, "fp8")
    fx.write_checkpoint(tmp_path, family=QWEN, tensors=without(tensors, name))
    refused(tmp_path, name, "missing")
    dtype, bits = tensors[name]
    fx.write_checkpoint(tmp_path, family=QWEN, tensors=tensors | {name: (dtype, bits[:-1])})
    refused(tmp_path, name, "shape")


def test_config_and_weights_of_two_families(tmp_path):
    fx.write_checkpoint(tmp_path, family=QWEN, tensors=fx.random_tensors(fx.CONFIG, "fp8"))
    refused(tmp_path, "model.layers.0.self_attn.q_proj.weight", "missing")


def test_missing_expert(tmp_path, tensors):
    gone = [name for name in tensors if ".layers.2.mlp.experts.3." in name]
    fx.write_checkpoint(tmp_path, tensors=without(tensors, *gone))
    refused(tmp_path, "model.layers.2.mlp.experts.3.", "missing")


def test_tensor_without_a_place(tmp_path, tensors):
    fx.write_checkpoint(tmp_path, tensors=tensors | {"model.layers.0.self_attn.q_norm.weight": tensors[NORM]})
    refused(tmp_path, "model.layers.0.self_attn.q_norm.weight", "no place")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (GATE, "U8"),
        (GATE, "F8_E5M2"),
        (O_PROJ, "F64"),
        (O_PROJ, "I32"),
        (NORM, "F8_E4M3"),
        (GATE + "_scale_inv", "F16"),
    ],
)
def test_wrong_dtype(tmp_path, tensors, name, dtype):
    shape = tensors[name][1].shape
    fx.write_checkpoint(tmp_path, tensors=tensors | {name: (dtype, np.zeros(shape, fx.NUMPY[dtype]))})
    refused(tmp_path, name, dtype, "must be")


def test_experts_of_two_types(tmp_path):
    tensors = fx.random_tensors(fx.CONFIG, "BF16")
    tensors[GATE] = fx.pack(fx.unpack(tensors, GATE), "F32")
    fx.write_checkpoint(tmp_path, "BF16", tensors=tensors)
    refused(tmp_path, GATE, "one type")


@pytest.mark.parametrize("name", [GATE, O_PROJ, NORM, "model.embed_tokens.weight"])
def test_wrong_shape(tmp_path, tensors, name):
    dtype, bits = tensors[name]
    fx.write_checkpoint(tmp_path, tensors=tensors | {name: (dtype, bits[:-1])})
    refused(tmp_path, name, "shape")


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (1, 2), (2,), (), (2, 0)])
def test_wrong_scale_grid(tmp_path, tensors, grid):
    name = GATE + "_scale_inv"  # 160 x 96 in blocks of 128 x 128: 2 x 1
    fx.write_checkpoint(tmp_path, tensors=tensors | {name: ("F32", np.ones(grid, np.float32))})
    refused(tmp_path, name, "[2, 1]", "128x128")


# --- tokenizer


def test_no_tokenizer(tmp_path):
    fx.write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    refused(tmp_path, "tokenizer.json", "missing")


def test_no_end_token(tmp_path):
    fx.write_checkpoint(tmp_path)
    edit(tmp_path / "config.json", eos_token_id=None)
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    refused(tmp_path, "eos_token_id")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, ("model",)),
        ({"model": {"type": "Unigram", "vocab": []}}, ("Unigram",)),
        ({"model": {"type": "BPE", "vocab": [], "merges": []}}, ("vocab",)),
        ({"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}, ("vocab",)),
        ({"model": {"type": "BPE", "vocab": {"a": 999}, "merges": []}}, ("999", "vocab_size")),
        ({"model": {"type": "BPE", "vocab": {"a": 2, "": 3}, "merges": []}}, ("empty",)),
        ({"model": {"type": "BPE", "vocab": {"[PAD299]": 2}, "merges": []}}, ("[PAD299]", "two ids")),
        ({"model": {"type": "BPE", "vocab": {"a": 2}, "merges": ["a"]}}, ("merge",)),
        ({"model": {"type": "BPE", "vocab": {"a": 2}, "merges": [["a", "b c"]]}}, ("merge",)),
        ({"model": {"type": "BPE", "vocab": {"a": 2}, "merges": 3}}, ("merges",)),
        ({"normalizer": {"type": "Lowercase"}}, ("normalizer",)),
        ({"decoder": {"type": "Metaspace"}}, ("decoder",)),
        ({"added_tokens": [{"id": 5, "content": "<x>", "lstrip": True}]}, ("lstrip",)),
        ({"added_tokens": [{"id": 5}]}, ("content",)),
        ({"added_tokens": 5}, ("added_tokens",)),
        ({"pre_tokenizer": {"type": "Metaspace"}}, ("Metaspace", "deepseek-v3")),
        ({"pre_tokenizer": None}, ("none", "deepseek-v3")),
        ({"pre_tokenizer": {**fx.BYTE_LEVEL, "add_prefix_space": True}}, ("ByteLevel",)),
    ],
)
def test_tokenizer_that_cannot_be_carried(tmp_path, changes, words):
    fx.write_checkpoint(tmp_path)
    edit(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert "tokenizer.json" in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


# --- anything, anywhere


def places(value: object, at: tuple = ()) -> list[tuple]:
    """Paths to the nodes of a JSON value; of long objects and lists only the first few."""
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    limit = 3 if at[-1:] in (("vocab",), ("merges",), ("weight_map",)) else 50
    for key, child in list(items)[:limit]:
        found += places(child, (*at, key))
    return found


SMALL = {
    fx.DEFAULT: {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "n_routed_experts": 2, "n_group": 1},
    QWEN: {"num_hidden_layers": 1, "num_experts": 2},
}
FILES = ["config", "tokenizer", "tokenizer_config", "generation_config", "model.safetensors.index"]


@pytest.mark.parametrize(("family", "name"), [*((fx.DEFAULT, name) for name in FILES), (QWEN, "config")])
def test_any_node_replaced(tmp_path, family, name):
    """Whatever stands where: it opens, or CheckpointError; never another exception."""
    fx.write_checkpoint(tmp_path, family=family, **SMALL[family])
    open_checkpoint(tmp_path)
    fx.write_json(tmp_path / "generation_config.json", {"eos_token_id": [1], "bos_token_id": 0})
    path = tmp_path / f"{name}.json"
    good = path.read_text(encoding="utf-8")
    for at in places(json.loads(good)):
        for replacement in (None, -1, "x", {}, [[]]):
            value = {"": json.loads(good)}
            node: Any = value
            for key in ("", *at)[:-1]:
                node = node[key]
            node[("", *at)[-1]] = replacement
            fx.write_json(path, value[""])
            with contextlib.suppress(CheckpointError):
                open_checkpoint(tmp_path)


# --- what only reading can tell


def test_nan_code_in_a_dense_tensor(tmp_path, tensors):
    tensors[O_PROJ][1][95, 7] = 0xFF
    fx.write_checkpoint(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight.*NaN"):
        open_checkpoint(tmp_path).virtual_gguf().write(tmp_path / "out.gguf")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scale_that_is_not_finite(tmp_path, tensors, value):
    tensors[O_PROJ + "_scale_inv"][1][0, 0] = value
    tensors[GATE + "_scale_inv"][1][1, 0] = value
    fx.write_checkpoint(tmp_path, tensors=tensors)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"o_proj.*NaN"):
        checkpoint.virtual_gguf().write(tmp_path / "out.gguf")
    experts = next(tensor for tensor in checkpoint.experts if tensor.name == "blk.1.ffn_gate_exps.weight")
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj.*NaN"):
        experts.read_scales()


def test_file_cut_after_opening(tmp_path):
    fx.write_checkpoint(tmp_path, n_shards=1)
    virtual = open_checkpoint(tmp_path).virtual_gguf()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="ends early"):
        virtual.read(virtual.regions[1].start, 10)


def test_unknown_dense_type(tmp_path):
    fx.write_checkpoint(tmp_path)
    with pytest.raises(OptionError, match=r"q4_0.*bf16"):
        open_checkpoint(tmp_path).virtual_gguf("q4_0")
