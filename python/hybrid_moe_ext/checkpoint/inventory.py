"""Sorts a checkpoint's tensors into experts and dense tensors and checks every one of them. Reads headers only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from ..errors import CheckpointError
from .dense import DenseTensor
from .family import Family, HeadSlice, Rule
from .fp8 import read_scale
from .quantization import Block, Fp8, grid_shape
from .safetensors import TensorRef

FLOATS = ("BF16", "F16", "F32")
EXPERT_TYPES = {"F8_E4M3": Type.I8, "BF16": Type.BF16, "F16": Type.F16, "F32": Type.F32}
# Static scales for quantising activations, in place of X.weight: here activations keep their precision, so a product needs
# none, and is closer to the unquantised model without.
ACTIVATION_SCALES = (".input_scale", ".activation_scale")


@dataclass(frozen=True)
class ExpertTensor:
    """One projection of all experts of a layer: [n_expert, n_rows, k], the bytes of each expert where they lie."""

    name: str  # GGUF name
    ggml_type: Type  # I8 stands for E4M3 codes, which ggml has no type for
    n_expert: int
    n_rows: int
    k: int
    codes: tuple[TensorRef, ...]
    scales: tuple[TensorRef, ...] | None  # FP8 only, one scale per block for each expert, in quantization.SCALE_DTYPES
    block: Block | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n_expert, self.n_rows, self.k

    @property
    def n_bytes(self) -> int:
        return sum(ref.n_bytes for ref in self.codes)

    def read_scales(self) -> NDArray[np.float32]:
        """[n_expert, grid rows, grid columns]; raises CheckpointError if one is not finite."""
        assert self.scales is not None and self.block is not None
        grid = grid_shape(self.n_rows, self.k, self.block)
        return np.stack([read_scale(ref, grid) for ref in self.scales])


@dataclass(frozen=True)
class Inventory:
    dense: list[DenseTensor]
    experts: list[ExpertTensor]
    skipped: list[str]  # released tensors that are left out: multi-token prediction


@dataclass(frozen=True)
class _Taken:
    """A released tensor and, if it is FP8, its scale and the weights that share one."""

    ref: TensorRef
    scale: TensorRef | None = None
    block: Block | None = None


class _Stock:
    """The released tensors that nobody has claimed yet."""

    def __init__(self, directory: Path, tensors: dict[str, TensorRef], fp8: Fp8 | None):
        self.directory = directory
        self.tensors = dict(tensors)
        self.fp8 = fp8

    def take(self, name: str, shape: tuple[int, ...]) -> _Taken:
        """A tensor that exists, is of a type fit for its role, and of the right shape; so is its scale."""
        ref = self.tensors.pop(name, None)
        if ref is None:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing: download the checkpoint again")
        allowed = (*FLOATS, "F8_E4M3") if len(shape) == 2 else FLOATS
        if ref.dtype not in allowed:
            raise CheckpointError(
                f"{ref.path}: tensor {name!r} is {ref.dtype}, but must be {', '.join(allowed)}:"
                f" get an FP8 or BF16 release"
            )
        if ref.shape != shape:
            raise CheckpointError(
                f"{ref.path}: tensor {name!r} has the shape {list(ref.shape)}, but must have {list(shape)} (config.json"
                f" asks for it): config.json and weights do not belong together, download both again"
            )
        return _Taken(ref) if ref.dtype != "F8_E4M3" else self._with_scale(ref)

    def _with_scale(self, ref: TensorRef) -> _Taken:
        if self.fp8 is None:
            raise CheckpointError(
                f"{ref.path}: tensor {ref.name!r} is F8_E4M3, but config.json has no quantization_config:"
                f" use the config.json of the FP8 release, it says how the scales are stored"
            )
        for suffix in ACTIVATION_SCALES:
            self.tensors.pop(ref.name.removesuffix(".weight") + suffix, None)
        names = [ref.name + suffix for suffix in self.fp8.suffixes]
        found = [scale for name in names if (scale := self.tensors.pop(name, None)) is not None]
        if len(found) != 1:
            what = "are both there: which one counts cannot be told" if found else "is missing"
            raise CheckpointError(
                f"{ref.path}: tensor {ref.name!r} is F8_E4M3, but its scale {' or '.join(map(repr, names))} {what}:"
                f" download the checkpoint again"
            )
        return _Taken(ref, found[0], self.fp8.block_of(ref, found[0]))


def take_inventory(
    directory: Path, family: Family, h: Any, tensors: dict[str, TensorRef], fp8: Fp8 | None
) -> Inventory:
    """Claims every tensor that the family's rules ask for; what is left over must be ignorable."""
    stock = _Stock(directory, tensors, fp8)
    names = gguf.get_tensor_name_map(family.gguf_arch, h.n_layer)
    dense: list[DenseTensor] = []
    experts: list[ExpertTensor] = []
    for name, rule in family.model_tensors(h).items():
        dense += _dense(stock, names, "", name, rule)
    for layer in range(h.n_layer):
        prefix = family.layer_prefix.format(layer=layer)
        for name, rule in family.layer_tensors(h, layer).items():
            dense += _dense(stock, names, prefix, name, rule)
        for projection, shape in family.expert_shapes(h, layer).items():
            experts.append(_experts(stock, names, family, prefix, projection, shape, h.n_expert))
    skipped = [name for name in stock.tensors if _may_be_skipped(family, h, name)]
    for name in stock.tensors.keys() - set(skipped):
        raise CheckpointError(
            f"{stock.tensors[name].path}: tensor {name!r} has no place in {family.hf_arch} as config.json describes it:"
            f" the weights may be of another model or method than config.json says"
        )
    return Inventory(dense, experts, skipped)


