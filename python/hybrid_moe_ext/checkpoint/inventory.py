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
from .config import Fp8
from .dense import DenseTensor
from .family import Family, Rule
from .fp8 import grid_shape, read_scale
from .safetensors import TensorRef

FLOATS = ("BF16", "F16", "F32")
EXPERT_TYPES = {"F8_E4M3": Type.I8, "BF16": Type.BF16, "F16": Type.F16, "F32": Type.F32}
SCALE_DTYPES = ("F32", "BF16")
SCALE_SUFFIX = "_scale_inv"  # multiply by it, despite the name


@dataclass(frozen=True)
class ExpertTensor:
    """One projection of all experts of a layer: [n_expert, n_rows, k], the bytes of each expert where they lie."""

    name: str  # GGUF name
    ggml_type: Type  # I8 stands for E4M3 codes, which ggml has no type for
    n_expert: int
    n_rows: int
    k: int
    codes: tuple[TensorRef, ...]
    scales: tuple[TensorRef, ...] | None  # FP8 only, F32 or BF16 [grid rows, grid columns] per expert
    block: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n_expert, self.n_rows, self.k

    @property
    def n_bytes(self) -> int:
        return sum(ref.n_bytes for ref in self.codes)

    def read_scales(self) -> NDArray[np.float32]:
        """[n_expert, grid rows, grid columns]; raises CheckpointError if one is not finite."""
        assert self.scales is not None
        return np.stack([read_scale(ref) for ref in self.scales])


@dataclass(frozen=True)
class Inventory:
    dense: list[DenseTensor]
    experts: list[ExpertTensor]
    skipped: list[str]  # released tensors that are left out: multi-token prediction


class _Stock:
    """The released tensors that nobody has claimed yet."""

    def __init__(self, directory: Path, tensors: dict[str, TensorRef], fp8: Fp8 | None):
        self.directory = directory
        self.tensors = dict(tensors)
        self.fp8 = fp8

    def take(self, name: str, shape: tuple[int, ...]) -> tuple[TensorRef, TensorRef | None]:
        """A tensor and, if it is FP8, its scale: existing, of a type fit for its role, and of the right shape."""
        ref = self.tensors.pop(name, None)
        if ref is None:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing: download the checkpoint again")
        allowed = (*FLOATS, "F8_E4M3") if len(shape) == 2 else FLOATS
        if ref.dtype not in allowed:
            raise CheckpointError(
                f"{ref.path}: tensor {name!r} is {ref.dtype}, but must be {', '.join(allowed)}:"
                f" get an FP8 or BF16 release"
            )
        _check_shape(ref, shape, "config.json asks for it")
        if ref.dtype != "F8_E4M3":
            return ref, None
        return ref, self._take_scale(ref)

    def _take_scale(self, ref: TensorRef) -> TensorRef:
        if self.fp8 is None:
            raise CheckpointError(
                f"{ref.path}: tensor {ref.name!r} is F8_E4M3, but config.json has no quantization_config:"
                f" use the config.json of the FP8 release, its weight_block_size is needed"
            )
        scale = self.tensors.pop(ref.name + SCALE_SUFFIX, None)
        if scale is None:
            raise CheckpointError(
                f"{ref.path}: tensor {ref.name!r} is F8_E4M3, but {ref.name + SCALE_SUFFIX!r} is missing:"
                f" download the checkpoint again"
            )
        if scale.dtype not in SCALE_DTYPES:
            raise CheckpointError(f"{scale.path}: scale {scale.name!r} is {scale.dtype}, but must be F32 or BF16")
        rule = f"one scale per block of {self.fp8.block[0]}x{self.fp8.block[1]}"
        _check_shape(scale, grid_shape(ref.shape[0], ref.shape[1], self.fp8.block), rule)
        return scale


def _check_shape(ref: TensorRef, shape: tuple[int, ...], rule: str) -> None:
    if ref.shape != shape:
        raise CheckpointError(
            f"{ref.path}: tensor {ref.name!r} has the shape {list(ref.shape)}, but must have {list(shape)} ({rule}):"
            f" config.json and weights do not belong together, download both again"
        )


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
    ref, scale = stock.take(prefix + name, rule.shape)
    block = stock.fp8.block if scale is not None and stock.fp8 else None
    if not rule.slices:
        return [DenseTensor(_gguf_name(names, ref.name), rule.part, ref, scale, block, rule.f32)]
    return [
        DenseTensor(_gguf_name(names, prefix + cut.name), rule.part, ref, scale, block, rule.f32, cut)
        for cut in rule.slices
    ]


def _experts(
    stock: _Stock,
    names: gguf.TensorNameMap,
    family: Family,
    prefix: str,
    projection: str,
    shape: tuple[int, int],
    n_expert: int,
) -> ExpertTensor:
    codes, scales = [], []
    for expert in range(n_expert):
        ref, scale = stock.take(prefix + family.expert_name.format(expert=expert, projection=projection), shape)
        codes.append(ref)
        if scale is not None:
            scales.append(scale)
        for part in (codes, scales):
            if part and part[-1].dtype != part[0].dtype:
                raise CheckpointError(
                    f"{part[-1].path}: tensor {part[-1].name!r} is {part[-1].dtype}, but {part[0].name!r} is"
                    f" {part[0].dtype}: the experts of a layer must have one type, download the checkpoint again"
                )
    return ExpertTensor(
        name=_gguf_name(names, prefix + family.merged_name.format(projection=projection)),
        ggml_type=EXPERT_TYPES[codes[0].dtype],
        n_expert=n_expert,
        n_rows=shape[0],
        k=shape[1],
        codes=tuple(codes),
        scales=tuple(scales) or None,
        block=stock.fp8.block if scales and stock.fp8 else None,
    )
