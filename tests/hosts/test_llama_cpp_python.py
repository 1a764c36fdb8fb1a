"""llama-cpp-python itself as a host: the same text before register() and after, and the experts counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from host_models import CONTINUATION, N_PRODUCTS, PROMPT, demo_gguf

SCRIPT = """if 1:
    import json, sys, llama_cpp
    from hybrid_moe_ext import counters, register

    def text():
        llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, verbose=False)
        return llm.create_completion(sys.argv[2], max_tokens=24, temperature=0.0)["choices"][0]["text"]

    stock, before = text(), counters().n_matmuls
    register()
    print(json.dumps([stock, before, text(), counters().n_matmuls]))
"""


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_same_text_before_and_after_register(kind):
    command = [sys.executable, "-c", SCRIPT, demo_gguf(kind), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    stock, before, ours, after = json.loads(done.stdout)
    assert len(stock) > 50 and CONTINUATION.startswith(stock)
    assert before == 0 and ours == stock
    assert after == 24 * N_PRODUCTS
