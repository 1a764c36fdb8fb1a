"""Expert weights of a benchmark: their bytes, and their values by other decoders than the kernels'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..checkpoint import ExpertTensor
from ..checkpoint.fp8 import E4M3


@dataclass(frozen=True)
class Experts:
    """One projection of all experts: copies of the first, each with bytes of its own, so that no cache serves two."""

    kind: str
    codes: NDArray[np.uint8]  # [n_expert, rows, row bytes]
    in_files: ExpertTensor | None  # FP8: where codes and scales lie

    @property
    def for_graph(self) -> Any:
        return self.codes if self.in_files is None else self.in_files

    @property
    def bytes_per_expert(self) -> int:
        scales = 0 if self.in_files is None or self.in_files.scales is None else self.in_files.scales[0].n_bytes
        return self.codes[0].nbytes + scales

    def scales(self) -> NDArray[np.float32] | None:
        """FP8: [grid rows, grid columns] of an expert."""
        return None if self.in_files is None else self.in_files.read_scales()[0]

    def values(self) -> NDArray[np.float32]:
        """[rows, k] of an expert: E4M3 by its table, the others by gguf's decoders."""
        scales = self.scales()
        if scales is None or self.in_files is None or self.in_files.block is None:
            return np.asarray(gguf.quants.dequantize(self.codes[0], gguf.GGMLQuantizationType[self.kind]), np.float32)
        block, (rows, k) = self.in_files.block, self.codes[0].shape
        wide = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :k]
        return np.asarray(np.take(E4M3, self.codes[0]) * wide, np.float32)
