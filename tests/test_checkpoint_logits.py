"""Stock llama.cpp on our GGUF, as a file and as a stream, against Hugging Face transformers in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

import checkpoint_fixtures as fx
import checkpoint_host as host
from hybrid_moe_ext.checkpoint import GgufStream, open_checkpoint
from hybrid_moe_ext.errors import CheckpointError

TOKENS = [0, 5, 77, 200, 33, 9, 256, 257, 258, 120, 130]
NMSE = 1e-9  # measured 4e-13
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = {
    "deepseek_v3": {
        "released": {},
        "no_yarn": {"rope_scaling": None},
        "one_query_projection": {"q_lora_rank": None},
        "tied": {"tie_word_embeddings": True},
        "one_group_not_normalised": {"n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        "two_shared_experts": {"n_shared_experts": 2, "first_k_dense_replace": 0},
    },
    "qwen3_moe": {
        "released": {},
        "yarn": {"rope_scaling": YARN},
        "tied": {"tie_word_embeddings": True},
        "wide_heads": {"head_dim": 64, "num_key_value_heads": 1},
        "narrow_heads": {"head_dim": 24, "num_key_value_heads": 4, "rope_theta": 10000},
        "other_sizes": {"hidden_size": 160, "moe_intermediate_size": 192, "num_experts": 7, "num_experts_per_tok": 3},
    },
}
ON_OUR_BACK_END = {  # name -> family, dtype, changes
    "deepseek_v3-fp8": ("deepseek_v3", "fp8", {}),
    "qwen3_moe-fp8": ("qwen3_moe", "fp8", {}),
    "qwen3_moe-fp8-other_sizes": (
        "qwen3_moe",
        "fp8",
        VARIANTS["qwen3_moe"]["other_sizes"] | {"head_dim": 48, "tie_word_embeddings": True},
    ),
    "qwen3_moe-BF16": ("qwen3_moe", "BF16", {}),
}
OURS = """
import sys, models, numpy, hybrid_moe_ext
for name in sys.argv[2:]:
    before = hybrid_moe_ext.counters().n_matmuls
    llm = hybrid_moe_ext.Llama(name, dense_type="f32", **models.OPTIONS)
    numpy.save(name + ".npy", models.logits(llm, eval(sys.argv[1])))
    assert hybrid_moe_ext.counters().n_matmuls > before
"""


def reference(directory) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install hybrid-moe-ext[reference]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def stock(directory) -> np.ndarray:
    open_checkpoint(directory).virtual_gguf("f32").write(directory / "model.gguf")
    return host.logits(host.load_path(directory / "model.gguf"), TOKENS)


def nmse(found: np.ndarray, want: np.ndarray) -> float:
    return float(((found - want) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize(("family", "variant"), [(f, v) for f in VARIANTS for v in VARIANTS[f]])
def test_logits_equal_transformers(tmp_path, family, variant):
    fx.write_checkpoint(tmp_path, "F32", family=family, **VARIANTS[family][variant])
    want = reference(tmp_path)
    assert nmse(stock(tmp_path), want) <= NMSE


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    """Each directory, its F32 twin and the logits of our Llama, from a process of its own: this host stays stock."""
    folder = tmp_path_factory.mktemp("ours")
    for name, (family, dtype, changes) in ON_OUR_BACK_END.items():
        tensors = fx.write_checkpoint(folder / name, dtype, family=family, **changes)
        fx.write_checkpoint(folder / f"{name}-twin", "F32", family=family, tensors=fx.dequantised(tensors), **changes)
    command = [sys.executable, "-c", OURS, repr(TOKENS), *(folder / name for name in ON_OUR_BACK_END)]
    subprocess.run(command, check=True, cwd=Path(__file__).parent)
    return folder


@pytest.mark.parametrize("name", ON_OUR_BACK_END)
@pytest.mark.parametrize("other", [stock, reference])
def test_experts_on_our_back_end(ours, name, other):
    assert nmse(np.load(ours / f"{name}.npy"), other(ours / f"{name}-twin")) <= NMSE


@pytest.mark.parametrize(
    ("family", "dense_type"),
    [("deepseek_v3", "bf16"), ("deepseek_v3", "q8_0"), ("deepseek_v3", "f32"), ("qwen3_moe", "bf16")],
)
def test_stream_equals_file(tmp_path, family, dense_type):
    fx.write_checkpoint(tmp_path, "BF16", family=family)
    virtual = open_checkpoint(tmp_path).virtual_gguf(dense_type)
    virtual.write(tmp_path / "model.gguf")
    with GgufStream(virtual, serve_experts=True) as stream:
        model = host.load_file(stream.file)
        assert stream.error is None and model
    from_stream = host.logits(model, TOKENS)
    np.testing.assert_array_equal(from_stream, host.logits(host.load_path(tmp_path / "model.gguf"), TOKENS))


@pytest.mark.parametrize("family", fx.FAMILIES)
def test_loading_reads_no_expert_byte(tmp_path, family):
    """FP8 experts too: I8 passes the loader of a stock host (which could not compute on it)."""
    for dtype in ("fp8", "BF16"):
        fx.write_checkpoint(tmp_path / dtype, dtype, family=family)
        with GgufStream(open_checkpoint(tmp_path / dtype).virtual_gguf()) as stream:
            model = host.load_file(stream.file)
            assert model and stream.error is None
            assert stream.copied_expert_bytes == 0
        host.llama.llama_model_free(model)


def test_bad_tensor_fails_the_load_and_says_why(tmp_path):
    tensors = fx.random_tensors(fx.CONFIG, "fp8")
    tensors["model.layers.2.self_attn.q_a_proj.weight"][1][3, 4] = 0xFF
    fx.write_checkpoint(tmp_path, tensors=tensors)
    with GgufStream(open_checkpoint(tmp_path).virtual_gguf()) as stream:
        assert not host.load_file(stream.file)
        assert isinstance(stream.error, CheckpointError) and "q_a_proj" in str(stream.error)
