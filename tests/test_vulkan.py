"""Two real GPU devices: attention on lavapipe's Vulkan0 and Vulkan1, experts on our CPU path or streamed to the same devices;
logits against runs without any GPU.

Slow where nothing is cached, because lavapipe compiles every shader for the CPU: one process serves all models of a path."""

from __future__ import annotations

from functools import cache

import pytest

import vulkan_host
from models import nmse
from vulkan_host import EXPERTS_CPU, EXPERTS_OURS, Ran, Run
from vulkan_models import KINDS, N_EXPERT_LAYERS, exact_twin, model

ONE, TWO = ("Vulkan0",), ("Vulkan0", "Vulkan1")
SHARES = (1, 3)  # of the layers: also of gpt-oss's two layers and output, each device gets a layer
MODELS = [(arch, kind) for arch, kinds in KINDS.items() for kind in kinds]
EXACT_GPU = {"GGML_VK_DISABLE_F16": "1"}  # shaders in F32: what is left of a difference is not the GPU's half precision
OFF = {"HYBRID_MOE_SLP": "off"} if vulkan_host.STREAMS else {}

# Where experts run -> environment. The models, the attention and the checks are the same on every path.
PATHS = {
    "cpu": OFF,
    "one": {"HYBRID_MOE_SLP": "on", "HYBRID_MOE_DEVICES": "Vulkan0", "HYBRID_MOE_CPU_HELP": "off"},
    "two": {"HYBRID_MOE_SLP": "on", "HYBRID_MOE_DEVICES": "Vulkan0,Vulkan1", "HYBRID_MOE_CPU_HELP": "off"},
}
EXPERTS_ON = {"cpu": (), "one": ONE, "two": TWO}

# NMSE of logits, GPU attention against CPU attention with experts of the same path, and what it was when measured (ggml 0.25.1,
# Mesa 22.3, AVX2): DeepSeek 5e-10, Qwen3-MoE 3e-7 (ggml-vulkan makes F16 of a KV cache of several heads for its products),
# gpt-oss 2e-13. Q8_0 9e-10, 6e-7, 2e-13. Where our CPU kernels round activations to int8, a tiny difference flips some of these
# roundings: Q4_K 4e-5 and 4e-4, MXFP4 2e-5 and 1e-4. Weights of the wrong expert, or none, give 1e-1 and more.
ATTENTION_LIMIT = {"F32": 2e-6, "FP8": 2e-6, "Q8_0": 5e-6, "Q4_K": 2e-3, "MXFP4": 5e-4}

# NMSE of logits with experts on a GPU against the exact values of everything on the CPU. Measured with one device and shaders
# in F32: DeepSeek 5e-10, Qwen3-MoE 4e-7, gpt-oss 3e-13, whatever the type, but for FP8, whose products a GPU without our kernel
# makes in BF16: 3e-5. That is attention's own difference; our CPU kernels are further away where they round activations to int8.
STREAM_LIMIT = {"F32": 2e-6, "FP8": 2e-4, "Q8_0": 2e-6, "Q4_K": 2e-6, "MXFP4": 2e-6}


def cpu_only(path: str, **options: int) -> Run:
    return Run(path, n_gpu_layers=0, **options)


@cache
def references() -> dict[tuple[str, str], Ran]:
    """Nothing on a GPU: experts as in the file, on our CPU path."""
    runs = [cpu_only(str(model(*which))) for which in MODELS]
    return dict(zip(MODELS, vulkan_host.run(runs, **OFF), strict=True))


@cache
def exact() -> dict[tuple[str, str], Ran]:
    """Nothing on a GPU, nothing rounded: the experts' exact values as F32, no plug-in."""
    runs = [cpu_only(str(exact_twin(*which))) for which in MODELS]
    return dict(zip(MODELS, vulkan_host.run(runs, plugin=False), strict=True))


