"""Stock llama.cpp on our GGUF, as a file and as a stream, against Hugging Face transformers in float32."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import checkpoint_fixtures as fx
import checkpoint_host as host
import numpy as np
import pytest
from hybrid_moe_ext.checkpoint import GgufStream, open_checkpoint
from hybrid_moe_ext.errors import CheckpointError

TOKENS = [0, 5, 77, 200, 33, 9, 256, 257, 258, 120, 130]
NMSE = 1e-9  # measured 4e-13
VARIANTS = {
    "released": {},
    "no_yarn": {"rope_scaling": None},
    "one_query_projection": {"q_lora_rank": None},
    "tied": {"tie_word_embeddings": True},
    "one_group_not_normalised": {"n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "two_shared_experts": {"n_shared_experts": 2, "first_k_dense_replace": 0},
}


def reference(directory) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install hybrid-moe-ext[reference]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path, variant):
    fx.write_checkpoint(tmp_path, "F32", **VARIANTS[variant])
    open_checkpoint(tmp_path).virtual_gguf("f32").write(tmp_path / "model.gguf")
    logits = host.logits(host.load_path(tmp_path / "model.gguf"), TOKENS)
    want = reference(tmp_path)
    nmse = float(((logits - want) ** 2).sum() / (want**2).sum())
    assert nmse <= NMSE


@pytest.mark.parametrize("dense_type", ["bf16", "q8_0", "f32"])
def test_stream_equals_file(tmp_path, dense_type):
    fx.write_checkpoint(tmp_path, "BF16")
    virtual = open_checkpoint(tmp_path).virtual_gguf(dense_type)
    virtual.write(tmp_path / "model.gguf")
    with GgufStream(virtual, serve_experts=True) as stream:
        model = host.load_file(stream.file)
        assert stream.error is None and model
    from_stream = host.logits(model, TOKENS)
    np.testing.assert_array_equal(from_stream, host.logits(host.load_path(tmp_path / "model.gguf"), TOKENS))


def test_loading_reads_no_expert_byte(tmp_path):
    """FP8 experts too: I8 passes the loader of a stock host (which could not compute on it)."""
    for dtype in ("fp8", "BF16"):
        fx.write_checkpoint(tmp_path / dtype, dtype)
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
