"""llama.cpp's own tests, applied to our device. Slow: LLAMA_CPP_BIN names the folder with them (docs/hosts.md)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from host_run import program, run

from hybrid_moe_ext.info import read_gguf_header

pytestmark = pytest.mark.slow

# Products by experts: GroveMoE has a second, smaller set. Norms that end in _exps are none.
PRODUCT = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch)?exps\.weight$")
# Files with expert tensors whose graph, in this llama.cpp, uses none of them.
NO_EXPERT_GRAPH = {"refact"}
LIMIT = 1e-9
# A random fixture that multiplies every rounding: between one thread and two stock differs from itself by 9.8e-10.
OWN_NOISE = {"deepseek4": 1e-8}


def test_backend_ops_mul_mat_id():
    ran = run([program("test-backend-ops"), "test", "-o", "MUL_MAT_ID", "-b", "HybridMoE"], plugin=True, timeout=1800)
    text = re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout + ran.log)
    ours = text[text.index(": HybridMoE") :]
    passed, n = map(int, re.search(r"(\d+)/(\d+) tests passed", ours).groups())
    assert n > 0 and passed == n, ours[-4000:]
    supported = re.findall(r"^ *MUL_MAT_ID\((.*)\): *OK", ours, re.M)
    assert len(supported) == n and ran.matmuls >= n
    for kind in ("f32", "f16", "bf16", "q8_0"):
        assert any(f"type_a={kind}," in case for case in supported), f"no case of {kind} ran"


def products(path: Path) -> tuple[int, int]:
    """Expert products per pass, at least and at most: a merged gate_up counts as two in a fused layer, else as one."""
    found = [PRODUCT.search(tensor.name) for tensor in read_gguf_header(path).tensors]
    return sum(m is not None for m in found), sum(1 + (m[1] == "gate_up") for m in found if m)


def test_every_moe_architecture_gives_stock_logits(tmp_path):
    run([program("test-llama-archs"), "-s", 1, "-o", tmp_path], plugin=False, timeout=600)
    n_products = {path: products(path) for path in tmp_path.glob("*.gguf")}
    n_products = {path: n for path, n in n_products.items() if n[1]}
    script = Path(__file__).parent / "architectures.py"
    done = subprocess.run([sys.executable, script, *sorted(n_products)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(n_products) > 50
    wrong = []
    for row in told:
        path = Path(row["path"])
        name = path.stem.removesuffix("-moe").removesuffix("-dense")
        least, most = (0, 0) if name in NO_EXPERT_GRAPH else n_products[path]
        in_range = least * row["n_passes"] <= row["matmuls"] <= most * row["n_passes"]
        print(f"{name:16} nmse {row['nmse']:.1e}  {row['matmuls']} products")
        if row["n_wrong"] or row["nmse"] > OWN_NOISE.get(name, LIMIT) or not in_range:
            wrong.append({**row, "products": (least, most)})
    assert not wrong, wrong
