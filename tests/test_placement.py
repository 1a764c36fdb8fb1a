"""Llama with GPUs, which are simulated: what is chosen, and that it computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from hybrid_moe_ext import Llama, library_path
from hybrid_moe_ext.convert import convert
from hybrid_moe_ext.expert_size import expert_size
from hybrid_moe_ext.gpus import device_option, find_gpus
from hybrid_moe_ext.placement import FEWEST_TOKENS, _next
from hybrid_moe_ext.streamed import between
from placement_host import child_of

N_TOKENS = 80
AUTO, OFF, ON = -1, 0, 1  # llama_flash_attn_type


@pytest.fixture
def run(simgpu: Path, tmp_path: Path) -> Any:
    return child_of(simgpu, tmp_path)


@pytest.fixture
def see(run: Any) -> Any:
    """What the scenario printed."""

    def see(*arguments: Any, **more: Any) -> Any:
        done = run(*arguments, **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return see


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """By the CPU, from the same weights in F32."""
    llm = Llama(models.twin("F32"), **models.OPTIONS)
    assert llm.placement.devices == () and llm.placement.why == "this host has no GPU"
    return models.logits(llm, models.prompt(N_TOKENS))


# In F32 the same arithmetic but for the order of sums; flash attention rounds more (1e-6), FP8 becomes BF16 for the device.
@pytest.mark.parametrize(
    ("kind", "options", "tolerance"), [("F32", {"flash_attn": False}, 1e-9), ("F32", {}, 1e-5), ("directory", {}, 1e-4)]
)
def test_a_model_on_two_devices_computes_what_the_cpu_does(see, tmp_path, expected, kind, options, tolerance):
    model = models.fp8_directory() if kind == "directory" else models.twin(kind)
    arguments = {
        "model": model,
        "out": tmp_path / "logits.npy",
        "n_tokens": N_TOKENS,
        "n_times": 4,
        "dense_type": "f32",
    }
    # Slow links: with two of them each gets its share of the experts.
    slow = {"SIMGPU_PAGEABLE_GBPS": 0.02, "SIMGPU_PINNED_GBPS": 0.02}
    seen = see("logits", settings=slow, slp="on", cpu_help="off", **arguments, **options)
    assert models.nmse(np.load(tmp_path / "logits.npy"), expected) <= tolerance
    did = seen["streamed"]
    assert did["layers"] == 4 * 2 and did["layers_on_cpu"] == 0 and did["cpu_experts"] == 0 and did["troubles"] == []
    assert {share["name"] for share in did["devices"]} == {"SimGPU0", "SimGPU1"}
    # Seen from the host, which may be busy: a device may get few experts, and a copy may look shorter than it was.
    assert sum(share["experts"] for share in did["devices"]) >= 4 * 2
    assert all(share["failures"] == 0 for share in did["devices"])
    assert any(0 < share["gbps"] <= 0.03 for share in did["devices"])
    assert all(0 <= share["hidden"] <= 1 for share in did["devices"])
    assert "streamed to SimGPU" in seen["words"] and "8 of 8 layers" in seen["words"]
    chosen = seen["placement"]
    assert chosen["devices"] == ["SimGPU0", "SimGPU1"] and chosen["n_gpu_layers"] == -1
    assert (seen["flash"], chosen["flash_attention"]) == ((OFF, "off") if options else (AUTO, "auto"))
    # Before anything was streamed, the devices had the model but for its experts and the token embeddings.
    size = expert_size(str(model), None if kind == "F32" else open_directory(model), "f32")
    assert size is not None
    assert min(seen["used"]) > 0 and sum(seen["used"]) > 0.5 * size.dense_bytes


def open_directory(path: Path) -> Any:
    from hybrid_moe_ext.checkpoint import open_checkpoint

    return open_checkpoint(path)


def test_one_device_of_two(see, tmp_path, expected):
    """The other one gets nothing, neither experts nor layers. Two passes."""
    out = tmp_path / "logits.npy"
    seen = see(
        "logits",
        model=models.twin("F32"),
        out=out,
        n_tokens=N_TOKENS,
        slp="on",
        cpu_help="off",
        devices=["SimGPU1"],
        n_ubatch=40,
        flash_attn=False,
    )
    assert models.nmse(np.load(out), expected) <= 1e-9
    assert seen["placement"]["devices"] == ["SimGPU1"] and seen["used"][0] == 0 < seen["used"][1]
    assert [share["name"] for share in seen["streamed"]["devices"]] == ["SimGPU1"]
    assert seen["streamed"]["layers"] == 2 * 2  # two passes


def test_layers_on_one_device_of_two(see, tmp_path, expected):
    """Experts are streamed to both."""
    out = tmp_path / "logits.npy"
    given = {"slp": "on", "cpu_help": "off", "layer_devices": ["SimGPU1"], "flash_attn": False}
    seen = see("logits", model=models.twin("F32"), out=out, n_tokens=N_TOKENS, **given)
    assert models.nmse(np.load(out), expected) <= 1e-9
    assert seen["placement"]["devices"] == ["SimGPU0", "SimGPU1"] and seen["placement"]["layer_devices"] == ["SimGPU1"]
    assert "stream experts to SimGPU0, SimGPU1; all layers without their experts on SimGPU1" in seen["text"]
    assert seen["used"][0] == 0 < seen["used"][1]
    assert {d["name"] for d in seen["streamed"]["devices"]} == {"SimGPU0", "SimGPU1"}


def test_the_largest_pass_is_that_of_the_context(see):
    seen = see("choose", model=models.twin("F32"), n_ctx=2048, slp="on")
    assert seen["n_batch"] == [2048, 2048] and seen["n_ubatch"] == 2048 == seen["placement"]["n_ubatch"]
    # One row of logits on the device and in host memory, whatever the batch.
    assert seen["n_outputs_max"] == 1 and seen["scores"][0] == 512
    assert seen["report"]["troubles"] == [] and len(seen["text_tokens"]) == 3
    assert "up to 2048 tokens per pass" in seen["text"] and "slp=on" in seen["text"]


def test_logits_of_all_tokens_are_kept_to_smaller_passes(see):
    seen = see("choose", model=models.twin("F32"), n_ctx=4096, logits_all=True)
    assert seen["n_ubatch"] == 2048 and seen["n_outputs_max"] == 0 and seen["scores"][0] == 4096


def test_n_ctx_of_the_model(see):
    seen = see("choose", model=models.twin("F32"), n_ctx=0)
    assert seen["n_ubatch"] == 512 and seen["n_batch"] == [512, 512]


def test_less_memory_means_smaller_passes(see):
    """What is chosen then works: a prompt of that length is streamed without a complaint."""
    sizes = []
    for mib in (100, 50, 25):
        seen = see(
            "choose", n_devices=1, settings={"SIMGPU_MEMORY_MIB": mib}, model=models.twin("F32"), n_ctx=8192, slp="on"
        )
        assert seen["placement"]["n_gpu_layers"] == -1 and "leave no room" in seen["text"]
        assert seen["report"]["troubles"] == [] and seen["report"]["layers"] > 0
        sizes.append(seen["n_ubatch"])
    assert 8192 > sizes[0] > sizes[1] > sizes[2] >= FEWEST_TOKENS


@pytest.mark.parametrize("mib", [10, 0.2])
@pytest.mark.parametrize("kind", ["F32", "directory"])
def test_too_little_memory_for_layers_leaves_them_on_the_cpu(see, kind, mib):
    """Nor for experts in the end, which is told and costs nothing but speed."""
    model = models.fp8_directory() if kind == "directory" else models.twin(kind)
    seen = see("choose", n_devices=1, settings={"SIMGPU_MEMORY_MIB": mib}, model=model, n_ctx=8192, slp="on")
    assert seen["placement"]["n_gpu_layers"] == 0 and "no room for llama.cpp's buffers on SimGPU0" in seen["text"]
    assert len(seen["text_tokens"]) == 3
    if mib == 10:
        assert seen["report"]["layers"] > 0 and seen["report"]["troubles"] == []
    else:
        assert seen["report"]["layers"] == 0 and "SimGPU0" in seen["report"]["troubles"][0]
        assert "hardly room for experts" in seen["text"] and seen["n_ubatch"] == FEWEST_TOKENS


def test_too_little_memory_for_what_was_asked_for_is_an_error(see):
    settings = {"SIMGPU_MEMORY_MIB": 10}
    cases = [{"n_ctx": 8192, "n_gpu_layers": -1}, {"n_ctx": 8192, "n_gpu_layers": 2, "n_ubatch": 2048}]
    seen = see("refused", n_devices=1, settings=settings, model=models.twin("F32"), cases=cases)
    for kind, message in seen["errors"]:
        assert kind == "OptionError" and "SimGPU0" in message and "smaller n_ctx" in message
    assert len(seen["errors"]) == 2


def test_what_is_given_is_kept(see):
    given = {"n_gpu_layers": 1, "n_batch": 96, "n_ubatch": 48, "flash_attn": True}
    seen = see("choose", model=models.twin("F32"), slp="on", **given)
    assert seen["n_batch"] == [96, 96] and seen["n_ubatch"] == 48 and seen["flash"] == ON
    chosen = seen["placement"]
    assert (chosen["n_gpu_layers"], chosen["n_batch"], chosen["n_ubatch"], chosen["flash_attention"]) == (
        1,
        96,
        48,
        "on",
    )
    assert "as given: n_gpu_layers, n_batch, n_ubatch, flash_attn" in seen["text"]
    seen = see("choose", model=models.twin("F32"), flash_attn=False, n_ctx=2048, n_ubatch=1024)
    assert seen["flash"] == OFF and seen["n_ubatch"] == 1024 and seen["n_batch"] == [1024, 1024]
    seen = see("choose", model=models.twin("F32"), n_ctx=2048, n_batch=1536)
    assert seen["n_ubatch"] == 1536 and seen["n_batch"] == [1536, 1536]
    assert see("choose", model=models.twin("F32"), n_ctx=2048, n_ubatch=64)["n_batch"] == [512, 512]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"slp": "off"}, "slp=off"),
        ({"devices": []}, "devices=none"),
        ({"devices": "none"}, "devices=none"),
    ],
)
def test_nothing_streams(see, options, why):
    """Then everything is as llama-cpp-python has it."""
    seen = see("choose", model=models.twin("F32"), **options)
    assert seen["placement"] == {
        "devices": [], "n_gpu_layers": 0, "n_batch": 512, "n_ubatch": 512, "flash_attention": "off", "why": why,
        "layer_devices": [],
    }  # fmt: skip
    assert seen["n_outputs_max"] == 0 and seen["flash"] == OFF and seen["report"]["layers"] == 0


def test_without_a_gpu_nothing_changes(see):
    seen = see("choose", n_devices=0, model=models.twin("F32"), n_ctx=2048, slp="on")
    assert seen["placement"]["devices"] == [] and seen["placement"]["why"] == "this host has no GPU"
    assert seen["n_ubatch"] == 512 and seen["n_batch"] == [512, 512] and seen["flash"] == OFF
    assert seen["n_outputs_max"] == 0 and seen["report"]["layers"] == 0


def test_wrong_devices_are_refused_before_they_are_the_process_s(see):
    cases = [
        {"devices": ["CUDA0"]},
        {"devices": "SimGPU0,SimGPU7"},
        {"devices": ["SimGPU0", "none"]},
        {"devices": ""},
        {"devices": ["SimGPU0", 1]},
        {"devices": 0},
        {"devices": ["SimGPU0,SimGPU1"]},
        {"slp": "maybe"},
    ]
    seen = see("refused", model=models.twin("F32"), cases=cases)
    assert [kind for kind, _ in seen["errors"]] == ["OptionError"] * len(cases)
    messages = [message for _, message in seen["errors"]]
    assert "no GPU device 'CUDA0'; there are: SimGPU0, SimGPU1" in messages[0] and "'SimGPU7'" in messages[1]
    assert all("devices=" in message for message in messages[:-1])
    assert seen["after"]["placement"]["devices"] == ["SimGPU0", "SimGPU1"]


def test_a_device_on_a_host_without_any(see):
    seen = see("refused", n_devices=0, model=models.twin("F32"), cases=[{"devices": ["SimGPU0"]}])
    assert "this host has none" in seen["errors"][0][1]


def test_options_of_streaming_hold_for_the_process(see):
    first = {"slp": "on", "devices": ["SimGPU1"]}
    others = [{"slp": "off"}, {"devices": ["SimGPU0"]}, {"devices": []}, first, {"devices": "SimGPU1"}, {}]
    seen = see("twice", model=models.twin("F32"), first=first, others=others)
    for refused in seen[:3]:
        assert refused[0] == "OptionError" and "comes too late" in refused[1]
    for chosen in seen[3:]:
        assert chosen["devices"] == ["SimGPU1"] and "slp=on" in chosen["why"]


def test_pickling_keeps_what_was_given(see):
    seen = see("state", model=models.twin("F32"), n_ctx=1024, devices=["SimGPU1"], n_ubatch=640)
    assert "n_ubatch" in seen["kept"] and "devices" in seen["kept"]
    assert not {"n_batch", "n_gpu_layers", "flash_attn"} & set(seen["kept"])
    assert seen["before"] == seen["after"] and seen["after"]["n_ubatch"] == 640


def test_embeddings(see):
    on_gpus = see("embedding", model=models.fp8_directory(), n_ctx=128, dense_type="f32")
    without = see("embedding", model=models.fp8_directory(), n_ctx=128, dense_type="f32", n_devices=0)
    a, b = (np.array(seen["embedding"]) for seen in (on_gpus, without))
    assert on_gpus["placement"]["devices"] and not without["placement"]["devices"]
    assert on_gpus["n_ubatch"] == without["n_ubatch"] == 128
    assert models.nmse(a, b) <= 1e-5  # flash attention's roundings


def test_a_stock_host_streams_by_variables(see, run, tmp_path, expected):
    """An FP8 GGUF: no GPU takes its experts, so they come here without an override."""
    model, out = tmp_path / "fp8.gguf", tmp_path / "logits.npy"
    convert(models.fp8_directory(), model, "f32")
    variables = {"HYBRID_MOE_SLP": "on", "HYBRID_MOE_DEVICES": "SimGPU1", "HYBRID_MOE_CPU_HELP": "off"}
    arguments = {"model": model, "out": out, "n_tokens": N_TOKENS, "plugin": library_path()}
    report = see("stock", settings=variables, **arguments)["report"]
    assert models.nmse(np.load(out), expected) <= 1e-4
    assert report["layers"] == 2 and report["layers_on_cpu"] == 0 and report["troubles"] == []
    assert [device["name"] for device in report["devices"]] == ["SimGPU1"] and report["devices"][0]["experts"] > 0
    # What a Python host would be told by an exception is in the log.
    report = see("stock", settings=variables | {"HYBRID_MOE_DEVICES": "SimGPU1,CUDA3"}, **arguments)["report"]
    assert any("'CUDA3'" in trouble and "SimGPU0, SimGPU1" in trouble for trouble in report["troubles"])
    done = run("stock", settings=variables | {"HYBRID_MOE_SLP": "yes"}, **arguments)
    assert done.returncode != 0 and "HYBRID_MOE_SLP=yes" in done.stderr and "auto, on or off" in done.stderr


# --- by itself


def test_names_of_devices():
    assert device_option(["CUDA0", "CUDA1"]) == "CUDA0,CUDA1" and device_option(("CUDA0",)) == "CUDA0"
    assert device_option([]) == "none" and device_option("auto") == "auto" and device_option(None) is None
    assert all(gpu.name and gpu.handle for gpu in find_gpus())


def search(fits: int, most: int) -> tuple[int, int]:
    """(the largest that was found to fit, attempts)"""
    good, bad, n, attempts = 0, 0, most, 0
    while n:
        attempts += 1
        if n <= fits:
            good = n
        else:
            bad = n
            if n <= FEWEST_TOKENS:
                break
        n = _next(good, bad)
    return good, attempts


@pytest.mark.parametrize("most", [16384, 10000, 4096, 600])
def test_the_search_ends_near_what_fits(most):
    for fits in range(FEWEST_TOKENS, most + 1, 61):
        good, attempts = search(fits, most)
        assert good <= fits and attempts <= 9
        assert good >= min(most, fits) - max(FEWEST_TOKENS, 0.13 * 2 * fits), (fits, good)


def test_what_happened_between_two_reports():
    device = {"name": "CUDA0", "experts": 10, "expert_bytes": 1000, "upload_ns": 100, "starved_ns": 50, "failures": 0}
    later = device | {
        "experts": 106,
        "expert_bytes": 51_000_001_000,
        "upload_ns": 10**9 + 100,
        "starved_ns": 50 + 7 * 10**7,
    }
    before = {"layers": 2, "layers_on_cpu": 1, "cpu_experts": 5, "plan": "", "troubles": [], "devices": [device]}
    new = {"name": "CUDA1", "experts": 0, "expert_bytes": 0, "upload_ns": 0, "starved_ns": 0, "failures": 0}
    after = before | {"layers": 60, "cpu_experts": 9, "plan": "p", "troubles": ["t"], "devices": [later, new]}
    did = between(before, after)
    assert str(did) == (
        "streamed to CUDA0 (51 GB/s, 93 % of copy time hidden), 58 of 58 layers; the CPU computed 4 % of the experts"
    )
    assert did.cpu_share == 0.04 and did.troubles == ("t",)
    assert str(between(after, after)) == "on the CPU (too few tokens to stream)"
    assert str(between(before, before | {"layers_on_cpu": 9, "plan": "predicted"})) == "on the CPU (predicted)"
