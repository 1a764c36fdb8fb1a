"""Shards, index and safetensors headers that are refused, each with one clear sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import checkpoint_fixtures as fx
from checkpoint_refusals import GATE, NORM, edit, refused


@pytest.fixture
def tensors() -> dict:
    return fx.random_tensors(fx.CONFIG, "fp8")


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
