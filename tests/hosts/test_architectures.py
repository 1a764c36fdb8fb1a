"""Every MoE architecture of llama.cpp, by its own generator: which blocks run as one step here, and that logits are stock's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import Told
from llama_archs.generator import generate

from hybrid_moe_ext.info import read_gguf_header

# Norms that end in _exps hold no products.
PRODUCT = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch)?exps\.weight$")
# Blocks per pass. All of them run as one step: three products each, gate, up and down, however they are stored.
FUSED = {
    "afmoe": 1, "arctic": 2, "bailingmoe": 2, "bailingmoe2": 1, "bailingmoe3": 1, "cohere2moe": 1, "dbrx": 2,
    "deepseek": 1, "deepseek2": 1, "deepseek32": 1, "deepseek4": 4, "dots1": 1, "dots3note": 1, "ernie4_5-moe": 1,
    "exaone-moe": 1, "glm-dsa": 1, "glm4moe": 1, "glm5-next": 1, "gpt-oss": 2, "granite": 2, "granitemoe": 2, "grok": 2,
    "grovemoe": 4, "hunyuan-moe": 2, "hy_v3": 2, "hy_v4": 1, "kimi-linear": 1, "laguna": 1, "lfm2moe": 1, "llada-moe": 2,
    "llama": 2, "llama4": 2, "maple": 2, "mellum": 2, "mimo2": 2, "minicpm": 2, "minimax-01": 2, "minimax-m2": 2,
    "minimax-m3": 1, "mistral3": 2, "mistral4": 1, "olmoe": 2, "phimoe": 2, "qwen2moe": 2, "qwen35moe": 2, "qwen3moe": 2,
    "qwen3next": 2, "qwen3vlmoe": 2, "qwen4exp": 2, "rnd1": 2, "smallthinker": 2,
}  # fmt: skip
# Blocks that run operation by operation: kimi-k3's activation is made of TANH, SIGMOID, SCALE and MUL.
OP_BY_OP = {"kimi-k3": 1}
# Files with expert tensors whose graph, in this llama.cpp, uses none of them.
NO_EXPERT_GRAPH = {"refact"}
LIMIT = 1e-9
# A random fixture that multiplies every rounding: between one thread and two stock differs from itself by 9.8e-10.
OWN_NOISE = {"deepseek4": 1e-8}


def architecture(path: Path) -> str:
    return path.stem.removesuffix("-moe").removesuffix("-dense")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, Told]:
    files = [path for path in generate(tmp_path_factory.mktemp("archs")) if has_experts(path)]
    script = Path(__file__).parent / "architectures.py"
    done = subprocess.run([sys.executable, script, *files], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return {architecture(Path(told.path)): told for told in (Told(**json.loads(x)) for x in done.stdout.splitlines())}


def has_experts(path: Path) -> bool:
    return any(PRODUCT.search(tensor.name) for tensor in read_gguf_header(path).tensors)


def test_the_table_knows_every_architecture(told):
    assert told.keys() == FUSED.keys() | OP_BY_OP.keys() | NO_EXPERT_GRAPH


@pytest.mark.parametrize("name", [*FUSED, *OP_BY_OP, *NO_EXPERT_GRAPH])
def test_fused_or_not_and_the_logits_of_stock(told, name):
    n_blocks = FUSED.get(name, 0) + OP_BY_OP.get(name, 0)
    assert (told[name].layers, told[name].matmuls) == (FUSED.get(name, 0), 3 * n_blocks)
    assert told[name].n_wrong == 0 and told[name].nmse <= OWN_NOISE.get(name, LIMIT)
