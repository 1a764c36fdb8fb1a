"""Whole models: a checkpoint directory against its stock twin, greedy text on every path, what opening costs, bad input."""

import json
import os
import subprocess
import sys

import llama_cpp
import numpy as np
import pytest

import checkpoint_fixtures as fixtures
import hybrid_moe_ext
import models
from conftest import BF16_KERNELS
from hybrid_moe_ext import CheckpointError, Llama, OptionError, counters


def greedy(llm: llama_cpp.Llama, n: int = 24) -> list[int]:
    llm.reset()
    out = []
    for token in llm.generate(models.prompt(12), temp=0.0):
        out.append(token)
        if len(out) == n:
            return out
    raise AssertionError("generate() ended")


def test_fp8_directory_equals_stock_on_dequantised_weights():
    """Reference: stock llama.cpp, never having seen us, on the F32 twin of the same weights."""
    script = (
        "import models, llama_cpp, numpy, sys;"
        "numpy.save(sys.argv[2], models.logits(llama_cpp.Llama(sys.argv[1], **models.OPTIONS)))"
    )
    out = models.FOLDER / "reference.npy"
    folder = os.path.dirname(__file__)
    subprocess.run([sys.executable, "-c", script, str(models.twin("F32")), str(out)], check=True, cwd=folder)
    reference = np.load(out)
    before = counters()
    for options in ({}, {"use_mmap": False}):
        llm = Llama(models.fp8_directory(), dense_type="f32", **options, **models.OPTIONS)
        assert models.nmse(models.logits(llm), reference) <= 1e-9
    assert counters().n_matmuls > before.n_matmuls


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_stock_gguf_with_and_without_the_plug_in(kind):
    path = models.twin(kind)
    script = (
        "import models, llama_cpp, test_llama, sys, json;"
        "print(json.dumps(test_llama.greedy(llama_cpp.Llama(sys.argv[1], **models.OPTIONS))))"
    )
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, cwd=folder, capture_output=True, text=True
    )
    stock = json.loads(done.stdout.splitlines()[-1])
    before = counters()
    for use_mmap in (True, False):
        assert greedy(Llama(path, use_mmap=use_mmap, **models.OPTIONS)) == stock
    assert counters().n_matmuls > before.n_matmuls


def test_greedy_tokens_scalar_and_avx2_mmap_on_and_off():
    results = set()
    script = (
        "import hybrid_moe_ext as h, models, test_llama, sys, json;"
        "m = h.Llama(models.fp8_directory(), use_mmap=sys.argv[1] == '1', **models.OPTIONS);"
        "print(json.dumps([m.status.isa, test_llama.greedy(m)]))"
    )
    folder = os.path.dirname(__file__)
    isas = hybrid_moe_ext._native.library().hybrid_moe_available_isas().decode().split()
    for isa in (isa for isa in isas if isa not in BF16_KERNELS):
        for use_mmap in "01":
            environ = {**os.environ, "HYBRID_MOE_ISA": isa}
            done = subprocess.run(
                [sys.executable, "-c", script, use_mmap],
                check=True,
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
            )
            ran, tokens = json.loads(done.stdout.splitlines()[-1])
            assert ran == isa
            results.add(tuple(tokens))
    assert len(results) == 1


@pytest.mark.parametrize("dense_type", ["bf16", "q8_0", "f32"])
def test_dense_types(dense_type):
    llm = Llama(models.fp8_directory(), dense_type=dense_type, **models.OPTIONS)
    reference = Llama(models.fp8_directory(), dense_type="f32", **models.OPTIONS)
    close = models.nmse(models.logits(llm), models.logits(reference))
    assert close <= {"f32": 0, "bf16": 5e-2, "q8_0": 5e-2}[dense_type]


def test_two_models_of_one_checkpoint_and_closing_one():
    first = Llama(models.fp8_directory(), dense_type="f32", **models.OPTIONS)
    second = Llama(models.fp8_directory(), dense_type="f32", **models.OPTIONS)
    alone = models.logits(first)
    first.close()
    assert np.array_equal(models.logits(second), alone)


