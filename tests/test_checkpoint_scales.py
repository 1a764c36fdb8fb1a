"""FP8 scales per block, output channel and tensor, in every stored type: values, GGUF, logits, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

import checkpoint_fixtures as fx
import checkpoint_scales as scales
from checkpoint_refusals import GATE, O_PROJ, QWEN, edit, refused
from checkpoint_scales import SCHEMES, compressed_tensors
from hybrid_moe_ext.checkpoint import open_checkpoint, trailer
from hybrid_moe_ext.convert import convert
from hybrid_moe_ext.errors import CheckpointError, UnsupportedModelError
from hybrid_moe_ext.info import describe_model
from test_checkpoint_logits import NMSE, TOKENS, nmse, stock

CASES = [(QWEN, scheme) for scheme in SCHEMES]
CASES += [("deepseek_v3", scheme) for scheme in ("block-e8m0", "channel", "tensor")]  # cuts FP8 matrices by heads
F32 = GGMLQuantizationType.F32
WORDS = {"block": "one per block of 128 x 128", "channel": "one per output channel", "tensor": "one per tensor"}
OURS = """
import sys, models, numpy, hybrid_moe_ext
tokens, fallen = eval(sys.argv[1]), []
for name in sys.argv[2:]:
    for path in (name, name + ".gguf"):
        before = hybrid_moe_ext.counters()
        llm = hybrid_moe_ext.Llama(path, dense_type="f32", **models.OPTIONS)
        numpy.save(path + ".npy", models.logits(llm, tokens))
        llm.close()
        assert hybrid_moe_ext.counters().n_layers > before.n_layers
"""


def write(folder: Path, family: str, scheme: str, tensors: scales.Tensors | None = None) -> scales.Tensors:
    config = fx.FAMILIES[family].config
    tensors = tensors or scales.random_tensors(config, scheme)
    how = SCHEMES[scheme].quantization
    return fx.write_checkpoint(folder, "fp8", family=family, tensors=tensors, quantization_config=how)


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """Directory, FP8 GGUF and F32 twin of each case, and the logits of our Llama on the first two. The logits come from
    a process of its own: this one's host stays stock."""
    folder = tmp_path_factory.mktemp("scales")
    for family, scheme in CASES:
        name = f"{family}-{scheme}"
        tensors = write(folder / name, family, scheme)
        plain = scales.dequantised(tensors, scheme)
        fx.write_checkpoint(folder / f"{name}-twin", "F32", family=family, tensors=plain)
        convert(folder / name, folder / f"{name}.gguf", "f32")
    names = [str(folder / f"{family}-{scheme}") for family, scheme in CASES]
    subprocess.run([sys.executable, "-c", OURS, repr(TOKENS), *names], check=True, cwd=Path(__file__).parent)
    return folder


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_logits_equal_the_dequantised_twins(ours, family, scheme):
    want = stock(ours / f"{family}-{scheme}-twin")
    assert nmse(np.load(ours / f"{family}-{scheme}.npy"), want) <= NMSE
    assert nmse(np.load(ours / f"{family}-{scheme}.gguf.npy"), want) <= NMSE


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_tensors_and_trailer(ours, family, scheme):
    """Every value outside the experts, and the experts' scales as they are stored in directory and GGUF."""
    folder = ours / f"{family}-{scheme}"
    checkpoint = open_checkpoint(folder)
    tensors = scales.random_tensors(fx.FAMILIES[family].config, scheme)
    for tensor in checkpoint.dense:
        if tensor.cut is None:
            want = scales.values(tensors, tensor.source.name, scheme)
            found = np.concatenate([data for _, data in tensor.convert(F32, 0, tensor.n_units, 7)])
            assert found.tobytes() == want.tobytes(), tensor.name
    entries = {entry.name: entry for entry in trailer.read_entries(f"{folder}.gguf")}
    assert entries.keys() == {expert.name for expert in checkpoint.experts}
    for expert in checkpoint.experts:
        entry, block = entries[expert.name], scales.block_of(scheme, expert.n_rows, expert.k)
        assert expert.block == entry.block == block and entry.scale_type == SCHEMES[scheme].dtype
        stored = [tensors[ref.name + SCHEMES[scheme].suffix][1].tobytes() for ref in expert.codes]
        with open(f"{folder}.gguf", "rb") as file:
            file.seek(entry.scales_offset)
            assert file.read(entry.scale_bytes) == b"".join(stored)
    for path in (folder, f"{folder}.gguf"):
        assert describe_model(path).fp8_scales == WORDS[scheme.split("-")[0]]


