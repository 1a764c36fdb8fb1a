"""One MoE layer, or one product by experts, as a ggml graph on a device, through ggml's C functions: what a host computes,
without a model."""

from __future__ import annotations

import ctypes
import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import PluginError

P, I64, SIZE, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
GGML_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23, "FP8": 24, "BF16": 30,
    "MXFP4": 39, "NVFP4": 40,
}  # fmt: skip
GLU_SWIGLU = 2


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (P, [_InitParams]),
    "ggml_free": (None, [P]),
    "ggml_new_tensor_3d": (P, [P, INT, I64, I64, I64]),
    "ggml_new_tensor_2d": (P, [P, INT, I64, I64]),
    "ggml_view_2d": (P, [P, P, I64, I64, SIZE, SIZE]),
    "ggml_set_name": (P, [P, ctypes.c_char_p]),
    "ggml_mul_mat_id": (P, [P, P, P, P]),
    "ggml_swiglu_split": (P, [P, P, P]),
    "ggml_mul": (P, [P, P, P]),
    "ggml_add": (P, [P, P, P]),
    "ggml_new_graph": (P, [P]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_backend_dev_by_name": (P, [ctypes.c_char_p]),
    "ggml_backend_dev_init": (P, [P, ctypes.c_char_p]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [P, P]),
    "ggml_backend_alloc_ctx_tensors": (P, [P, P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [P]),
    "ggml_backend_tensor_set": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_tensor_get": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_graph_compute": (INT, [P, P]),
    "ggml_backend_buffer_free": (None, [P]),
    "ggml_backend_free": (None, [P]),
    "ggml_backend_dev_backend_reg": (P, [P]),
    "ggml_backend_reg_get_proc_address": (P, [P, ctypes.c_char_p]),
}


def _g(name: str) -> Any:
    return _native.ggml_function(name, *_SIGNATURES[name])


@dataclass(frozen=True)
class Shape:
    """A layer: n_embd -> n_ff -> n_embd, n_expert experts of which n_used serve a token."""

    n_embd: int
    n_ff: int
    n_expert: int
    n_used: int

    @property
    def n_out(self) -> int:
        return self.n_embd

    def weights(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each projection."""
        return {"gate": (self.n_ff, self.n_embd), "up": (self.n_ff, self.n_embd), "down": (self.n_embd, self.n_ff)}


class MatrixShape(Shape):
    """The up projection of a layer alone, one expert per token."""

    @property
    def n_out(self) -> int:
        return self.n_ff

    def weights(self) -> dict[str, tuple[int, int]]:
        return {"up": (self.n_ff, self.n_embd)}


class Unsupported(Exception):
    """The device does not compute such a layer: not an error, an engine that a comparison leaves out."""


class LayerGraph:
    """A layer for a fixed number of tokens on one device. `experts`: per projection the bytes of all experts (one array),
    or an ExpertTensor whose files hold them. `repacked`: weights lie in stock ggml's CPU_REPACK buffers, where the loader
    of llama.cpp puts types that it has interleaved layouts for."""

    def __init__(
        self,
        device: str,
        shape: Shape,
        kind: str,
        experts: dict[str, Any],
        n_tokens: int,
        n_threads: int,
        repacked: bool = False,
    ):
        self._shape, self._n_tokens = shape, n_tokens
        self._device = _g("ggml_backend_dev_by_name")(device.encode())
        self._backend = self._start(self._device, n_threads)
        self._weights_ctx = _g("ggml_init")(_InitParams(1 << 20, None, True))
        self._ctx = _g("ggml_init")(_InitParams(4 << 20, None, True))
        self._buffer = self._weights_buffer = None
        tensors = {}
        for name, (rows, k) in shape.weights().items():
            tensors[name] = _g("ggml_new_tensor_3d")(self._weights_ctx, GGML_TYPES[kind], k, rows, shape.n_expert)
            _g("ggml_set_name")(tensors[name], f"blk.0.ffn_{name}_exps.weight".encode())
        self._weights_buffer = self._allocate(experts, self._repack_buffer_type() if repacked else None)
        self._x = _g("ggml_new_tensor_3d")(self._ctx, 0, shape.n_embd, 1, n_tokens)
        self._ids = _g("ggml_new_tensor_2d")(self._ctx, 26, shape.n_used, n_tokens)
        self._weights = _g("ggml_new_tensor_3d")(self._ctx, 0, 1, shape.n_used, n_tokens)
        self._graph = _g("ggml_new_graph")(self._ctx)
        self._y = self._build(tensors)
        _g("ggml_build_forward_expand")(self._graph, self._y)
        self._buffer = _g("ggml_backend_alloc_ctx_tensors")(self._ctx, self._backend)
        for name, data in experts.items():
            if isinstance(data, np.ndarray):
                _g("ggml_backend_tensor_set")(tensors[name], data.ctypes.data, 0, data.nbytes)

    @staticmethod
    def _start(dev: Any, n_threads: int) -> Any:
        backend = _g("ggml_backend_dev_init")(dev, None)
        reg = _g("ggml_backend_dev_backend_reg")(dev)
        set_threads = _g("ggml_backend_reg_get_proc_address")(reg, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, P, INT)(set_threads)(backend, n_threads)
        return backend

    def _build(self, w: dict[str, Any]) -> Any:
        """The nodes that llama.cpp builds for such a layer, in its order."""
        s, ctx = self._shape, self._ctx
        up = self._product(w["up"])
        gate = _g("ggml_mul_mat_id")(ctx, w["gate"], self._x, self._ids)
        hidden = _g("ggml_swiglu_split")(ctx, gate, up)
        down = _g("ggml_mul_mat_id")(ctx, w["down"], hidden, self._ids)
        weighted = _g("ggml_mul")(ctx, down, self._weights)
        row = 4 * s.n_embd
        views = [
            _g("ggml_view_2d")(ctx, weighted, s.n_embd, self._n_tokens, row * s.n_used, row * i)
            for i in range(s.n_used)
        ]
        for view in views:  # before the sums, as llama.cpp does
            _g("ggml_build_forward_expand")(self._graph, view)
        y = views[0]
        for view in views[1:]:
            y = _g("ggml_add")(ctx, y, view)
        return y

    def _product(self, w: Any) -> Any:
        product = _g("ggml_mul_mat_id")(self._ctx, w, self._x, self._ids)
        if not _g("ggml_backend_dev_supports_op")(self._device, product):
            self.close()
            raise Unsupported
        return product

    def _repack_buffer_type(self) -> Any:
        reg = _g("ggml_backend_dev_backend_reg")(self._device)
        ask = _g("ggml_backend_reg_get_proc_address")(reg, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(ask)(self._device)
        for i in itertools.takewhile(lambda n: types[n], itertools.count()):
            if _g("ggml_backend_buft_name")(types[i]) == b"CPU_REPACK":
                return types[i]
        self.close()
        raise Unsupported

    def _allocate(self, experts: dict[str, Any], buffer_type: Any) -> Any:
        if buffer_type is not None:
            return _g("ggml_backend_alloc_ctx_tensors_from_buft")(self._weights_ctx, buffer_type)
        in_files = [e for e in experts.values() if not isinstance(e, np.ndarray)]
        if not in_files:
            return _g("ggml_backend_alloc_ctx_tensors")(self._weights_ctx, self._backend)
        table = _native.ExpertTable(copied=False)
        for tensor in in_files:
            table.add(tensor)
        with table:
            return _g("ggml_backend_alloc_ctx_tensors")(self._weights_ctx, self._backend)

    def set(self, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """x [n_tokens, n_embd], ids and weights [n_tokens, n_used]."""
        for tensor, data in ((self._x, x), (self._ids, ids), (self._weights, weights)):
            whole: NDArray[Any] = np.ascontiguousarray(data)
            _g("ggml_backend_tensor_set")(tensor, whole.ctypes.data, 0, whole.nbytes)

    def set_ids(self, ids: NDArray[np.int32]) -> None:
        _g("ggml_backend_tensor_set")(self._ids, ids.ctypes.data, 0, ids.nbytes)

    def run(self) -> float:
        """Seconds of one evaluation."""
        compute = _g("ggml_backend_graph_compute")
        start = time.perf_counter()
        status = compute(self._backend, self._graph)
        seconds = time.perf_counter() - start
        if status != 0:
            raise PluginError(f"the layer did not run (status {status}): see the log above")
        return seconds

    def output(self) -> NDArray[np.float32]:
        y = np.empty((self._n_tokens, self._shape.n_out), np.float32)
        _g("ggml_backend_tensor_get")(self._y, y.ctypes.data, 0, y.nbytes)
        return y

    def close(self) -> None:
        for buffer in (self._buffer, self._weights_buffer):
            if buffer:
                _g("ggml_backend_buffer_free")(buffer)
        _g("ggml_free")(self._ctx)
        _g("ggml_free")(self._weights_ctx)
        _g("ggml_backend_free")(self._backend)


class MatrixGraph(LayerGraph):
    """One MUL_MAT_ID."""

    def _build(self, w: dict[str, Any]) -> Any:
        return self._product(w["up"])