def test_it_is_a_llama_cpp_llama():
    llm = Llama(models.fp8_directory(), **models.OPTIONS)
    assert isinstance(llm, llama_cpp.Llama)
    text = llm("the", max_tokens=5, temperature=0)["choices"][0]["text"]
    assert "".join(part["choices"][0]["text"] for part in llm("the", max_tokens=5, temperature=0, stream=True)) == text
    reply = llm.create_chat_completion([{"role": "user", "content": "the"}], max_tokens=4)
    assert reply["choices"][0]["message"]["role"] == "assistant"
    embedding = Llama(models.fp8_directory(), embedding=True, n_ctx=64, verbose=False).embed("the licence")
    assert np.isfinite(np.array(embedding)).all()


def test_vocabulary_only():
    assert Llama(models.fp8_directory(), vocab_only=True, verbose=False).tokenize(b"the")


def test_progress_and_interruption():
    seen = []
    Llama(models.fp8_directory(), progress=seen.append, **models.OPTIONS)
    assert seen == sorted(seen) and seen[-1] == 1.0

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Llama(models.fp8_directory(), progress=interrupt, **models.OPTIONS)


def test_opening_reads_no_experts_and_commits_no_memory(tmp_path):
    """By page-cache residency of the files (mincore) and by the process's resident memory, in a fresh process."""
    width = {"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 64, "num_hidden_layers": 3}
    tensors = fixtures.write_checkpoint(tmp_path / "m", "fp8", n_shards=1, num_nextn_predict_layers=0, **width)
    n_expert_bytes = sum(
        v.nbytes for name, (_, v) in tensors.items() if ".experts." in name and not name.endswith("_inv")
    )
    file = tmp_path / "m" / "model.safetensors"
    with open(file, "rb+") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    script = os.path.join(os.path.dirname(__file__), "opening_cost.py")
    done = subprocess.run([sys.executable, script, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout.splitlines()[-1])
    if cost["resident_before"] > 0.05:
        pytest.skip("this file system does not drop its page cache on request")
    assert n_expert_bytes > 90e6
    assert cost["resident_opened"] < 0.2
    assert cost["grown_opened"] < 0.2 * n_expert_bytes
    assert cost["resident_used"] > cost["resident_opened"] + 0.1, "using them does read them"


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("dense_typ", "bf16", "did you mean dense_type"),
        ("n_ctxx", 5, "did you mean n_ctx"),
        ("dense_type", "int3", "bf16, q8_0, f32"),
        ("isa", "avx1024", "avx2"),
        ("use_mlock", True, "leave it out"),
    ],
)
def test_bad_options(name, value, message):
    with pytest.raises(OptionError, match=message):
        Llama(models.fp8_directory(), verbose=False, **{name: value})


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("HYBRID_MOE_ISA", "sse9", "sse9"),
        ("HYBRID_MOE_DENSETYPE", "f32", "HYBRID_MOE_DENSE_TYPE"),
        ("HYBRID_MOE_TEAM", "x", "openmp"),
    ],
)
def test_bad_environment(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=message):
        Llama(models.fp8_directory(), verbose=False)


def test_paths_that_are_no_model(tmp_path):
    (tmp_path / "text").write_text("hello, I am no model")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "empty").mkdir()
    for name in ("absent", "text", "short.gguf", "empty"):
        with pytest.raises(CheckpointError, match=name):
            Llama(tmp_path / name, verbose=False)


def test_nan_in_an_expert_is_an_error_when_it_is_used(tmp_path):
    """Opening does not read experts, so the first use tells; the process goes on."""
    tensors = fixtures.random_tensors({**fixtures.CONFIG, "quantization_config": fixtures.QUANTIZATION}, "fp8")
    for name, (_, codes) in tensors.items():
        if "layers.1." in name and ".experts." in name and name.endswith("up_proj.weight"):
            codes[0, 0] = 0x7F
    fixtures.write_checkpoint(tmp_path / "m", "fp8", tensors=tensors)
    llm = Llama(tmp_path / "m", **models.OPTIONS)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up_exps\.weight.*NaN.*again"):
        models.logits(llm)
    assert np.isfinite(models.logits(Llama(models.fp8_directory(), **models.OPTIONS))).all()


def test_more_threads_than_processors_and_one():
    results = []
    for n in (1, 3):
        llm = Llama(models.fp8_directory(), **{**models.OPTIONS, "n_threads": n, "n_threads_batch": n})
        results.append(models.logits(llm, models.prompt(6)))
    assert models.nmse(results[1], results[0]) <= 1e-9