@cache
def with_gpu(path: str) -> dict[tuple[str, str], Ran]:
    """One device for half of the models, two for the others; both ways to say where experts go."""
    runs = []
    for i, which in enumerate(MODELS):
        devices, experts = (TWO, EXPERTS_OURS) if i % 2 else (ONE, EXPERTS_CPU)
        overrides = {} if which[1] == "FP8" else experts
        runs.append(Run(str(model(*which)), devices=devices, overrides=overrides, tensor_split=SHARES[: len(devices)]))
    return dict(zip(MODELS, vulkan_host.run(runs, **PATHS[path], **EXACT_GPU), strict=True))


def check_places(arch: str, ran: Ran, devices: tuple[str, ...], n_passes: int = 1) -> None:
    """The GPUs computed attention, all of it; our device the experts, each layer as one step."""
    assert set(ran.where["attention"]) == set(devices) and set(ran.where["experts"]) == {"HybridMoE"}, ran.where
    assert ran.counters["n_layers"] == n_passes * N_EXPERT_LAYERS[arch], ran.counters


@pytest.mark.parametrize(("arch", "kind"), MODELS)
def test_attention_on_vulkan_and_experts_on_the_cpu(arch, kind):
    ran, reference = with_gpu("cpu")[arch, kind], references()[arch, kind]
    check_places(arch, ran, TWO if MODELS.index((arch, kind)) % 2 else ONE)
    check_places(arch, reference, ("CPU",))
    assert not any(ran.streamed.values())
    assert ran.counters["n_rows"] == reference.counters["n_rows"] > 0
    assert nmse(ran.logits, reference.logits) <= ATTENTION_LIMIT[kind]


def test_several_passes_flash_attention_half_precision_and_no_mmap():
    """What a GPU does by default, and experts in memory that the loader read. Measured: 1.1e-7."""
    path, passes = str(model("gpt-oss", "F32")), {"n_ubatch": 32}
    runs = [cpu_only(path, **passes), Run(path, devices=TWO, overrides=EXPERTS_OURS, tensor_split=SHARES,
                                          flash_attn=True, mmap=False, **passes)]  # fmt: skip
    reference, ran = vulkan_host.run(runs, **OFF)
    check_places("gpt-oss", ran, TWO, n_passes=3)
    assert nmse(ran.logits, reference.logits) <= 2e-6


@pytest.mark.skipif(not vulkan_host.STREAMS, reason="this plug-in does not stream experts to GPUs")
@pytest.mark.parametrize("path", ["one", "two"])
@pytest.mark.parametrize(("arch", "kind"), MODELS)
def test_experts_streamed_to_vulkan(path, arch, kind):
    """Devices that were asked for computed experts. The CPU's counters may hold layers that taught its rate."""
    ran = with_gpu(path)[arch, kind]
    assert set(ran.where["attention"]) == set(TWO if MODELS.index((arch, kind)) % 2 else ONE)
    used = {name for name, n in ran.streamed.items() if n > 0}
    assert used and used <= set(EXPERTS_ON[path]), ran.streamed
    assert nmse(ran.logits, exact()[arch, kind].logits) <= STREAM_LIMIT[kind]


@pytest.mark.skipif(not vulkan_host.STREAMS, reason="this plug-in does not stream experts to GPUs")
@pytest.mark.parametrize("path", ["one", "two"])
def test_every_vulkan_device_gets_experts(path):
    """Of the few experts of one of these layers, a device that is quick may take all."""
    total = {name: sum(ran.streamed.get(name, 0) for ran in with_gpu(path).values()) for name in TWO}
    assert {name for name, n in total.items() if n > 0} == set(EXPERTS_ON[path]), total


@pytest.mark.parametrize(("arch", "kind"), MODELS)
def test_rounding_to_a_type_is_seen_in_the_logits(arch, kind):
    """The limits above mean something: other weights, by no more than a type's rounding, are further away than a limit allows."""
    if kind in ("F32", "FP8"):
        assert nmse(references()[arch, kind].logits, exact()[arch, kind].logits) <= 1e-9
    else:
        moved = nmse(references()[arch, kind].logits, references()[arch, "F32"].logits)
        assert moved > 5 * ATTENTION_LIMIT[kind]
