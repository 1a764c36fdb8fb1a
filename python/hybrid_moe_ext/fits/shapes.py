"""Hyper-parameters of released models, for answers about a model that is not here. Data only; tensors.py spells them out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import OptionError


@dataclass(frozen=True)
class Mla:
    """Latent attention: what DeepSeek and Kimi have in place of grouped keys and values."""

    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int


@dataclass(frozen=True)
class Shape:
    """One model, as its release's config.json has it. Layers for multi-token prediction are left out: they are not run."""

    arch: str  # llama.cpp's name
    expert_type: str  # what it was released in
    n_layer: int
    n_layer_dense: int  # leading layers without experts
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    n_ff: int  # of dense layers
    n_ff_expert: int
    n_ff_shared: int  # all shared experts together; 0: none
    n_expert: int
    n_used: int
    n_vocab: int
    n_ctx_train: int
    window: int = 0  # tokens that a sliding-window layer sees; 0: no such layers
    mla: Mla | None = None

    @property
    def n_layer_moe(self) -> int:
        return self.n_layer - self.n_layer_dense


_MLA = Mla(q_lora=1536, kv_lora=512, nope=128, rope=64, v_dim=128)

SHAPES = {
    "deepseek-v3": Shape(
        arch="deepseek2", expert_type="FP8", n_layer=61, n_layer_dense=3, n_embd=7168, n_head=128, n_head_kv=1,
        head_dim=192, n_rot=64, n_ff=18432, n_ff_expert=2048, n_ff_shared=2048, n_expert=256, n_used=8,
        n_vocab=129280, n_ctx_train=163840, mla=_MLA,
    ),
    "kimi-k2": Shape(
        arch="deepseek2", expert_type="FP8", n_layer=61, n_layer_dense=1, n_embd=7168, n_head=64, n_head_kv=1,
        head_dim=192, n_rot=64, n_ff=18432, n_ff_expert=2048, n_ff_shared=2048, n_expert=384, n_used=8,
        n_vocab=163840, n_ctx_train=131072, mla=_MLA,
    ),
    "qwen3-235b": Shape(
        arch="qwen3moe", expert_type="FP8", n_layer=94, n_layer_dense=0, n_embd=4096, n_head=64, n_head_kv=4,
        head_dim=128, n_rot=128, n_ff=12288, n_ff_expert=1536, n_ff_shared=0, n_expert=128, n_used=8,
        n_vocab=151936, n_ctx_train=262144,
    ),
    "qwen3-30b": Shape(
        arch="qwen3moe", expert_type="FP8", n_layer=48, n_layer_dense=0, n_embd=2048, n_head=32, n_head_kv=4,
        head_dim=128, n_rot=128, n_ff=6144, n_ff_expert=768, n_ff_shared=0, n_expert=128, n_used=8,
        n_vocab=151936, n_ctx_train=262144,
    ),
    "glm-4.6": Shape(
        arch="glm4moe", expert_type="FP8", n_layer=92, n_layer_dense=3, n_embd=5120, n_head=96, n_head_kv=8,
        head_dim=128, n_rot=64, n_ff=12288, n_ff_expert=1536, n_ff_shared=1536, n_expert=160, n_used=8,
        n_vocab=151552, n_ctx_train=202752,
    ),
    "minimax-m2": Shape(
        arch="minimax-m2", expert_type="FP8", n_layer=62, n_layer_dense=0, n_embd=3072, n_head=48, n_head_kv=8,
        head_dim=128, n_rot=64, n_ff=1536, n_ff_expert=1536, n_ff_shared=0, n_expert=256, n_used=8,
        n_vocab=200064, n_ctx_train=196608,
    ),
    "gpt-oss-120b": Shape(
        arch="gpt-oss", expert_type="MXFP4", n_layer=36, n_layer_dense=0, n_embd=2880, n_head=64, n_head_kv=8,
        head_dim=64, n_rot=64, n_ff=2880, n_ff_expert=2880, n_ff_shared=0, n_expert=128, n_used=4,
        n_vocab=201088, n_ctx_train=131072, window=128,
    ),
}  # fmt: skip


def find_shape(name: str) -> Shape:
    if name in SHAPES:
        return SHAPES[name]
    close = difflib.get_close_matches(name, SHAPES, n=1)
    hint = f"did you mean {close[0]}?" if close else "give one of these, a GGUF file or a Hugging Face directory"
    raise OptionError(f"{name} is neither a file, nor a directory, nor a known shape ({', '.join(SHAPES)}): {hint}")
