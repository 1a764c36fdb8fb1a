"""The model that is asked about: a GGUF, a Hugging Face directory or a named shape, with what its experts weigh. Headers only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from ..checkpoint import is_checkpoint_dir, open_checkpoint
from ..errors import OptionError, UnsupportedModelError
from ..info import describe_model, read_gguf_shards
from .header import write_header
from .shapes import SHAPES, Shape, find_shape
from .tensors import scale_bytes, tensors_of

FP8 = "FP8"
DENSE_TYPE = "bf16"  # as `Options` has it
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(up|down|gate|gate_up)_exps\.weight$")
# Read by one token (embeddings) or for one token (the output matrix): no share of the work per token.
_ONCE = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Source:
    """`path` is what llama.cpp loads. An expert: its matrices in one layer."""

    name: str
    kind: str  # "gguf" or "directory"
    path: str
    expert_types: tuple[str, ...]
    n_layer_moe: int
    n_expert: int
    expert_bytes: int  # all of them as stored, FP8 scales included
    expert_weights: int
    largest_expert_bytes: int
    largest_expert_weights: int
    dense_weights: int  # that every token is multiplied by: no experts, no embeddings, no output matrix

    @property
    def is_fp8(self) -> bool:
        return self.expert_types == (FP8,)


@dataclass(frozen=True)
class _Experts:
    """One tensor with all experts of a layer."""

    layer: int
    type: str
    n_expert: int
    n_weights: int
    n_bytes: int


@contextmanager
def open_source(model: str, expert_type: str | None, dense_type: str | None) -> Iterator[Source]:
    """Inside, `path` exists. Raises HybridMoeError for everything that is no Mixture-of-Experts model."""
    path = Path(model)
    if path.exists() or model not in SHAPES:
        if not path.exists() and not path.suffix and "/" not in model:
            find_shape(model)  # raises: says what there is
        if expert_type is not None:
            raise OptionError(f"--type {expert_type}: {model} has its own types: leave it out, it is for named shapes")
        if is_checkpoint_dir(path):
            yield _from_directory(path, dense_type or DENSE_TYPE)
            return
        if dense_type is not None:
            raise OptionError(f"--dense-type {dense_type}: a GGUF has its own types: leave it out for {model}")
        yield _from_gguf(path)
        return
    with TemporaryDirectory(prefix="hybrid-moe-fits-") as folder:
        yield _from_shape(
            model, find_shape(model), expert_type, dense_type or DENSE_TYPE, Path(folder) / f"{model}.gguf"
        )


def _from_shape(name: str, shape: Shape, expert_type: str | None, dense_type: str, path: Path) -> Source:
    kind = (expert_type or shape.expert_type).upper()
    tensors = tensors_of(shape, kind, dense_type)
    write_header(path, shape, tensors)
    scales = scale_bytes(shape) // 3 if kind == FP8 else 0
    experts, n_dense = [], 0
    for t in tensors:
        if layer := _EXPERTS.match(t.name):
            experts.append(_Experts(int(layer[1]), kind, shape.n_expert, t.n_elements, t.n_bytes + scales))
        elif _is_dense(t.name, t.shape):
            n_dense += t.n_elements
    return _source(name, "gguf", path, experts, n_dense)


def _from_gguf(path: Path) -> Source:
    info = describe_model(path)  # checks what can be wrong with it
    tensors = [t for header in read_gguf_shards(path).values() for t in header.tensors]
    experts, n_dense = [], 0
    for t in tensors:
        n_weights = prod(t.shape)
        if layer := _EXPERTS.match(t.name):
            type_ = FP8 if info.is_fp8_gguf and t.type == "I8" else t.type
            experts.append(_Experts(int(layer[1]), type_, t.shape[-1], n_weights, t.n_bytes))
        elif _is_dense(t.name, t.shape):
            n_dense += n_weights
    source = _source(str(path), "gguf", path, experts, n_dense)
    scales = info.parts["experts"].n_bytes - source.expert_bytes
    return _with_scales(source, scales)


def _from_directory(path: Path, dense_type: str) -> Source:
    checkpoint = open_checkpoint(path)
    experts = []
    for t in checkpoint.experts:
        layer = _EXPERTS.match(t.name)
        assert layer is not None
        n_bytes = sum(ref.n_bytes for ref in (*t.codes, *(t.scales or ())))
        type_ = FP8 if t.scales is not None else t.ggml_type.name
        experts.append(_Experts(int(layer[1]), type_, t.n_expert, t.n_expert * t.n_rows * t.k, n_bytes))
    dense = [t for t in checkpoint.dense if _is_dense(t.name, t.shape)]
    checkpoint.virtual_gguf(dense_type)  # refuses an unknown type here, not in the child
    return _source(str(path), "directory", path, experts, sum(prod(t.shape) for t in dense))


def _is_dense(name: str, shape: tuple[int, ...]) -> bool:
    """A matrix that every token is multiplied by; experts' biases have two dimensions too."""
    return name not in _ONCE and len(shape) > 1 and "_exps." not in name


def _source(name: str, kind: str, path: Path, experts: list[_Experts], n_dense: int) -> Source:
    if not experts:
        raise UnsupportedModelError(f"{name} has no expert tensors: nothing is streamed, ask llama.cpp's own --fit")
    layers: dict[int, list[_Experts]] = defaultdict(list)
    for e in experts:
        layers[e.layer].append(e)
    return Source(
        name=name,
        kind=kind,
        path=str(path),
        expert_types=tuple(dict.fromkeys(e.type for e in experts)),
        n_layer_moe=len(layers),
        n_expert=max(e.n_expert for e in experts),
        expert_bytes=sum(e.n_bytes for e in experts),
        expert_weights=sum(e.n_weights for e in experts),
        largest_expert_bytes=max(sum(e.n_bytes // e.n_expert for e in layer) for layer in layers.values()),
        largest_expert_weights=max(sum(e.n_weights // e.n_expert for e in layer) for layer in layers.values()),
        dense_weights=n_dense,
    )


def _with_scales(source: Source, n_bytes: int) -> Source:
    """Scales of a GGUF lie behind its tensors; experts share them evenly enough."""
    per_expert = -(-n_bytes // (source.n_layer_moe * source.n_expert))
    changed = {
        "expert_bytes": source.expert_bytes + n_bytes,
        "largest_expert_bytes": source.largest_expert_bytes + per_expert,
    }
    return Source(**{**source.__dict__, **changed})