def _may_be_skipped(family: Family, h: Any, name: str) -> bool:
    layer = re.match(re.escape(family.layer_prefix).replace(r"\{layer\}", r"(\d+)"), name)
    if layer and int(layer[1]) >= h.n_layer:
        return True
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)


def _gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    name = re.sub(r"\.e_score_correction_bias$", ".e_score_correction.bias", name)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"gguf has no name for {name}"  # a mistake in a family's declarations
    return str(found)


def _dense(stock: _Stock, names: gguf.TensorNameMap, prefix: str, name: str, rule: Rule) -> list[DenseTensor]:
    taken = stock.take(prefix + name, rule.shape)

    def tensor(released: str, cut: HeadSlice | None = None) -> DenseTensor:
        to = _gguf_name(names, released)
        return DenseTensor(to, rule.part, taken.ref, taken.scale, taken.block, rule.f32, cut)

    if not rule.slices:
        return [tensor(taken.ref.name)]
    return [tensor(prefix + cut.name, cut) for cut in rule.slices]


def _experts(
    stock: _Stock,
    names: gguf.TensorNameMap,
    family: Family,
    prefix: str,
    projection: str,
    shape: tuple[int, int],
    n_expert: int,
) -> ExpertTensor:
    released = [prefix + family.expert_name.format(expert=i, projection=projection) for i in range(n_expert)]
    taken = [stock.take(name, shape) for name in released]
    first = taken[0]
    for other in taken:
        _check_same(other.ref, first.ref, other.ref.dtype, first.ref.dtype)
        if other.scale is not None and first.scale is not None:
            _check_same(other.scale, first.scale, other.scale.dtype, first.scale.dtype)
            _check_same(other.scale, first.scale, list(other.scale.shape), list(first.scale.shape))
    return ExpertTensor(
        name=_gguf_name(names, prefix + family.merged_name.format(projection=projection)),
        ggml_type=EXPERT_TYPES[first.ref.dtype],
        n_expert=n_expert,
        n_rows=shape[0],
        k=shape[1],
        codes=tuple(one.ref for one in taken),
        scales=tuple(one.scale for one in taken if one.scale is not None) or None,
        block=first.block,
    )


def _check_same(ref: TensorRef, other: TensorRef, found: object, wanted: object) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{ref.path}: tensor {ref.name!r} is {found}, but {other.name!r} is {wanted}:"
            f" the experts of a layer must have one type, download the checkpoint again"
        )
