"""The virtual GGUF's bytes against the released tensors: every tensor, every dense type, any piece. No llama.cpp."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

import checkpoint_fixtures as fx
from hybrid_moe_ext.checkpoint import TensorRef, is_checkpoint_dir, open_checkpoint
from hybrid_moe_ext.checkpoint.fp8 import E4M3, f32_to_bf16

Type = gguf.GGMLQuantizationType
HEADS, NOPE, V, KV = (
    fx.CONFIG[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
)


def test_e4m3_table():
    np.testing.assert_array_equal(E4M3, fx.E4M3)
    assert E4M3[0x7E] == 448 and E4M3[1] == 2.0**-9 and np.isnan(E4M3[[0x7F, 0xFF]]).all()


def test_bf16_rounding():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, np.uint32)
    bits[:5] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x80000001]  # two ties, overflow, infinity, subnormal
    values = bits.view(np.float32)
    expected = fx.bf16_bits(values)
    nan = np.isnan(values)
    rounded = f32_to_bf16(values.copy())
    np.testing.assert_array_equal(rounded[~nan], expected[~nan])
    assert np.isnan(fx.from_bf16(rounded[nan])).all()


MODELS = [("deepseek_v3", dtype) for dtype in ("fp8", "BF16", "F16", "F32")]
MODELS += [("qwen3_moe", dtype) for dtype in ("fp8", "BF16")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request, tmp_path_factory):
    family, dtype = request.param
    directory = tmp_path_factory.mktemp(dtype)
    return directory, fx.write_checkpoint(directory, dtype, family=family), family, dtype


NAMES = {  # released -> GGUF, the part after the layer; a layer has those that were released for it
    "input_layernorm": "attn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
NAMES |= {f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")}
NAMES |= {f"mlp.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")}


def expected_tensors(tensors: dict, family: str) -> dict[str, np.ndarray]:
    """GGUF name -> float32, made here by hand from the released names."""
    release = fx.FAMILIES[family]
    found = {
        "token_embd.weight": fx.unpack(tensors, "model.embed_tokens.weight"),
        "output_norm.weight": fx.unpack(tensors, "model.norm.weight"),
        "output.weight": fx.unpack(tensors, "lm_head.weight"),
    }
    for layer in range(release.config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.", f"blk.{layer}."
        for a, b in NAMES.items():
            if f"{old}{a}.weight" in tensors:
                found[f"{new}{b}.weight"] = fx.unpack(tensors, f"{old}{a}.weight")
        if old + "self_attn.kv_b_proj.weight" in tensors:
            kv_b = fx.unpack(tensors, old + "self_attn.kv_b_proj.weight").reshape(HEADS, NOPE + V, KV)
            found[new + "attn_k_b.weight"] = kv_b[:, :NOPE].transpose(0, 2, 1)
            found[new + "attn_v_b.weight"] = kv_b[:, NOPE:]
        if old + "mlp.gate.e_score_correction_bias" in tensors:
            found[new + "exp_probs_b.bias"] = fx.unpack(tensors, old + "mlp.gate.e_score_correction_bias")
        for p in ("gate", "up", "down") if old + "mlp.gate.weight" in tensors else ():
            name = f"{old}mlp.experts.{{}}.{p}_proj.weight"
            experts = [fx.unpack(tensors, name.format(e)) for e in range(release.config[release.n_experts])]
            found[f"{new}ffn_{p}_exps.weight"] = np.stack(experts)
    return found


@pytest.mark.parametrize("dense_type", ["bf16", "q8_0", "f32"])
def test_every_tensor(model, dense_type, tmp_path):
    directory, tensors, family, _ = model
    open_checkpoint(directory).virtual_gguf(dense_type).write(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    expected = expected_tensors(tensors, family)
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        want = expected[tensor.name]
        assert tuple(int(n) for n in tensor.shape[::-1]) == want.shape, tensor.name
        if "_exps" in tensor.name:
            continue  # test_experts_are_references
        plain = want.ndim == 1 or "ffn_gate_inp" in tensor.name
        out = Type.F32 if plain else {"bf16": Type.BF16, "q8_0": Type.Q8_0, "f32": Type.F32}[dense_type]
        if out == Type.Q8_0 and want.shape[-1] % 32:
            out = Type.BF16
        assert tensor.tensor_type == out, tensor.name
        raw = tensor.data.tobytes()
        if out == Type.F32:
            assert raw == want.astype("<f4").tobytes(), tensor.name
        elif out == Type.BF16:
            assert raw == fx.bf16_bits(want).tobytes(), tensor.name
        else:
            assert raw == gguf.quants.quantize(np.ascontiguousarray(want), Type.Q8_0).tobytes(), tensor.name


def test_experts_are_references(model, tmp_path):
    directory, tensors, _, dtype = model
    checkpoint = open_checkpoint(directory)
    virtual = checkpoint.virtual_gguf()
    virtual.write(tmp_path / "model.gguf")
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(checkpoint.experts) == 6
    for expert in checkpoint.experts:
        assert expert.ggml_type == (Type.I8 if dtype == "fp8" else Type[dtype])
        assert expert.n_expert == len(expert.codes) == 4
        stored = b"".join(read(ref) for ref in expert.codes)
        assert stored == written[expert.name].data.tobytes()
        layer, projection = int(expert.name.split(".")[1]), expert.name.split("_")[1]
        names = [f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj.weight" for e in range(4)]
        assert stored == b"".join(tensors[name][1].tobytes() for name in names)
        if dtype == "fp8":
            assert expert.block == (128, 128) and expert.scales is not None
            scales = np.stack([fx.unpack(tensors, name + "_scale_inv") for name in names])
            np.testing.assert_array_equal(expert.read_scales(), scales)
        else:
            assert expert.scales is None and expert.block is None


def read(ref: TensorRef) -> bytes:
    with open(ref.path, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.n_bytes)


@pytest.mark.parametrize("dense_type", ["bf16", "q8_0", "f32"])
def test_any_piece_equals_the_whole(model, dense_type, tmp_path):
    directory, *_ = model
    virtual = open_checkpoint(directory).virtual_gguf(dense_type)
    virtual.write(tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    assert len(whole) == virtual.size
    rng = np.random.default_rng(2)
    starts = [region.start for region in virtual.regions]
    for start in starts:  # around the beginning of every region, and somewhere inside
        for offset in (max(0, start - 3), start, start + int(rng.integers(0, 20_000))):
            n = int(rng.integers(1, 9_000))
            assert virtual.read(offset, n, with_experts=True) == whole[offset : offset + n]
    assert virtual.read(virtual.size - 2, 100, with_experts=True) == whole[-2:]
    assert virtual.read(virtual.size + 5, 100) == b""


def test_large_tensor_uses_several_tasks(tmp_path):
    tensors = fx.write_checkpoint(tmp_path, vocab_size=20_000, n_shards=1)
    virtual = open_checkpoint(tmp_path).virtual_gguf("f32")
    region = next(r for r in virtual.regions if getattr(r.tensor, "name", "") == "token_embd.weight")
    assert virtual.read(region.start, region.n_bytes) == fx.unpack(tensors, "model.embed_tokens.weight").tobytes()


def test_bf16_scales(tmp_path):
    tensors = fx.random_tensors(fx.CONFIG, "fp8", scale_dtype="BF16")
    fx.write_checkpoint(tmp_path, tensors=tensors)
    checkpoint = open_checkpoint(tmp_path)
    virtual = checkpoint.virtual_gguf("f32")
    region = next(r for r in virtual.regions if getattr(r.tensor, "name", "") == "blk.0.attn_output.weight")
    want = fx.unpack(tensors, "model.layers.0.self_attn.o_proj.weight")
    assert virtual.read(region.start, region.n_bytes) == want.tobytes()
    assert checkpoint.experts[0].read_scales().dtype == np.float32


def test_symlinked_shards_as_in_the_hub_cache(tmp_path):
    fx.write_checkpoint(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    assert open_checkpoint(snapshot).n_expert == 4


def test_qwen_in_the_summary_and_without_a_head_dim(tmp_path):
    fx.write_checkpoint(tmp_path, family="qwen3_moe", head_dim=24)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("head_dim") == config["hidden_size"] // config["num_attention_heads"]
    fx.write_json(tmp_path / "config.json", config)
    checkpoint = open_checkpoint(tmp_path)
    summary = checkpoint.summary()
    assert checkpoint.hparams.head_dim == 24
    assert (summary.architecture, summary.n_layer, summary.n_expert) == ("Qwen3MoeForCausalLM", 2, 4)
    assert summary.block == (128, 128) and summary.n_skipped == 0 and "F32" not in summary.dtype_bytes


def test_summary_and_skipped_layers(tmp_path):
    tensors = fx.write_checkpoint(tmp_path)
    assert is_checkpoint_dir(tmp_path) and not is_checkpoint_dir(tmp_path / "config.json")
    checkpoint = open_checkpoint(tmp_path)
    summary = checkpoint.summary()
    mtp = {name for name in tensors if name.startswith("model.layers.3.")}
    assert set(checkpoint.inventory.skipped) == mtp
    n_bytes = sum(bits.nbytes for name, (_, bits) in tensors.items() if name not in mtp)
    assert sum(summary.part_bytes.values()) == sum(summary.dtype_bytes.values()) == n_bytes
    experts = sum(bits.nbytes for name, (_, bits) in tensors.items() if name not in mtp and ".experts." in name)
    assert summary.part_bytes["experts"] == experts
    assert summary.block == (128, 128) and summary.n_expert_used == 2
    assert checkpoint.virtual_gguf().is_expert_range(0, 1) is False


def test_tied_embeddings_and_single_query_projection(tmp_path):
    fx.write_checkpoint(tmp_path, "BF16", tie_word_embeddings=True, q_lora_rank=None)
    names = {tensor.name for tensor in open_checkpoint(tmp_path).dense}
    assert "output.weight" not in names and "blk.0.attn_q.weight" in names and "blk.0.attn_q_a.weight" not in names