@pytest.mark.parametrize("scheme", ["channel", "tensor", "channel-flat", "tensor-scalar", "block-compressed"])
@pytest.mark.parametrize("shape", [(2,), (1, 160), (96, 1), (160, 2), (0,), (1, 1, 1)])
def test_scales_of_another_shape(tmp_path, scheme, shape):
    tensors = scales.random_tensors(fx.FAMILIES[QWEN].config, scheme)
    name = GATE + "_scale"
    write(tmp_path, QWEN, scheme, tensors | {name: fx.pack(np.ones(shape, np.float32), "F32")})
    refused(tmp_path, name, str(list(shape)), "one scale per " + scheme.split("-")[0].replace("flat", "channel"))


def test_strategy_and_scales_must_agree(tmp_path):
    write(tmp_path, QWEN, "channel")
    edit(tmp_path / "config.json", quantization_config=compressed_tensors("tensor"))
    refused(tmp_path, "weight_scale", "one scale per tensor")


def test_groups_with_strategies_of_their_own(tmp_path):
    """Attention per tensor, experts per channel: what each scale's shape says counts."""
    config = fx.FAMILIES[QWEN].config
    tensors = scales.random_tensors(config, "channel")
    of_tensor = scales.random_tensors(config, "tensor")
    tensors |= {name: value for name, value in of_tensor.items() if ".self_attn." in name}
    how = compressed_tensors("channel")
    how["config_groups"]["group_1"] = compressed_tensors("tensor")["config_groups"]["group_0"]
    fx.write_checkpoint(tmp_path, family=QWEN, tensors=tensors, quantization_config=how)
    checkpoint = open_checkpoint(tmp_path)
    assert {expert.block[0] for expert in checkpoint.experts} == {1}
    assert {t.block == t.source.shape for t in checkpoint.dense if t.block} == {True}


def test_experts_with_scales_of_two_kinds(tmp_path):
    config = fx.FAMILIES[QWEN].config
    tensors = scales.random_tensors(config, "channel-flat")
    write(tmp_path, QWEN, "channel-flat", tensors | {GATE + "_scale": fx.pack(np.ones((1,), np.float32), "F32")})
    refused(tmp_path, GATE, "one type")


def test_two_scales_for_one_weight(tmp_path):
    tensors = scales.random_tensors(fx.FAMILIES[QWEN].config, "tensor-scalar")
    tensors[GATE + "_scale_inv"] = tensors[GATE + "_scale"]
    write(tmp_path, QWEN, "tensor-scalar", tensors)
    refused(tmp_path, GATE, "both")


@pytest.mark.parametrize("name", [GATE, O_PROJ])
def test_e8m0_nan(tmp_path, name):
    tensors = scales.random_tensors(fx.FAMILIES[QWEN].config, "channel-e8m0")
    tensors[name + "_scale"][1][3] = 255
    write(tmp_path / "m", QWEN, "channel-e8m0", tensors)
    with pytest.raises(CheckpointError, match="weight_scale"):
        convert(tmp_path / "m", tmp_path / "m.gguf")


def test_an_activation_scale_without_an_fp8_weight_has_no_place(tmp_path):
    """Only beside the weight it was made for is it known what is left out."""
    tensors = scales.random_tensors(fx.FAMILIES[QWEN].config, "tensor")
    stray = "model.layers.0.mlp.gate.input_scale"
    write(tmp_path, QWEN, "tensor", tensors | {stray: fx.pack(np.ones((1,), np.float32), "F32")})
    refused(tmp_path, stray, "no place")


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (compressed_tensors("channel") | {"format": "nvfp4-pack-quantized"}, "nvfp4"),
        (compressed_tensors("channel") | {"format": "int-quantized"}, "int-quantized"),
        (compressed_tensors("channel") | {"quantization_status": "frozen"}, "frozen"),
        (compressed_tensors("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed_tensors("channel") | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (compressed_tensors("channel", type="int"), "config_groups.group_0.weights.type"),
        (compressed_tensors("channel", num_bits=4), "num_bits"),
        (compressed_tensors("channel", symmetric=False), "symmetric"),
        (compressed_tensors("group", group_size=128), "group_size"),
        (compressed_tensors("token"), "strategy"),
        (compressed_tensors("channel", group_size=64), "group_size"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
    ],
)
def test_schemes_that_cannot_be_run(tmp_path, how, named):
    fx.write_checkpoint(tmp_path, quantization_config=how)
    refused(tmp_path, "quantization_config", named, "FP8", kind=UnsupportedModelError)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (compressed_tensors("channel") | {"config_groups": {}}, "config_groups"),
        (compressed_tensors("channel") | {"config_groups": None}, "config_groups"),
        (compressed_tensors("channel") | {"config_groups": {"a": []}}, "config_groups.a"),
        (compressed_tensors("channel") | {"config_groups": {"a": {"weights": None}}}, "config_groups.a.weights"),
        (compressed_tensors("block"), "block_structure"),
        (compressed_tensors("block", block_structure=[128, 0]), "block_structure"),
    ],
)
def test_nonsense_in_groups(tmp_path, how, named):
    fx.write_checkpoint(tmp_path, quantization_config=how)
    refused(tmp_path, "config.json", named)
