"""Random checkpoints and their stock twins, written once per test session. Helpers, not tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import llama_cpp
import numpy as np

import checkpoint_fixtures as fixtures
from hybrid_moe_ext.checkpoint import open_checkpoint

_folder = TemporaryDirectory(prefix="hybrid-moe-tests-")
FOLDER = Path(_folder.name)
GGML_F32 = 0
# The KV cache as F32: rounding it to F16 turns differences of 1e-14 into 1e-10.
OPTIONS = {
    "n_ctx": 128,
    "n_threads": 2,
    "n_threads_batch": 2,
    "verbose": False,
    "logits_all": True,
    "type_k": GGML_F32,
    "type_v": GGML_F32,
}


@cache
def _fp8() -> tuple[Path, dict]:
    return FOLDER / "fp8", fixtures.write_checkpoint(FOLDER / "fp8", "fp8")


def fp8_directory() -> Path:
    """A random DeepSeek-V3 checkpoint in FP8, ragged blocks included."""
    return _fp8()[0]


@cache
def twin(kind: str) -> Path:
    """A GGUF with the same model, every matrix dequantised; experts as `kind` (F32, F16, BF16)."""
    directory = FOLDER / f"twin-{kind}"
    tensors = _fp8()[1]
    plain = {
        name: fixtures.pack(fixtures.unpack(tensors, name), kind if ".experts." in name else "F32")
        for name in tensors
        if not name.endswith("_scale_inv")
    }
    fixtures.write_checkpoint(directory, kind, tensors=plain)
    path = FOLDER / f"twin-{kind}.gguf"
    open_checkpoint(directory).virtual_gguf("f32").write(path)
    return path


def prompt(n: int = 40) -> list[int]:
    return [0] + [int(t) for t in np.random.default_rng(0).integers(3, 250, n - 1)]


def logits(llm: llama_cpp.Llama, tokens: list[int] | None = None) -> np.ndarray:
    """[n_tokens, n_vocab], all positions in one batch."""
    tokens = tokens or prompt()
    llm.reset()
    llm.eval(tokens)
    return np.array(llm.scores[: len(tokens)], np.float64)


def nmse(a: np.ndarray, reference: np.ndarray) -> float:
    return float(((a - reference) ** 2).sum() / (reference**2).sum())
