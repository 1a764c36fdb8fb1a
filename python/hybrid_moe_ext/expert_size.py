"""How large a model's experts are on a device, and everything else: from headers alone. For placement.py."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import gguf

from .checkpoint import Checkpoint
from .info import describe_model, read_gguf_shards

_EXPERT = re.compile(r"^blk\.(\d+)\.ffn_(up|down|gate|gate_up)_exps\.weight$")


@dataclass(frozen=True)
class ExpertSize:
    n_layer: int
    n_embd: int
    n_ff: int  # of one expert
    slot_bytes: int  # the largest expert, as a device computes with it: FP8 as BF16
    dense_bytes: int  # everything but the experts, as it is loaded


@dataclass(frozen=True)
class _Matrices:
    """A projection of all experts of a layer."""

    layer: int
    projection: str
    type: str
    n_rows: int
    k: int

    @property
    def slot_bytes(self) -> int:
        if self.type == "I8":  # E4M3 codes
            return 2 * self.n_rows * self.k
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return self.n_rows * self.k // int(block) * int(block_bytes)


def expert_size(path: str, checkpoint: Checkpoint | None, dense_type: str) -> ExpertSize | None:
    """None for a model without experts. `checkpoint`: what `path` is when it is a directory."""
    if checkpoint is not None:
        matrices = [
            found
            for t in checkpoint.experts
            if (found := _matrices(t.name, t.ggml_type.name, t.n_rows, t.k)) is not None
        ]
        dense = sum(t.n_bytes(t.out_type(dense_type)) for t in checkpoint.dense)
        return _measure(checkpoint.n_layer, matrices, dense)
    described = describe_model(path)
    if not described.n_expert:
        return None
    matrices = [
        found
        for shard in read_gguf_shards(Path(path)).values()
        for t in shard.tensors
        if len(t.shape) == 3 and (found := _matrices(t.name, t.type, t.shape[1], t.shape[0])) is not None
    ]
    experts = described.parts["experts"].n_bytes if "experts" in described.parts else 0
    return _measure(described.n_layer, matrices, described.n_bytes - experts)


def _matrices(name: str, type_: str, n_rows: int, k: int) -> _Matrices | None:
    match = _EXPERT.match(name)
    return _Matrices(int(match[1]), match[2], type_, n_rows, k) if match else None


def _measure(n_layer: int, matrices: list[_Matrices], dense_bytes: int) -> ExpertSize | None:
    if not matrices:
        return None
    of_layer: dict[int, int] = defaultdict(int)
    for m in matrices:
        of_layer[m.layer] += m.slot_bytes
    down = [m for m in matrices if m.projection == "down"]
    return ExpertSize(
        n_layer=n_layer,
        n_embd=max((m.n_rows for m in down), default=0),
        n_ff=max((m.k for m in down), default=0),
        slot_bytes=max(of_layer.values()),
        dense_bytes=dense_bytes,
    )
