"""What a host does with the simulated GPU, through ggml's C interface in llama-cpp-python. For child processes: a process
reads SIMGPU_* once. A helper, not a test."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

P, I64, SIZE, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
SUCCESS, FAILED = 0, -1
F32, I32 = 0, 26


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


def function(name: str, result: Any, *arguments: Any) -> Any:
    """From the copy of ggml that libllama itself is bound to."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, C._lib))


load = function("ggml_backend_load", P, ctypes.c_char_p)
dev_by_name = function("ggml_backend_dev_by_name", P, ctypes.c_char_p)
dev_init = function("ggml_backend_dev_init", P, P, ctypes.c_char_p)
dev_type = function("ggml_backend_dev_type", INT, P)
dev_memory = function("ggml_backend_dev_memory", None, P, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE))
dev_buffer_type = function("ggml_backend_dev_buffer_type", P, P)
dev_host_buffer_type = function("ggml_backend_dev_host_buffer_type", P, P)
dev_supports_op = function("ggml_backend_dev_supports_op", ctypes.c_bool, P, P)
reg_by_name = function("ggml_backend_reg_by_name", P, ctypes.c_char_p)
reg_dev_count = function("ggml_backend_reg_dev_count", SIZE, P)
reg_get_proc_address = function("ggml_backend_reg_get_proc_address", P, P, ctypes.c_char_p)
buft_is_host = function("ggml_backend_buft_is_host", ctypes.c_bool, P)
buft_alloc_buffer = function("ggml_backend_buft_alloc_buffer", P, P, SIZE)
buffer_free = function("ggml_backend_buffer_free", None, P)
buffer_get_base = function("ggml_backend_buffer_get_base", P, P)
backend_free = function("ggml_backend_free", None, P)
synchronize = function("ggml_backend_synchronize", None, P)
graph_compute = function("ggml_backend_graph_compute", INT, P, P)
graph_compute_async = function("ggml_backend_graph_compute_async", INT, P, P)
set_async = function("ggml_backend_tensor_set_async", None, P, P, P, SIZE, SIZE)
get_async = function("ggml_backend_tensor_get_async", None, P, P, P, SIZE, SIZE)
copy_async = function("ggml_backend_tensor_copy_async", None, P, P, P, P)
copy = function("ggml_backend_tensor_copy", None, P, P)
tensor_set = function("ggml_backend_tensor_set", None, P, P, SIZE, SIZE)
tensor_get = function("ggml_backend_tensor_get", None, P, P, SIZE, SIZE)
event_new = function("ggml_backend_event_new", P, P)
event_free = function("ggml_backend_event_free", None, P)
event_record = function("ggml_backend_event_record", None, P, P)
event_wait = function("ggml_backend_event_wait", None, P, P)
event_synchronize = function("ggml_backend_event_synchronize", None, P)
ggml_init = function("ggml_init", P, InitParams)
ggml_free = function("ggml_free", None, P)
new_tensor = function("ggml_new_tensor_3d", P, P, INT, I64, I64, I64)
mul_mat = function("ggml_mul_mat", P, P, P, P)
mul_mat_id = function("ggml_mul_mat_id", P, P, P, P, P)
new_graph = function("ggml_new_graph", P, P)
build_forward_expand = function("ggml_build_forward_expand", None, P, P)
alloc_tensors = function("ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)


def proc(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)(reg_get_proc_address(reg_by_name(b"SimGPU"), name.encode()))


def stats() -> dict[str, Any]:
    return json.loads(proc("simgpu_stats", ctypes.c_char_p)())


def reset_stats() -> None:
    proc("simgpu_reset_stats", None)()


def device(i: int = 0) -> int:
    handle = dev_by_name(f"SimGPU{i}".encode())
    assert handle
    return handle


def free_and_total(dev: int) -> tuple[int, int]:
    free, total = SIZE(), SIZE()
    dev_memory(dev, free, total)
    return free.value, total.value


def tensor(dev: int, n_floats: int) -> int:
    """A vector in device memory, for the rest of the process."""
    ctx = ggml_init(InitParams(1 << 12, None, True))
    t = new_tensor(ctx, F32, n_floats, 1, 1)
    assert alloc_tensors(ctx, dev_buffer_type(dev)), "the device has no memory for it"
    return t


def pinned(dev: int, n_bytes: int) -> int:
    """Host memory pinned for the device, for the rest of the process."""
    buffer = buft_alloc_buffer(dev_host_buffer_type(dev), n_bytes)
    assert buffer, "nothing can be pinned"
    return buffer_get_base(buffer)


class Product:
    """w [n_expert, rows, k] x, on one device: MUL_MAT for one expert, MUL_MAT_ID with `ids` [n_tokens, n_used] for more."""

    def __init__(self, dev: int, kind: int, shape: tuple[int, int, int], n_tokens: int, n_used: int = 0):
        n_expert, rows, k = shape
        self.ctx = ggml_init(InitParams(1 << 20, None, True))
        self.w = new_tensor(self.ctx, kind, k, rows, n_expert)
        self.x = new_tensor(self.ctx, F32, k, 1 if n_used else n_tokens, n_tokens if n_used else 1)
        self.ids = new_tensor(self.ctx, I32, n_used, n_tokens, 1) if n_used else None
        self.y = mul_mat_id(self.ctx, self.w, self.x, self.ids) if n_used else mul_mat(self.ctx, self.w, self.x)
        self.result = np.zeros((n_tokens, max(1, n_used), rows), np.float32)
        self.graph = new_graph(self.ctx)
        build_forward_expand(self.graph, self.y)
        assert dev_supports_op(dev, self.y)
        self.buffer = alloc_tensors(self.ctx, dev_buffer_type(dev))
        assert self.buffer, "the device has no memory for it"

    def fill(self, w: np.ndarray, x: np.ndarray, ids: np.ndarray | None = None) -> None:
        for t, values in ((self.w, w), (self.x, x), (self.ids, ids)):
            if values is not None:
                values = np.ascontiguousarray(values)
                tensor_set(t, values.ctypes.data, 0, values.nbytes)

    def fetch(self) -> np.ndarray:
        tensor_get(self.y, self.result.ctypes.data, 0, self.result.nbytes)
        return self.result

    def free(self) -> None:
        buffer_free(self.buffer)
        ggml_free(self.ctx)
