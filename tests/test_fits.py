"""What fits: llama.cpp's accounting of header-only shapes and tiny models, on assumed and on simulated GPUs; the search, the
costs, and the split modes that each family allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import tiny_families
from conftest import DEMO
from hybrid_moe_ext import CheckpointError, OptionError, UnsupportedModelError, fits, library_path
from hybrid_moe_ext.cli import run
from hybrid_moe_ext.fits import SHAPES, Row
from hybrid_moe_ext.fits.accounting import Accounting
from hybrid_moe_ext.fits.header import write_header
from hybrid_moe_ext.fits.search import SLOTS
from hybrid_moe_ext.fits.source import open_source
from hybrid_moe_ext.fits.tensors import tensors_of

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def two_gpus(simgpu, monkeypatch):
    """Two simulated GPUs of 32 GiB in every accounting process."""
    monkeypatch.setenv("GGML_BACKEND_PATH", str(simgpu))
    for name, value in {"MODE": "timing", "DEVICES": 2, "MEMORY_MIB": 32 * 1024}.items():
        monkeypatch.setenv(f"SIMGPU_{name}", str(value))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.delenv("GGML_BACKEND_PATH", raising=False)
    monkeypatch.setenv("LLAMA_TOKEN_TILE", "0")  # the stock graph, also where this machine has a patched build
    monkeypatch.setenv("LLAMA_MLA_DECOMPRESS", "0")


# --- shapes

PUBLIC_BILLIONS = {  # model cards' totals; GLM's includes a layer for multi-token prediction, which is not run
    "deepseek-v3": (671, 0.002), "kimi-k2": (1040, 0.02), "qwen3-235b": (235, 0.002), "qwen3-30b": (30.5, 0.002),
    "glm-4.6": (355, 0.01), "minimax-m2": (230, 0.01), "gpt-oss-120b": (117, 0.002),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_add_up_to_the_public_total(name):
    total, tolerance = PUBLIC_BILLIONS[name]
    shape = SHAPES[name]
    n = sum(t.n_elements for t in tensors_of(shape, shape.expert_type, "bf16"))
    assert n / 1e9 == pytest.approx(total, rel=tolerance)


def test_header_takes_no_disk_and_is_what_llama_cpp_expects(tmp_path):
    """Every shape loads: llama.cpp finds the tensors it wants, with the sizes it wants, and none besides."""
    with Accounting("shapes", [GIB]) as accounting:
        for name, shape in SHAPES.items():
            path = tmp_path / f"{name}.gguf"
            tensors = tensors_of(shape, shape.expert_type, "bf16")
            write_header(path, shape, tensors)
            assert path.stat().st_blocks * 512 < MIB < path.stat().st_size
            loaded = accounting.load("gguf", str(path), "bf16", "none", accounting.gpus)
            assert loaded["n_ctx_train"] == shape.n_ctx_train
            account = accounting.measure(512, 4096, "f16")
            experts = sum(t.n_bytes for t in tensors if "_exps." in t.name)
            on_gpu = sum(t.n_bytes for t in tensors if "_exps." not in t.name and t.name != "token_embd.weight")
            assert account.experts == pytest.approx(experts, rel=1e-4), name  # padded to the alignment
            assert account.devices["GPU0"].model == pytest.approx(on_gpu, rel=1e-4), name


# --- accounting


def uses(row: Row) -> list[tuple[int, ...]]:
    return [(d.weights, d.kv_cache, d.compute, d.stream, d.ring, d.slots) for d in row.devices]


@pytest.mark.parametrize(
    ("model", "mode"), [("qwen3-30b", "layer"), ("deepseek-v3", "layer"), ("gpt-oss-120b", "none")]
)
def test_assumed_gpus_account_as_real_ones(two_gpus, model, mode):
    """To the byte, at every n_ubatch: the same graphs, placed the same way."""
    options = {"context": 16384, "split_mode": mode, "dense_type": "q8_0", "fp8_link": "codes"}
    real, assumed = fits(model, **options), fits(model, vram=[32, 32], **options)
    assert [g.backend for g in real.gpus] == ["SimGPU"] * 2 and [g.backend for g in assumed.gpus] == ["assumed"] * 2
    assert [(r.n_ubatch, uses(r)) for r in real.rows] == [(r.n_ubatch, uses(r)) for r in assumed.rows]
    assert real.best is not None and len(real.rows) > 4
    assert any("assumed" in note for note in assumed.notes) and not real.notes


def family_runs(simgpu: Path, path: Path, *modes: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    child = Path(__file__).parent / "split_modes.py"
    done = subprocess.run(
        [sys.executable, str(child), str(simgpu), str(path), *modes],
        env=environment | {"SIMGPU_DEVICES": "2"}, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FAMILIES = {  # whether llama.cpp splits single tensors of that architecture
    "deepseek-v3": False, "qwen3-30b": True, "glm-4.6": True, "minimax-m2": False, "gpt-oss-120b": True,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_split_modes_of_a_family_and_what_they_take(simgpu, two_gpus, tmp_path, name):
    """Attention on two GPUs, experts on our device: right logits, and device memory to the byte as accounted."""
    path = tiny_families.write_model(tmp_path / f"{name}.gguf", tiny_families.tiny(name))
    seen = family_runs(simgpu, path, "none", "layer", "row", "tensor")
    with Accounting(str(path)) as accounting:
        for mode in ("none", "layer"):
            accounting.load("gguf", str(path), "f32", mode, accounting.gpus)
            account = accounting.measure(256, 256, "f32")
            assert [use.total for use in account.devices.values()] == seen[mode]["used"], mode
            assert seen[mode]["nmse"] <= 1e-12 and seen[mode]["n_matmuls"] > 0, mode
    assert seen["none"]["n_ops"][1] == 0 and min(seen["layer"]["n_ops"]) > 0
    assert "does not support split buffers" in seen["row"]["refused"]  # up to the back end: CUDA has them
    if not FAMILIES[name]:
        assert "not implemented for architecture" in seen["tensor"]["refused"]
        return
    # Its logits are not judged: the sums reuse a buffer that the other GPU may still read (docs/fits.md).
    assert min(seen["tensor"]["n_ops"]) > 0 and seen["tensor"]["n_matmuls"] > 0
    answer = fits(path, reserve_mib=0)
    assert answer.split_modes["tensor"] == "" and answer.tensor_s is not None


def test_deepseek_v3_compute_buffers():
    """Flash attention, 32K context: what they are on the GPU, and that they grow with n_ubatch alone."""
    with open_source("deepseek-v3", None, "bf16") as source, Accounting(source.name, [32 * GIB]) as accounting:
        accounting.load(source.kind, source.path, "bf16", "none", accounting.gpus)
        gib = {n: accounting.measure(n, 32768, "f16").devices["GPU0"].compute / GIB for n in (8192, 16384, 32768)}
    # By hand, per token: absorbed queries twice (128 heads x 512, then x 576 with the rotated part) and attention's result
    # (128 x 512) in F32 are alive together, 0.78 MiB; the rest is small.
    by_hand = 4 * 128 * (512 + 576 + 512) / GIB
    for n, measured in gib.items():
        assert by_hand * n < measured < 1.05 * by_hand * n
    assert gib[8192] == pytest.approx(6.41, abs=0.01) and gib[32768] == pytest.approx(4 * gib[8192], rel=1e-3)


# --- costs


def brute_force_pairs(n: int, window: int) -> int:
    return sum(min(i + 1, window or n) for i in range(n))


DENSE = {  # layers x (projections of attention, router, shared expert), and DeepSeek's three dense layers
    "deepseek-v3": 61 * (7168 * (1536 + 576 + 128 * 128) + 1536 * 128 * 192 + 128 * (128 + 128) * 512)
    + 58 * 7168 * (256 + 3 * 2048)
    + 3 * 3 * 7168 * 18432,
    "qwen3-235b": 94 * 4096 * ((64 + 4 + 4 + 64) * 128 + 128),
    "gpt-oss-120b": 36 * 2880 * ((64 + 8 + 8 + 64) * 64 + 128),
}


@pytest.mark.parametrize("name", DENSE)
def test_cost_of_a_prompt(name):
    n, shape = 1000, SHAPES[name]
    answer = fits(name, vram=[80], context=4096, prompt=n)
    length = 512 + 64 + 512 if shape.mla else 2 * shape.head_dim
    windows = [shape.window if i % 2 == 0 else 0 for i in range(shape.n_layer)]
    pairs = sum(brute_force_pairs(n, w) for w in windows)
    assert answer.cost.attention == 2 * shape.n_head * length * pairs
    experts = 3 * shape.n_embd * shape.n_ff_expert * shape.n_used * shape.n_layer_moe
    assert answer.cost.experts == 2 * experts * n
    assert answer.cost.projections == 2 * DENSE[name] * n
    assert not answer.cost.note


# --- answers


def test_deepseek_v3_on_one_gpu_of_32_gib():
    """The arithmetic that decides the design: 654 GB of experts, 12.8 s over PCIe 5.0 x16, 8192 tokens per pass."""
    answer = fits("deepseek-v3", vram=[32], links=[51], context=32768, dense_type="q8_0")
    assert answer.link_bytes / 1e9 == pytest.approx(654, abs=1) and answer.pass_s == pytest.approx(12.8, abs=0.05)
    row = next(r for r in answer.rows if r.n_ubatch == 8192)
    assert row.fits and row.ceiling_tps == pytest.approx(640, abs=5)
    assert answer.best is not None and 8192 < answer.best.n_ubatch < 16384
    assert answer.cost.attention == pytest.approx(9.1e15, rel=0.01)
    assert answer.ttft_s >= answer.ttft_link_s == answer.n_passes * answer.pass_s
    bf16 = fits("deepseek-v3", vram=[32], context=32768)
    assert bf16.best is bf16.fastest is None and bf16.ttft_s == 0 and bf16.limited_by.startswith("KV cache")


@pytest.mark.parametrize(("model", "n_gpus"), [("DeepSeek-V3", 2), ("GLM-4.6", 1)])
def test_the_documents_table_is_what_is_answered(model, n_gpus):
    text = (Path(__file__).parent.parent / "docs" / "fits.md").read_text()
    n_above = n_gpus - 1  # a model's name is in its first row only
    row = text[text.index(f"| {model} | 1 |") :].splitlines()[n_above].split(" | ", 2)[2]
    a = fits(model.lower(), vram=[32] * n_gpus, dense_type="q8_0", tflops=200)
    by = next(words for words in ("compute buffers", "the ring", "the context") if a.limited_by.startswith(words))
    said = f"{a.pass_s:.1f} s | {a.best.n_ubatch} | {by} | {a.best.ceiling_tps:.0f} | {a.ttft_s:.1f} s |"
    assert said in row, f"docs/fits.md has {row!r}"


def test_fp8_expanded_before_the_link_doubles_the_pass():
    codes, bf16 = (fits("qwen3-30b", vram=[24], fp8_link=way) for way in ("codes", "bf16"))
    assert bf16.link_bytes == 2 * 28991029248 and codes.link_bytes == pytest.approx(28991029248, rel=3e-4)
    assert bf16.slot_bytes == pytest.approx(2 * codes.slot_bytes, rel=3e-4)
    assert fits("qwen3-30b", vram=[24], expert_type="Q8_0").fp8_link is None


def test_unequal_gpus():
    """Links add up; every GPU keeps its two slots; layers go where the memory is."""
    answer = fits("qwen3-235b", vram=[32, 16], links=[50, 25], dense_type="q8_0")
    assert answer.pass_s == pytest.approx(answer.link_bytes / 75e9) and answer.split_mode == "layer"
    assert answer.best is not None and all(d.slots >= SLOTS for d in answer.best.devices)
    large, small = answer.best.devices
    assert large.weights > 1.5 * small.weights
    assert set(answer.split_modes) == {"none", "layer", "tensor"} and not any(answer.split_modes.values())
    assert answer.tensor_s is not None and answer.tensor_s < answer.serial_s
    deepseek = fits("deepseek-v3", vram=[32, 32], dense_type="q8_0", split_mode="none")
    assert (
        "not implemented for architecture 'deepseek2'" in deepseek.split_modes["tensor"] and deepseek.tensor_s is None
    )
    assert deepseek.best is not None and deepseek.best.devices[1].weights == 0


def test_files_and_directories_and_shapes_agree(tmp_path):
    """The demo model, FP8: as a directory, as its GGUF, and as several files."""
    out = tmp_path / "demo.gguf"
    assert run(["convert", str(DEMO), str(out)]) == 0
    assert run(["convert", str(DEMO), str(out), "--split-max-size", "4M"]) == 0
    first = next(tmp_path.glob("demo-00001-of-*.gguf"))
    directory, file, split = (fits(model, vram=[1], reserve_mib=0) for model in (DEMO, out, first))
    assert replace(split, model="") == replace(file, model="")
    assert directory.expert_types == file.expert_types == ("FP8",)
    assert (directory.link_bytes, directory.slot_bytes) == (file.link_bytes, file.slot_bytes)
    assert directory.cost == file.cost and [uses(r) for r in directory.rows] == [uses(r) for r in file.rows]
    assert directory.n_ctx == directory.n_ctx_train == 1024


def test_types_without_a_kernel_of_ours_stream(tmp_path):
    shape = replace(SHAPES["qwen3-30b"], n_layer=2)
    tensors = tensors_of(shape, "BF16", "bf16")
    others = [replace(t, type=gguf.GGMLQuantizationType.Q3_K) if "_exps." in t.name else t for t in tensors]
    answers = []
    for name, chosen in {"ours": tensors, "others": others}.items():
        write_header(tmp_path / f"{name}.gguf", shape, chosen)
        answers.append(fits(tmp_path / f"{name}.gguf", vram=[8], context=4096))
    ours, theirs = answers
    assert ours.best and theirs.best and theirs.best.devices[0].compute > ours.best.devices[0].compute
    assert theirs.expert_types == ("Q3_K",) and any("no kernel of ours" in note for note in theirs.notes)
    assert theirs.link_bytes == ours.link_bytes * 110 / 512


# --- wrong input


def write_gguf(path: Path, architecture: str = "qwen3moe", tensors: tuple[str, ...] = ("token_embd.weight",)) -> Path:
    w = gguf.GGUFWriter(path, architecture)
    w.add_block_count(1)
    for name in tensors:
        w.add_tensor(name, np.zeros((2, 32, 32), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vram": [0]}, "vram 0 is not possible"),
        ({"vram": [float("nan")]}, "vram nan"),
        ({"vram": [1] * 17}, "up to 16 GPUs"),
        ({"links": [-1]}, "link -1 is not possible"),
        ({"links": [1, 2, 3]}, "link is given 3 times for 1 GPUs"),
        ({"context": 0}, "context 0"),
        ({"context": 10**7}, "context 10000000 is more than the 262144 tokens"),
        ({"context": 1024, "prompt": 1025}, "prompt 1025 does not fit"),
        ({"tflops": 0}, "tflops 0"),
        ({"reserve_mib": -1}, "reserve -1"),
        ({"kv_type": "q2"}, "kv_type='q2'"),
        ({"fp8_link": "x"}, "fp8_link='x'"),
        ({"split_mode": "row"}, "split_mode='row'"),
        ({"expert_type": "Q3_X"}, "--type Q3_X"),
        ({"dense_type": "q3"}, "--dense-type q3"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(OptionError, match=words.replace("[", r"\[")):
        fits("qwen3-30b", **({"vram": [8]} | options))


def test_wrong_models_are_refused(tmp_path):
    for name, words in {"deepseek-v4": "did you mean deepseek-v3", "llama": "known shape"}.items():
        with pytest.raises(OptionError, match=words):
            fits(name, vram=[8])
    with pytest.raises(OptionError, match="blocks have 256 weights"):
        fits("gpt-oss-120b", vram=[8], expert_type="Q4_K")
    with pytest.raises(OptionError, match="this machine has no GPU"):
        fits("qwen3-30b")
    with pytest.raises(CheckpointError, match="does not exist"):
        fits(tmp_path / "none.gguf", vram=[8])
    with pytest.raises(OptionError, match="has its own types"):
        fits(DEMO, vram=[8], expert_type="FP8")
    with pytest.raises(OptionError, match="a GGUF has its own types"):
        fits(write_gguf(tmp_path / "dense.gguf"), vram=[8], dense_type="q8_0")
    with pytest.raises(UnsupportedModelError, match="no expert tensors"):
        fits(write_gguf(tmp_path / "dense.gguf"), vram=[8])


def test_damaged_models_are_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        fits(tmp_path / "text.gguf", vram=[8])
    whole = tiny_families.write_model(tmp_path / "whole.gguf", tiny_families.tiny("qwen3-30b"))
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        fits(tmp_path / "cut.gguf", vram=[8])
    (tmp_path / "short.gguf").write_bytes(whole.read_bytes()[:-100000])
    with pytest.raises(CheckpointError, match="not within the file bounds"):
        fits(tmp_path / "short.gguf", vram=[8])
    odd = write_gguf(tmp_path / "odd.gguf", tensors=("token_embd.weight", "blk.0.ffn_up_exps.weight"))
    with pytest.raises(CheckpointError, match=r"cannot load this model: .*key not found"):
        fits(odd, vram=[8])
    tiny = tiny_families.tiny("deepseek-v3")
    assert tiny.mla is not None
    no_keys = replace(tiny, mla=replace(tiny.mla, nope=0))
    write_header(tmp_path / "assert.gguf", no_keys, tensors_of(tiny, "F32", "f32"))
    with pytest.raises(CheckpointError, match=r"llama.cpp stops on this model .*GGML_ASSERT"):
        fits(tmp_path / "assert.gguf", vram=[8])
    unknown = write_gguf(tmp_path / "unknown.gguf", "no-such-thing", ("blk.0.ffn_up_exps.weight",))
    with pytest.raises(CheckpointError, match="unknown model architecture"):
        fits(unknown, vram=[8])


def test_a_back_end_that_does_not_load_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("GGML_BACKEND_PATH", str(tmp_path / "none.so"))
    assert run(["fits", "qwen3-30b"]) == 2


# --- command line


def test_command(capsys):
    assert run(["fits", "qwen3-30b", "--vram", "24", "--link", "25", "-c", "4096", "--prompt", "4000"]) == 0
    out = capsys.readouterr().out
    for words in ("n_ubatch:", "limited by:", "TTFT:", "4000 tokens", "25 GB/s", "one pass:", "attention:"):
        assert words in out
    assert (
        run(["fits", "qwen3-235b", "--vram", "24", "--vram", "24", "-c", "8192", "--dense-type", "q8_0", "--json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"][0]["devices"]) == 2 and answer["best"]["fits"] and answer["n_ctx"] == 8192
    assert run(["fits", "qwen3-235b", "--vram", "2"]) == 0  # nothing fits: that is an answer
    assert "missing:" in capsys.readouterr().out
    assert run(["fits", "qwen3-30b", "--vram", "0"]) == 2
    assert run(["fits", "qwen3-30b", "--vram", "x"]) == 2


def test_info_has_a_section_where_there_is_a_gpu(two_gpus, capsys, monkeypatch):
    assert run(["info", str(DEMO)]) == 0
    assert "streaming:    SimGPU0 with 32.0 GiB free, SimGPU1" in capsys.readouterr().out
    assert run(["info", str(DEMO), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]["best"]["n_ubatch"] == 1024
    monkeypatch.setenv("GGML_BACKEND_PATH", str(library_path()))  # as `host-env` has it: a back end, but no GPU
    assert run(["info", str(DEMO)]) == 0
    monkeypatch.delenv("GGML_BACKEND_PATH")
    assert run(["info", str(DEMO)]) == 0
    assert "streaming:" not in capsys.readouterr().out
