"""What a model family declares, as plain data. The declarations are in families/, the machinery is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import gguf

from .config import Fields


class Hparams(Protocol):
    """What the machinery itself needs from any family's hyper-parameters."""

    n_layer: int
    n_vocab: int
    n_expert: int
    n_expert_used: int


@dataclass(frozen=True)
class HeadSlice:
    """One GGUF tensor cut out of a stacked matrix: of every head's rows, `n_rows` from `first`, perhaps transposed."""

    name: str  # name of the part as gguf's name map knows it, in place of the whole
    n_head: int
    first: int
    n_rows: int
    transpose: bool


@dataclass(frozen=True)
class Rule:
    """A tensor outside the experts: what shape it must have and where it counts."""

    shape: tuple[int, ...]
    part: str  # attention | ffn | embeddings: for the size summary
    f32: bool = False  # kept in float32 whatever dense_type says; 1-D tensors always are
    slices: tuple[HeadSlice, ...] = ()  # empty: one GGUF tensor, unchanged


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture that runs as one llama.cpp architecture."""

    hf_arch: str  # config.json: architectures[0]
    gguf_arch: gguf.MODEL_ARCH
    read_hparams: Callable[[Fields], Any]
    write_hparams: Callable[[gguf.GGUFWriter, Any], None]
    model_tensors: Callable[[Any], dict[str, Rule]]  # full names, outside the layers
    layer_tensors: Callable[[Any, int], dict[str, Rule]]  # names after `layer_prefix`
    expert_shapes: Callable[[Any, int], dict[str, tuple[int, int]]]  # projection -> (rows, k); empty: a dense layer
    layer_prefix: str = "model.layers.{layer}."
    expert_name: str = "mlp.experts.{expert}.{projection}.weight"  # after `layer_prefix`
    merged_name: str = "mlp.experts.{projection}.weight"  # the same for all experts, as gguf's name map knows it
    # Released names that carry no weights; an output matrix beside tied embeddings is a copy.
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")
