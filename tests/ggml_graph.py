"""One MUL_MAT_ID on our device or on the CPU through ggml's own C interface: what a host does, without a model."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from hybrid_moe_ext import _native, register
from hybrid_moe_ext.checkpoint import ExpertTensor, TensorRef
from weights import GGML_TYPES, Weights

P, I64, SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


def bind(**functions: tuple[Any, list[Any]]) -> SimpleNamespace:
    out = SimpleNamespace()
    for name, (result, arguments) in functions.items():
        setattr(out, name, _native.ggml_function(name, result, arguments))
    return out


G = bind(
    ggml_init=(P, [InitParams]),
    ggml_free=(None, [P]),
    ggml_new_tensor_3d=(P, [P, ctypes.c_int, I64, I64, I64]),
    ggml_new_tensor_2d=(P, [P, ctypes.c_int, I64, I64]),
    ggml_view_2d=(P, [P, P, I64, I64, SIZE, SIZE]),
    ggml_set_name=(P, [P, ctypes.c_char_p]),
    ggml_mul_mat_id=(P, [P, P, P, P]),
    ggml_new_graph=(P, [P]),
    ggml_build_forward_expand=(None, [P, P]),
    ggml_backend_dev_by_name=(P, [ctypes.c_char_p]),
    ggml_backend_dev_init=(P, [P, ctypes.c_char_p]),
    ggml_backend_dev_supports_op=(ctypes.c_bool, [P, P]),
    ggml_backend_alloc_ctx_tensors=(P, [P, P]),
    ggml_backend_tensor_set=(None, [P, P, SIZE, SIZE]),
    ggml_backend_tensor_get=(None, [P, P, SIZE, SIZE]),
    ggml_backend_graph_compute=(ctypes.c_int, [P, P]),
    ggml_backend_buffer_free=(None, [P]),
    ggml_backend_free=(None, [P]),
    ggml_backend_dev_backend_reg=(P, [P]),
    ggml_backend_reg_get_proc_address=(P, [P, ctypes.c_char_p]),
)

ABORT_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, P)
SUCCESS, FAILED, ABORTED = 0, -1, 1


@contextlib.contextmanager
def backend(device: str, n_threads: int = 2, abort: Any = None):
    register()
    dev = G.ggml_backend_dev_by_name(device.encode())
    b = G.ggml_backend_dev_init(dev, None)
    reg = G.ggml_backend_dev_backend_reg(dev)
    set_threads = G.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_set_n_threads")
    ctypes.CFUNCTYPE(None, P, ctypes.c_int)(set_threads)(b, n_threads)
    if abort is not None:
        set_abort = G.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_set_abort_callback")
        ctypes.CFUNCTYPE(None, P, ABORT_CALLBACK, P)(set_abort)(b, abort, None)
    try:
        yield b
    finally:
        G.ggml_backend_free(b)


def expert_files(path: Any, w: Weights, name: str) -> ExpertTensor:
    """Writes each expert's codes, then its scales, to one file, at odd offsets, as a checkpoint might hold them."""
    n_expert, rows, k = w.values.shape
    codes, scales = [], []
    with open(path, "wb") as file:
        for i in range(n_expert):
            file.write(b"\xff")
            for refs, data, dtype in ((codes, w.codes[i], "F8_E4M3"), (scales, w.scales[i], "F32")):
                refs.append(TensorRef(f"{name}.{i}", path, dtype, data.shape, file.tell(), data.nbytes))
                file.write(data.tobytes())
    return ExpertTensor(name, None, n_expert, rows, k, tuple(codes), tuple(scales), w.block)


def mul_mat_id(
    w: Weights,
    x: np.ndarray,
    ids: np.ndarray,
    device: str = "HybridMoE",
    n_threads: int = 2,
    experts: ExpertTensor | None = None,
    ids_stride: int | None = None,
    abort: Any = None,
) -> tuple[int, np.ndarray]:
    """x: float32 [tokens, slots, k]; ids: int32 [tokens, n_used] -> (status, y [tokens, n_used, rows]).

    `experts`: files that hold the weights (FP8), else `w.codes` are set into the tensor. `ids_stride`: ids as a view of
    wider rows, as llama.cpp's top-k gives them.
    """
    n_expert, rows, k = w.values.shape
    n_tokens, n_used = ids.shape
    ctx = G.ggml_init(InitParams(1 << 20, None, True))
    t_w = G.ggml_new_tensor_3d(ctx, GGML_TYPES[w.kind], k, rows, n_expert)
    G.ggml_set_name(t_w, b"blk.0.ffn_up_exps.weight")
    t_x = G.ggml_new_tensor_3d(ctx, 0, k, x.shape[1], n_tokens)
    stride = ids_stride or n_used
    t_all_ids = G.ggml_new_tensor_2d(ctx, 26, stride, n_tokens)
    t_ids = G.ggml_view_2d(ctx, t_all_ids, n_used, n_tokens, 4 * stride, 0)
    t_y = G.ggml_mul_mat_id(ctx, t_w, t_x, t_ids)
    graph = G.ggml_new_graph(ctx)
    G.ggml_build_forward_expand(graph, t_y)
    with backend(device, n_threads, abort) as b:
        assert G.ggml_backend_dev_supports_op(G.ggml_backend_dev_by_name(device.encode()), t_y)
        with contextlib.ExitStack() as stack:
            if experts is not None:
                table = _native.ExpertTable(copied=False)
                table.add(experts)
                stack.enter_context(table)
            buffer = G.ggml_backend_alloc_ctx_tensors(ctx, b)
        if not buffer:
            G.ggml_free(ctx)
            raise MemoryError("our buffer type refused a tensor")
        wide = np.full((n_tokens, stride), 2**31 - 1, np.int32)
        wide[:, :n_used] = ids
        if experts is None:
            set_tensor(t_w, w.codes)
        set_tensor(t_x, x)
        set_tensor(t_all_ids, wide)
        status = G.ggml_backend_graph_compute(b, graph)
        y = np.empty((n_tokens, n_used, rows), np.float32)
        if y.size:
            G.ggml_backend_tensor_get(t_y, y.ctypes.data, 0, y.nbytes)
        G.ggml_backend_buffer_free(buffer)
    G.ggml_free(ctx)
    return status, y


def set_tensor(tensor: int, values: np.ndarray) -> None:
    values = np.ascontiguousarray(values)
    if values.nbytes:
        G.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


__all__ = ["ABORTED", "ABORT_CALLBACK", "FAILED", "SUCCESS", "C", "G", "backend", "expert_files", "mul_mat_id"]
