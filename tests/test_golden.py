"""The bundled FP8 model against Hugging Face transformers in float32 on its dequantised twin (golden.json, golden.npz;
made by models/make_tiny.py). Ids, logits and greedy text, on every kernel and memory path."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import models
from conftest import DEMO
from hybrid_moe_ext import Llama, _native, counters

GOLDEN = json.loads((DEMO / "golden.json").read_text())
PROMPTS = {p["name"]: p for p in GOLDEN["prompts"]}
OPTIONS = {**models.OPTIONS, "n_ctx": 256}


@pytest.fixture(scope="module")
def arrays():
    with np.load(DEMO / "golden.npz") as file:
        return {name: file[name].astype(np.float64) for name in file}


@pytest.fixture(scope="module")
def model():
    return Llama(DEMO, dense_type="f32", **OPTIONS)


@pytest.mark.parametrize("name", PROMPTS)
def test_token_ids(model, name):
    prompt = PROMPTS[name]
    if prompt["chat"]:
        pytest.skip("the chat template is compared in test_chat_text")
    assert model.tokenize(prompt["text"].encode()) == prompt["ids"]


@pytest.mark.parametrize("name", PROMPTS)
def test_logits(model, arrays, name):
    before = counters()
    logits = models.logits(model, PROMPTS[name]["ids"])
    assert counters().n_matmuls > before.n_matmuls, "the experts must have run on our back end"
    assert models.nmse(logits[-1], arrays[f"{name}.last_logits"]) <= 1e-9
    if f"{name}.all_logits" in arrays:
        assert models.nmse(logits, arrays[f"{name}.all_logits"]) <= 1e-9


def greedy(llm: Llama, prompt: dict) -> list[int]:
    llm.reset()
    out = []
    for token in llm.generate(prompt["ids"], temp=0.0):
        out.append(token)
        if len(out) == len(prompt["greedy_ids"]):
            break
    return out


WIDE = [(name, dense) for name in ("gpl", "apache") for dense in ("bf16", "q8_0")]


@pytest.mark.parametrize("name, dense_type", [*((name, "f32") for name in PROMPTS), *WIDE])
def test_greedy_text(name, dense_type):
    """Two prompts leave more than 3 between the two best logits, so BF16 and Q8_0 attention change no token there."""
    llm = Llama(DEMO, dense_type=dense_type, **OPTIONS)
    assert greedy(llm, PROMPTS[name]) == PROMPTS[name]["greedy_ids"]


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("isa", _native.library().hybrid_moe_available_isas().decode().split())
def test_greedy_text_on_every_kernel(isa, use_mmap):
    script = (
        "import sys, json, test_golden as g;"
        "m = g.Llama(g.DEMO, use_mmap=sys.argv[1] == 'True', **g.OPTIONS);"
        "print(json.dumps([m.status.isa, g.greedy(m, g.PROMPTS['gpl'])]))"
    )
    environ = {**os.environ, "HYBRID_MOE_ISA": isa}
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", script, str(use_mmap)], capture_output=True, text=True, env=environ, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [isa, PROMPTS["gpl"]["greedy_ids"]]


def test_chat_text(model):
    prompt = PROMPTS["chat"]
    reply = model.create_chat_completion(
        [{"role": "user", "content": prompt["text"]}], max_tokens=len(prompt["greedy_ids"]), temperature=0, top_k=1
    )
    assert reply["usage"]["prompt_tokens"] == len(prompt["ids"])
    text = reply["choices"][0]["message"]["content"]
    assert text.strip() and prompt["greedy_text"].strip().startswith(text.strip()[:200])
