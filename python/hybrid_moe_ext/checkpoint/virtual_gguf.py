"""A GGUF that exists only as a map: generated header, dense tensors converted when read, experts where they lie."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from ..errors import CheckpointError, OptionError
from .dense import DENSE_TYPES, DenseTensor
from .inventory import ExpertTensor
from .safetensors import TensorRef

# Also the size of stream.py's stdio buffer: fseeko rounds down to a multiple of that and would read up to the target,
# so every tensor starts on one. Padding costs nothing in a file that does not exist, and write() leaves it sparse.
ALIGNMENT = 256 << 10
ELEMENTS_PER_TASK = 1 << 20
ELEMENTS_PER_STEP = 1 << 17  # float32 temporaries of 512 KiB: tried 16 K .. 1 M, smaller and larger were slower
WRITE_BYTES = 64 << 20


@dataclass(frozen=True)
class Region:
    """Bytes [start, start + n_bytes) of the GGUF. `tensor` is None for the header."""

    start: int
    n_bytes: int
    tensor: DenseTensor | ExpertTensor | None
    type: Type | None = None


class VirtualGguf:
    """Reads like a GGUF file. Expert bytes are left to whoever maps them, unless `with_experts` asks for them."""

    def __init__(
        self,
        write_metadata: Callable[[gguf.GGUFWriter], None],
        architecture: gguf.MODEL_ARCH,
        dense: list[DenseTensor],
        experts: list[ExpertTensor],
        dense_type: str = "bf16",
        alignment: int = ALIGNMENT,
    ):
        if dense_type not in DENSE_TYPES:
            raise OptionError(f"dense_type {dense_type!r} is not known: choose {', '.join(DENSE_TYPES)}")
        self.dense_type = dense_type
        self.experts = experts
        self.alignment = alignment
        self.tensors: list[tuple[DenseTensor | ExpertTensor, Type]] = [(t, t.out_type(dense_type)) for t in dense]
        self.tensors += [(t, t.ggml_type) for t in experts]
        self._write_metadata = write_metadata
        self._architecture = architecture
        self._header = _header(write_metadata, architecture, self.tensors, alignment)
        self.regions = [Region(0, len(self._header), None)]
        offset = len(self._header)
        for tensor, type_ in self.tensors:
            n_bytes = _n_bytes(tensor, type_)
            self.regions.append(Region(offset, n_bytes, tensor, type_))
            offset += -(-n_bytes // alignment) * alignment
        self.size = offset
        self._starts = [region.start for region in self.regions]
        n_threads = min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(n_threads, "dense-convert") if n_threads > 1 else None

    def file(
        self,
        tensors: list[tuple[DenseTensor | ExpertTensor, Type]],
        write_fields: Callable[[gguf.GGUFWriter], None],
        with_metadata: bool,
        alignment: int,
    ) -> VirtualGguf:
        """Some of this model's tensors as a GGUF of its own. What `write_fields` adds comes first in it."""

        def write_metadata(w: gguf.GGUFWriter) -> None:
            architecture, w.kv_data[0] = w.kv_data[0], {}
            write_fields(w)
            w.kv_data[0] |= architecture
            if with_metadata:
                self._write_metadata(w)

        dense = [tensor for tensor, _ in tensors if isinstance(tensor, DenseTensor)]
        experts = [tensor for tensor, _ in tensors if isinstance(tensor, ExpertTensor)]
        return VirtualGguf(write_metadata, self._architecture, dense, experts, self.dense_type, alignment)

    def region_at(self, offset: int) -> Region:
        """The region that holds a byte; the padding after a region belongs to it."""
        return self.regions[bisect_right(self._starts, offset) - 1]

    def end_of(self, region: Region) -> int:
        """Where the next region starts."""
        return region.start + -(-region.n_bytes // self.alignment) * self.alignment

    def is_expert_range(self, offset: int, n: int) -> bool:
        """Whether all of [offset, offset + n) is one expert tensor's bytes."""
        region = self.region_at(offset)
        return isinstance(region.tensor, ExpertTensor) and offset + n <= region.start + region.n_bytes

    def read(self, offset: int, n: int, with_experts: bool = False) -> bytes:
        """Up to n bytes from `offset`, short only at the end of the file."""
        n = max(0, min(n, self.size - offset))
        out = np.zeros(n, np.uint8)
        skipped = self.read_into(offset, out, with_experts)
        assert not skipped, f"bytes {offset} to {offset + n} touch an expert tensor, which its owner maps"
        return out.tobytes()

    def read_into(self, offset: int, out: NDArray[np.uint8], with_experts: bool = False) -> int:
        """Fills `out` with the file's bytes; leaves an expert's bytes in it untouched and returns how many it left."""
        done = n_left = 0
        while done < len(out):
            region = self.region_at(offset + done)
            first = offset + done - region.start
            if first >= region.n_bytes:  # padding up to the next tensor
                n = min(len(out) - done, -first % self.alignment)
                out[done : done + n] = 0
            else:
                n = min(len(out) - done, region.n_bytes - first)
                if isinstance(region.tensor, ExpertTensor) and not with_experts:
                    n_left += n
                else:
                    self._fill(region, first, out[done : done + n])
            done += n
        return n_left

    def write(self, path: str | os.PathLike[str]) -> None:
        """A real GGUF file, experts included. Experts in FP8 become I8 codes; their scales are not in the file."""
        with open(path, "wb") as file:
            for region in self.regions:
                for first in range(0, region.n_bytes, WRITE_BYTES):
                    out = np.empty(min(WRITE_BYTES, region.n_bytes - first), np.uint8)
                    self._fill(region, first, out)
                    file.seek(region.start + first)
                    file.write(out.data)
            file.truncate(self.size)

    def _fill(self, region: Region, first: int, out: NDArray[np.uint8]) -> None:
        if region.tensor is None:
            out[:] = np.frombuffer(self._header, np.uint8, len(out), first)
        elif isinstance(region.tensor, ExpertTensor):
            _fill_experts(region.tensor, first, out)
        else:
            self._fill_dense(region.tensor, region, first, out)

    def _fill_dense(self, tensor: DenseTensor, region: Region, first: int, out: NDArray[np.uint8]) -> None:
        """Converts the units that bytes [first, first + len(out)) touch, several at a time on a few threads."""
        assert region.type is not None
        unit_bytes = region.n_bytes // tensor.n_units
        unit_elements = max(1, int(np.prod(tensor.shape)) // tensor.n_units)
        begin, end = first // unit_bytes, -(-(first + len(out)) // unit_bytes)
        step = max(1, ELEMENTS_PER_STEP // unit_elements)

        def convert(task: tuple[int, int]) -> None:
            for unit, data in tensor.convert(region.type, *task, step):
                at = unit * unit_bytes - first  # where these units start in `out`; edges may stick out
                low, high = max(at, 0), min(at + len(data), len(out))
                out[low:high] = data[low - at : high - at]

        per_task = max(step, ELEMENTS_PER_TASK // unit_elements)
        tasks = [(unit, min(unit + per_task, end)) for unit in range(begin, end, per_task)]
        if self._pool is None or len(tasks) == 1:
            for task in tasks:
                convert(task)
        else:
            list(self._pool.map(convert, tasks))


def _n_bytes(tensor: DenseTensor | ExpertTensor, type_: Type) -> int:
    return tensor.n_bytes(type_) if isinstance(tensor, DenseTensor) else tensor.n_bytes


def _fill_experts(tensor: ExpertTensor, first: int, out: NDArray[np.uint8]) -> None:
    n_expert_bytes = tensor.codes[0].n_bytes
    done = 0
    while done < len(out):
        expert, at = divmod(first + done, n_expert_bytes)
        n = min(len(out) - done, n_expert_bytes - at)
        _read_into(tensor.codes[expert], at, out[done : done + n])
        done += n


def _read_into(ref: TensorRef, first: int, out: NDArray[np.uint8]) -> None:
    """A tensor's stored bytes from `first` on."""
    view = out.data
    try:
        with open(ref.path, "rb", buffering=0) as file:
            while view:
                n_read = os.preadv(file.fileno(), [view], ref.offset + first + len(out) - len(view))
                if n_read == 0:
                    raise CheckpointError(
                        f"{ref.path}: tensor {ref.name!r} ends early: the file has changed, open it again"
                    )
                view = view[n_read:]
    except OSError as error:
        raise CheckpointError(f"{ref.path}: tensor {ref.name!r} cannot be read ({error.strerror})") from error


def _header(
    write_metadata: Callable[[gguf.GGUFWriter], None],
    architecture: gguf.MODEL_ARCH,
    tensors: list[tuple[DenseTensor | ExpertTensor, Type]],
    alignment: int,
) -> bytes:
    """Everything before the first tensor, padded; gguf's writer can only write files, so it writes one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        w = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
        w.add_custom_alignment(alignment)
        write_metadata(w)
        for tensor, type_ in tensors:
            w.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), _n_bytes(tensor, type_), raw_dtype=type_)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        w.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % alignment)
