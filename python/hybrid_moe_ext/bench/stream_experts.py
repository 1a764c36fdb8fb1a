"""The experts of a chain of layers: every tensor at addresses of its own, but so many bytes of memory only as one chooses.
The same pages are mapped again and again, so that a chain of any length fits."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..checkpoint import ExpertTensor, TensorRef
from ..checkpoint.fp8 import E4M3
from ..errors import OptionError, PluginError
from .graph import GGML_TYPES, Shape
from .layer import random_codes
from .stream_ggml import P, context, g

BLOCK = 128  # rows and columns under one FP8 scale
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = P
_libc.mmap.argtypes = [P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [P, ctypes.c_size_t]
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _FAILED = 0, 0x10, 0x4000, 2**64 - 1


def block_of(kind: str) -> tuple[int, int]:
    """Values and bytes that belong together."""
    return (1, 1) if kind == "FP8" else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def row_bytes(kind: str, k: int) -> int:
    n, n_bytes = block_of(kind)
    return k // n * n_bytes


class StreamExperts:
    """Tensors of n_layers layers in the plug-in's buffer type, and their values for a check. `experts_memory` as in Options: the
    same bytes are copied or pinned once."""

    def __init__(self, shape: Shape, kind: str, n_layers: int, memory_bytes: int, experts_memory: str = "mmap"):
        for name, (_, k) in shape.weights().items():
            if k % block_of(kind)[0]:
                raise OptionError(
                    f"{kind} has blocks of {block_of(kind)[0]} values: {name} of {k} columns is impossible"
                )
        self.shape, self.kind, self.n_layers = shape, kind, n_layers
        self._unit = math.lcm(mmap.PAGESIZE, block_of(kind)[1])
        largest = max(rows * row_bytes(kind, k) for rows, k in shape.weights().values())
        wanted = max(min(memory_bytes, sum(self._room(name) for name in shape.weights())), largest)
        self.n_bytes = -(-wanted // self._unit) * self._unit
        self._fd = os.memfd_create("hybrid-moe-bench")
        self._ctx = context(1 << 20)
        self._region = self._size = 0
        self._buffer: Any = None
        self._scales: dict[str, NDArray[np.float32]] = {}
        self.tensors: list[dict[str, Any]] = []
        try:
            self._fill()
            self._place(experts_memory)
        except BaseException:
            self.close()
            raise

    def _place(self, experts_memory: str) -> None:
        self.tensors = [self._new_tensors(i) for i in range(self.n_layers)]
        _native.check(_native.library().hybrid_moe_choose_experts_memory(experts_memory.encode()))
        try:
            self._place_scattered() if self.kind == "FP8" else self._place_mapped()
        finally:
            _native.library().hybrid_moe_choose_experts_memory(None)

    def _fill(self) -> None:
        n_values, n_bytes = block_of(self.kind)
        os.ftruncate(self._fd, self.n_bytes)
        rng = np.random.default_rng(0)
        one = random_codes(self.kind, 1 << 20, n_values, 1, rng).reshape(-1)[: self.n_bytes]
        one = one[: len(one) // n_bytes * n_bytes]
        with mmap.mmap(self._fd, self.n_bytes) as file:
            for at in range(0, self.n_bytes, len(one)):
                part = one[: self.n_bytes - at]
                file[at : at + len(part)] = part.tobytes()

    def _new_tensors(self, i_layer: int) -> dict[str, Any]:
        tensors = {}
        for name, (rows, k) in self.shape.weights().items():
            tensors[name] = g("ggml_new_tensor_3d")(self._ctx, GGML_TYPES[self.kind], k, rows, self.shape.n_expert)
            g("ggml_set_name")(tensors[name], self._full_name(i_layer, name).encode())
        return tensors

    @staticmethod
    def _full_name(i_layer: int, name: str) -> str:
        return f"blk.{i_layer}.ffn_{name}_exps.weight"

    def _tensor_bytes(self, name: str) -> int:
        rows, k = self.shape.weights()[name]
        return self.shape.n_expert * rows * row_bytes(self.kind, k)

    def _room(self, name: str) -> int:
        """Addresses that a tensor takes: the next one begins where blocks and pages do."""
        return -(-self._tensor_bytes(name) // self._unit) * self._unit

    def _place_mapped(self) -> None:
        """One range of addresses, as a mapped model has it, made of the same pages over and over."""
        self._size = self.n_layers * sum(self._room(name) for name in self.shape.weights())
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        region = _libc.mmap(None, self._size, _PROT_NONE, flags, -1, 0)
        if region == _FAILED:
            raise PluginError(
                f"{self._size >> 20} MiB of addresses for the experts cannot be had: choose fewer --layers"
            )
        self._region = region
        for at in range(0, self._size, self.n_bytes):
            n = min(self.n_bytes, self._size - at)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            if _libc.mmap(region + at, n, protection, mmap.MAP_SHARED | _MAP_FIXED, self._fd, 0) == _FAILED:
                raise PluginError("the experts cannot be mapped: choose fewer --layers or more --memory-mib")
        self._buffer = g("ggml_backend_dev_buffer_from_host_ptr")(
            _native.device_handle(), region, self._size, max(self._tensor_bytes(name) for name in self.shape.weights())
        )
        if not self._buffer:
            raise PluginError("the plug-in did not take the experts' memory: see --verbose")
        at = region
        for tensors in self.tensors:
            for name, tensor in tensors.items():
                if g("ggml_backend_tensor_alloc")(self._buffer, tensor, at) != 0:
                    raise PluginError("the plug-in did not take an expert tensor: see --verbose")
                at += self._room(name)

    def _place_scattered(self) -> None:
        """FP8: from a file, expert by expert, each with its scales, as a checkpoint has them."""
        path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        scales = self._write_scales(path)
        table = _native.ExpertTable(copied=False)
        n = self.shape.n_expert
        for i_layer in range(self.n_layers):
            for name, (rows, k) in self.shape.weights().items():
                codes = tuple(
                    TensorRef(name, path, "F8_E4M3", (rows, k), self._piece_offset(i_layer, name, e), rows * k)
                    for e in range(n)
                )
                full, dtype = self._full_name(i_layer, name), gguf.GGMLQuantizationType.I8
                table.add(ExpertTensor(full, dtype, n, rows, k, codes, (scales[name],) * n, (BLOCK, BLOCK)))
        with table:
            buffer_type = g("ggml_backend_dev_buffer_type")(_native.device_handle())
            self._buffer = g("ggml_backend_alloc_ctx_tensors_from_buft")(self._ctx, buffer_type)
        if not self._buffer:
            raise PluginError("the plug-in gives no memory for the experts: see --verbose")

    def _write_scales(self, path: Path) -> dict[str, TensorRef]:
        """One grid per projection, behind the codes."""
        rng, at, refs = np.random.default_rng(1), self.n_bytes, {}
        for name, (rows, k) in self.shape.weights().items():
            grid = rng.uniform(1e-4, 2e-4, (-(-rows // BLOCK), -(-k // BLOCK))).astype(np.float32)
            os.pwrite(self._fd, grid.tobytes(), at)
            refs[name] = TensorRef(name, path, "F32", grid.shape, at, grid.nbytes)
            self._scales[name] = grid
            at += grid.nbytes
        return refs

    def _piece_offset(self, i_layer: int, name: str, i_expert: int) -> int:
        """FP8: where an expert's codes begin in the file."""
        rows, k = self.shape.weights()[name]
        i_tensor = len(self.shape.weights()) * i_layer + list(self.shape.weights()).index(name)
        return (i_tensor * self.shape.n_expert + i_expert) % (self.n_bytes // (rows * k)) * rows * k

    def values(self, i_layer: int, name: str, i_expert: int) -> NDArray[np.float32]:
        """[rows, k] of an expert, by other decoders than the plug-in's."""
        rows, k = self.shape.weights()[name]
        n = rows * row_bytes(self.kind, k)
        if self.kind == "FP8":
            codes = os.pread(self._fd, n, self._piece_offset(i_layer, name, i_expert))
            scales = np.repeat(np.repeat(self._scales[name], BLOCK, 0), BLOCK, 1)[:rows, :k]
            return np.asarray(np.take(E4M3, np.frombuffer(codes, np.uint8).reshape(rows, k)) * scales, np.float32)
        raw = np.frombuffer(ctypes.string_at(self.address(i_layer, name) + i_expert * n, n), np.uint8)
        return np.asarray(
            gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[self.kind]), np.float32
        )

    def address(self, i_layer: int, name: str) -> int:
        """Of a tensor's bytes; not for FP8, whose experts are scattered."""
        rooms = {other: self._room(other) for other in self.shape.weights()}
        before = 0
        for other, room in rooms.items():
            if other == name:
                break
            before += room
        return self._region + i_layer * sum(rooms.values()) + before

    def close(self) -> None:
        if self._buffer:
            g("ggml_backend_buffer_free")(self._buffer)
        g("ggml_free")(self._ctx)
        if self._region:
            _libc.munmap(self._region, self._size)
        os.close(self._fd)
        self._buffer, self._region = None, 0
