"""One tensor outside the experts: its place in the GGUF, and the conversion of any piece. Experts: inventory.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from .family import HeadSlice
from .fp8 import dequantise_rows, f32_to_bf16, read_elements, read_scale, to_f32
from .quantization import Block, grid_shape
from .safetensors import TensorRef

DENSE_TYPES = {"bf16": Type.BF16, "q8_0": Type.Q8_0, "f32": Type.F32}


@dataclass(frozen=True)
class DenseTensor:
    """A GGUF tensor made from (part of) one released tensor.

    It is converted in *units*, the smallest pieces that can be made alone: a row, or for a slice of heads one head.
    """

    name: str  # GGUF name
    part: str  # attention | ffn | embeddings
    source: TensorRef
    scale: TensorRef | None  # FP8 sources only
    block: Block | None
    f32: bool  # stays float32 whatever dense_type says
    cut: HeadSlice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, like NumPy; GGUF writes it the other way round."""
        if self.cut is None:
            return self.source.shape
        k = self.source.shape[1]
        inner = (k, self.cut.n_rows) if self.cut.transpose else (self.cut.n_rows, k)
        return (self.cut.n_head, *inner)

    @property
    def n_units(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    def out_type(self, dense_type: str) -> Type:
        wanted = DENSE_TYPES[dense_type]
        if self.f32 or len(self.shape) == 1:
            return Type.F32
        if wanted == Type.Q8_0 and self.shape[-1] % 32:
            return Type.BF16
        return wanted

    def n_bytes(self, out: Type) -> int:
        n_per_block, block_bytes = gguf.GGML_QUANT_SIZES[out]
        return math.prod(self.shape) // int(n_per_block) * int(block_bytes)

    def convert(self, out: Type, first: int, end: int, step: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(unit, bytes from this unit on as they stand in the GGUF) for units [first, end), `step` at a time."""
        as_stored = self.cut is None and self._is_as_stored(out)
        scale = self._read_scale()
        n_unit = math.prod(self.shape) // self.n_units
        for unit in range(first, end, step):
            count = min(step, end - unit)
            if as_stored:
                data = read_elements(self.source, unit * n_unit, count * n_unit)
            else:
                data = self._values(unit, count, scale)
                if out == Type.BF16:
                    data = f32_to_bf16(data)
                elif out != Type.F32:
                    data = gguf.quants.quantize(data, out)
            yield unit, data.reshape(-1).view(np.uint8)

    def _read_scale(self) -> NDArray[np.float32] | None:
        if self.scale is None or self.block is None:
            return None
        rows, k = self.source.shape
        return read_scale(self.scale, grid_shape(rows, k, self.block))

    def _is_as_stored(self, out: Type) -> bool:
        return bool(self.source.dtype == out.name)

    def _values(self, first: int, count: int, scale: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Units as float32, contiguous, last axis = GGUF row."""
        if self.cut is None:
            return self._rows(first, count, scale)
        per_head = self.source.shape[0] // self.cut.n_head
        heads = []
        for i_head in range(first, first + count):
            head = self._rows(i_head * per_head + self.cut.first, self.cut.n_rows, scale)
            heads.append(head.T if self.cut.transpose else head)
        return np.ascontiguousarray(np.concatenate(heads))

    def _rows(self, first: int, count: int, scale: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Rows of the released matrix; a vector is one row."""
        k = self.source.shape[-1]
        data = read_elements(self.source, first * k, count * k).reshape(count, k)
        if scale is None:
            return to_f32(self.source, data)
        assert self.block is not None
        return dequantise_rows(self.source, data, scale, self.block, first)
