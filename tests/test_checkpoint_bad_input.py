"""Tensors, tokenizers and contents that are refused, each with one clear sentence; and any JSON node replaced."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest

import checkpoint_fixtures as fx
from checkpoint_refusals import GATE, NORM, O_PROJ, QWEN, edit, refused
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.errors import CheckpointError, OptionError


@pytest.fixture
def tensors() -> dict:
    return fx.random_tensors(fx.CONFIG, "fp8")


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
