"""node-llama-cpp from npm as a host: the same text with the plug-in and without, and the experts counted.

NODE_LLAMA_CPP names a folder with its node_modules (docs/hosts.md; .ci/run makes one)."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
from host_models import CONTINUATION, N_PRODUCTS, PROMPT, demo_gguf
from host_run import Ran, run

SCRIPT = Path(__file__).parent / "generate.mjs"
N_TOKENS = 24
LAVAPIPE = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))


def node(
    model: Path, plugin: bool, gpu: str = "cpu", n_gpu_layers: int = 0, n_batch: int = 512, **more: str
) -> tuple[dict, Ran]:
    folder = os.environ.get("NODE_LLAMA_CPP")
    if not folder:
        pytest.skip(
            "NODE_LLAMA_CPP names no folder with node_modules/node-llama-cpp: docs/hosts.md says how to make one"
        )
    assert (Path(folder) / "node_modules" / "node-llama-cpp").is_dir(), f"no node-llama-cpp in {folder}"
    program = shutil.which("node")
    assert program, "NODE_LLAMA_CPP is set, but there is no node"
    ran = run([program, SCRIPT, model, gpu, n_gpu_layers, n_batch, N_TOKENS, PROMPT], plugin, cwd=Path(folder), **more)
    return json.loads(ran.stdout.splitlines()[-1]), ran


@cache
def stock_text(kind: str) -> str:
    text = node(demo_gguf(kind), plugin=False)[0]["text"]
    assert len(text) > 50 and CONTINUATION.startswith(text), text
    return text


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_same_text_with_and_without_the_plugin(kind):
    if kind == "Q8_0" and "amx_int8" in Path("/proc/cpuinfo").read_text():
        pytest.skip("on CPUs with AMX llama.cpp itself stops at DeepSeek's Q8_0 attention, without the plug-in as well")
    answer, ran = node(demo_gguf(kind), plugin=True)
    assert answer["text"] == stock_text(kind)
    assert ran.matmuls == N_TOKENS * N_PRODUCTS, ran.log
    assert "HybridMoE model buffer size" in ran.log


def test_fp8_gives_the_text_of_its_exact_twin():
    """No stock host runs FP8, so the reference is the same model dequantised to F32."""
    answer, ran = node(demo_gguf("FP8"), plugin=True)
    assert answer["text"] == stock_text("F32")
    assert ran.matmuls == N_TOKENS * N_PRODUCTS, ran.log


def test_attention_on_vulkan_and_experts_here():
    """Every layer on the GPU, and no override: a GPU declines FP8 experts, and the loader's next choice is ours. One
    token per pass and no flash attention, because a software GPU compiles each of the other shaders for a minute."""
    if not LAVAPIPE:
        pytest.skip("no lavapipe (Debian: mesa-vulkan-drivers)")
    device = {"VK_ICD_FILENAMES": str(LAVAPIPE[0]), "GGML_VK_VISIBLE_DEVICES": "0"}
    answer, ran = node(demo_gguf("FP8"), plugin=True, gpu="vulkan", n_gpu_layers=99, n_batch=1, **device)
    assert answer["gpu"] == "vulkan" and answer["gpuLayers"] == 5 and "llvmpipe" in answer["devices"][0]
    assert answer["text"] == stock_text("F32")
    n_passes, rest = divmod(ran.matmuls, N_PRODUCTS)
    assert rest == 0 and n_passes > N_TOKENS, ran.log
    assert "layer   0: dev = Vulkan0" in ran.log and "layer   3: dev = Vulkan0" in ran.log
    assert "HybridMoE model buffer size" in ran.log
