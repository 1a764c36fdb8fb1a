"""describe_model and the GGUF header reader: against the checkpoint's own summary and against gguf's reader."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from checkpoint_fixtures import write_checkpoint
from hybrid_moe_ext import CheckpointError
from hybrid_moe_ext._native import WEIGHT_TYPES
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.info import ACCEPTED_TYPES, BOTH, HOST, OURS, describe_model, read_gguf_header


def write_gguf(path, expert_types, n_expert=4, n_vocab=8, dense=False):
    """A header with tensors of one layer; `expert_types`: of gate, up and down."""
    w = gguf.GGUFWriter(path, "qwen3moe")
    w.add_block_count(1)
    w.add_context_length(2048)
    if not dense:
        w.add_expert_count(n_expert)
        w.add_expert_used_count(2)
    w.add_token_list([f"token{i}" for i in range(n_vocab)])
    w.add_token_scores(list(np.arange(n_vocab, dtype=float)))
    w.add_array("test.flags", [True, False])
    w.add_array("test.empty", [])
    tensors = {"token_embd.weight": ("F16", (n_vocab, 256)), "blk.0.attn_q.weight": ("Q8_0", (256, 256))}
    tensors |= {"blk.0.ffn_gate_inp.weight": ("F32", (n_expert, 256)), "blk.0.odd.weight": ("F32", (3,))}
    if not dense:
        for name, type_ in zip(("gate", "up", "down"), expert_types, strict=True):
            tensors[f"blk.0.ffn_{name}_exps.weight"] = (type_, (n_expert, 256, 256))
    for name, (type_name, shape) in tensors.items():
        type_ = gguf.GGMLQuantizationType[type_name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        row = np.zeros((*shape[:-1], shape[-1] // block * block_bytes), np.uint8)
        w.add_tensor(name, row, raw_dtype=type_)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("dtype", ["fp8", "BF16"])
def test_directory_agrees_with_its_summary(tmp_path, dtype):
    write_checkpoint(tmp_path, dtype)
    info, summary = describe_model(tmp_path), open_checkpoint(tmp_path).summary()
    assert {name: part.n_bytes for name, part in info.parts.items()} == summary.part_bytes
    assert (info.architecture, info.n_layer, info.n_expert) == ("DeepseekV3ForCausalLM", 3, 4)
    assert info.fp8_block == ((128, 128) if dtype == "fp8" else None)
    assert set(info.parts["experts"].types) == {"F8_E4M3" if dtype == "fp8" else "BF16"}
    assert info.experts_on == OURS and info.parts["attention"].runs_on == HOST
    assert info.n_skipped == summary.n_skipped > 0


@pytest.mark.parametrize(
    ("types", "where", "host_types"),
    [
        (("F32", "F16", "BF16"), OURS, []),
        (("Q8_0", "Q8_0", "Q8_0"), OURS, []),
        (("Q4_K", "Q4_K", "Q6_K"), OURS, []),
        (("Q3_K", "Q3_K", "Q5_1"), HOST, ["Q3_K", "Q5_1"]),
        (("Q3_K", "Q3_K", "Q8_0"), BOTH, ["Q3_K"]),
    ],
)
def test_gguf_experts_go_by_type(tmp_path, types, where, host_types):
    info = describe_model(write_gguf(tmp_path / "m.gguf", types))
    assert (info.architecture, info.n_layer, info.n_expert, info.n_expert_used) == ("qwen3moe", 1, 4, 2)
    assert info.n_ctx_train == 2048
    assert info.experts_on == where and info.host_expert_types == host_types
    assert list(info.parts) == ["experts", "attention", "ffn", "embeddings", "other"]
    assert sum(part.n_bytes for part in info.parts.values()) == info.n_bytes == info.as_dict()["n_bytes"]


def test_dense_model_has_no_experts(tmp_path):
    info = describe_model(write_gguf(tmp_path / "m.gguf", (), dense=True))
    assert info.n_expert == 0 and info.experts_on is None and info.host_expert_types == []


def test_accepted_types_are_those_of_the_plug_in():
    assert set(ACCEPTED_TYPES) == {"F8_E4M3" if name == "FP8" else name for name in WEIGHT_TYPES}


def test_header_agrees_with_gguf_reader(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", ("Q4_K", "F16", "Q8_0"))
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.type, t.shape, t.n_bytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()), t.n_bytes) for t in theirs.tensors
    ]
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = field.contents()
            assert ours.fields[name] == (len(value) if isinstance(value, list) else value)


def test_every_cut_of_a_header_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", ("F16",) * 3, n_vocab=4).read_bytes()
    end = gguf.GGUFReader(tmp_path / "m.gguf").data_offset - 32
    cut = tmp_path / "cut.gguf"
    for n in [*range(0, end, 7)]:
        cut.write_bytes(whole[:n])
        with pytest.raises(CheckpointError):
            describe_model(cut)


def test_damaged_headers_are_refused(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", ("F16",) * 3).read_bytes()
    path = tmp_path / "damaged.gguf"
    huge = struct.pack("<Q", 2**63)
    for at, value in [(4, struct.pack("<I", 9)), (8, huge), (16, huge), (24, huge), (24, struct.pack("<Q", 2**20))]:
        path.write_bytes(whole[:at] + value + whole[at + len(value) :])
        with pytest.raises(CheckpointError, match="damaged"):
            describe_model(path)


def test_split_files_are_summed(tmp_path):
    def shard(i, n=2):
        w = gguf.GGUFWriter(tmp_path / f"m-{i:05d}-of-{n:05d}.gguf", "qwen3moe")
        w.add_uint16("split.count", n)
        w.add_uint16("split.no", i - 1)
        if i == 1:
            w.add_block_count(2)
            w.add_expert_count(2)
        w.add_tensor(f"blk.{i}.ffn_up_exps.weight", np.zeros((2, 4, 32), np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()

    shard(1)
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf does not exist"):
        describe_model(first)
    shard(2)
    assert describe_model(first).parts["experts"].n_bytes == 2 * 2 * 4 * 32 * 4
    with pytest.raises(CheckpointError, match="give the first"):
        describe_model(second)
