"""The demo model in quantised types: logits with the plug-in against those of llama.cpp alone, on the same file.

Rows of down have 128 values there, so llama.cpp stores them in another type than asked for where blocks have 256: some
experts stay with it, which is part of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from host_models import PROMPT, demo_gguf

from hybrid_moe_ext._native import WEIGHT_TYPES
from weights import FLOATS_FROM

SCRIPT = """if 1:
    import json, sys, llama_cpp, numpy as np
    from hybrid_moe_ext import counters, register

    def logits(n_batch):
        options = dict(n_ctx=256, n_batch=n_batch, n_threads=2, n_threads_batch=2, verbose=False, logits_all=True)
        llm = llama_cpp.Llama(sys.argv[1], **options)
        llm.eval(llm.tokenize(sys.argv[2].encode()))
        return np.array(llm.scores[: llm.n_tokens], np.float64)

    stock = {n: logits(n) for n in (1, 64)}
    before = counters().n_matmuls
    register()
    told = {}
    for n, reference in stock.items():
        ours = logits(n)
        told[n] = [float(((ours - reference) ** 2).sum() / (reference**2).sum()), len(ours)]
    print(json.dumps([before, told, counters().n_matmuls]))
"""


def n_of_ours(path: Path) -> int:
    """Expert tensors of types that have kernels here."""
    tensors = [t for t in gguf.GGUFReader(path).tensors if "_exps.weight" in t.name]
    return sum(t.tensor_type.name in WEIGHT_TYPES for t in tensors)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_logits_equal_those_without_the_plug_in(kind):
    """Both round activations to int8; another order of additions flips a few of these roundings, hence 1e-4. Of many token
    rows some types round nothing here, where the host does."""
    if os.environ["HYBRID_MOE_ISA"] == "scalar":
        pytest.skip("the scalar kernels leave quantised types to the host")
    path = demo_gguf(kind)
    done = subprocess.run([sys.executable, "-c", SCRIPT, path, PROMPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, told, after = json.loads(done.stdout)
    n_tokens = told["1"][1]
    n_passes = n_tokens + -(-n_tokens // 64)
    assert before == 0 and after == n_of_ours(path) * n_passes
    assert told["1"][0] < 1e-4 and told["64"][0] < (1e-3 if kind in FLOATS_FROM else 1e-4), told
