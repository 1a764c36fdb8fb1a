"""llama.cpp's own test of back ends, applied to our device. Slow: LLAMA_CPP_BIN names the folder with them (docs/hosts.md)."""

from __future__ import annotations

import re

import pytest
from host_run import program, run

pytestmark = pytest.mark.slow


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
