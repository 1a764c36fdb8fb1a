"""What the benchmark of streaming calls of ggml, typed, and the host's GPU devices. The calls of a layer are in graph.py."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from typing import Any

from .. import _native
from ..errors import OptionError, PluginError

P, I64, SIZE, INT, BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int, ctypes.c_bool
F32, I32 = 0, 26
GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", BOOL)]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (P, [InitParams]),
    "ggml_free": (None, [P]),
    "ggml_new_tensor_2d": (P, [P, INT, I64, I64]),
    "ggml_new_tensor_3d": (P, [P, INT, I64, I64, I64]),
    "ggml_set_name": (P, [P, ctypes.c_char_p]),
    "ggml_row_size": (SIZE, [INT, I64]),
    "ggml_view_2d": (P, [P, P, I64, I64, SIZE, SIZE]),
    "ggml_mul_mat_id": (P, [P, P, P, P]),
    "ggml_swiglu_split": (P, [P, P, P]),
    "ggml_mul": (P, [P, P, P]),
    "ggml_add": (P, [P, P, P]),
    "ggml_cont": (P, [P, P]),
    "ggml_new_graph": (P, [P]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_graph_add_node": (None, [P, P]),
    "ggml_gallocr_new": (P, [P]),
    "ggml_gallocr_free": (None, [P]),
    "ggml_gallocr_alloc_graph": (BOOL, [P, P]),
    "ggml_backend_load": (P, [ctypes.c_char_p]),
    "ggml_backend_dev_count": (SIZE, []),
    "ggml_backend_dev_get": (P, [SIZE]),
    "ggml_backend_dev_by_name": (P, [ctypes.c_char_p]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [P]),
    "ggml_backend_dev_description": (ctypes.c_char_p, [P]),
    "ggml_backend_dev_type": (INT, [P]),
    "ggml_backend_dev_memory": (None, [P, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE)]),
    "ggml_backend_dev_init": (P, [P, ctypes.c_char_p]),
    "ggml_backend_dev_buffer_type": (P, [P]),
    "ggml_backend_dev_host_buffer_type": (P, [P]),
    "ggml_backend_dev_buffer_from_host_ptr": (P, [P, P, SIZE, SIZE]),
    "ggml_backend_dev_supports_op": (BOOL, [P, P]),
    "ggml_backend_dev_backend_reg": (P, [P]),
    "ggml_backend_reg_get_proc_address": (P, [P, ctypes.c_char_p]),
    "ggml_backend_buft_alloc_buffer": (P, [P, SIZE]),
    "ggml_backend_buffer_get_base": (P, [P]),
    "ggml_backend_buffer_get_type": (P, [P]),
    "ggml_backend_buffer_free": (None, [P]),
    "ggml_backend_alloc_ctx_tensors": (P, [P, P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
    "ggml_backend_tensor_alloc": (INT, [P, P, P]),
    "ggml_backend_tensor_set": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_tensor_get": (None, [P, P, SIZE, SIZE]),
    "ggml_backend_tensor_set_async": (None, [P, P, P, SIZE, SIZE]),
    "ggml_backend_tensor_get_async": (None, [P, P, P, SIZE, SIZE]),
    "ggml_backend_graph_compute": (INT, [P, P]),
    "ggml_backend_graph_compute_async": (INT, [P, P]),
    "ggml_backend_synchronize": (None, [P]),
    "ggml_backend_free": (None, [P]),
}


@functools.cache
def g(name: str) -> Any:
    return _native.ggml_function(name, *_SIGNATURES[name])


def context(n_bytes: int = 1 << 20) -> Any:
    """For tensors whose memory comes from elsewhere."""
    return g("ggml_init")(InitParams(n_bytes, None, True))


@dataclass(frozen=True)
class GpuDevice:
    name: str
    description: str
    handle: int
    memory_bytes: int


def load_backend(path: str) -> None:
    """A back end of the host's that it does not load by itself."""
    if not os.path.isfile(path):
        raise OptionError(f"--backend {path}: there is no such file; give the path of a ggml back end, libggml-*.so")
    if not g("ggml_backend_load")(os.path.abspath(path).encode()):
        raise OptionError(
            f"--backend {path}: ggml {_native.host_version()} did not take it (--verbose shows why); give a back end that was "
            "built for this release"
        )


def gpu_devices() -> list[GpuDevice]:
    found = []
    for i in range(g("ggml_backend_dev_count")()):
        dev = g("ggml_backend_dev_get")(i)
        if g("ggml_backend_dev_type")(dev) != GPU:
            continue
        free, total = SIZE(), SIZE()
        g("ggml_backend_dev_memory")(dev, free, total)
        name, description = (g(f"ggml_backend_dev_{what}")(dev).decode() for what in ("name", "description"))
        found.append(GpuDevice(name, description, dev, total.value))
    return found


def chosen_devices(option: str) -> list[GpuDevice]:
    """Those of --devices. Raises OptionError for names that are none, PluginError when the host has no GPU."""
    found = gpu_devices()
    if not found:
        raise PluginError(
            "this llama-cpp-python has no GPU device to stream to: build it for your GPU with CMAKE_ARGS=-DGGML_CUDA=on "
            "(-DGGML_HIP=on, -DGGML_VULKAN=on) pip install --no-cache-dir --force-reinstall --no-deps "
            f"llama-cpp-python=={_native.PINNED_LLAMA_CPP_PYTHON}, or name a back end with --backend"
        )
    if option == "auto":
        return found
    by_name = {d.name: d for d in found}
    names = [name.strip() for name in option.split(",") if name.strip()] if option != "none" else []
    for name in names:
        if name not in by_name:
            raise OptionError(f"--devices {option}: there is no GPU device {name!r}; there are {', '.join(by_name)}")
    if not names:
        raise OptionError(f"--devices {option}: nothing to stream to; choose among {', '.join(by_name)}")
    return [d for d in found if d.name in names]


def start(dev: int, n_threads: int = 0) -> Any:
    """An instance of a device; n_threads where it takes them."""
    backend = g("ggml_backend_dev_init")(dev, None)
    if not backend:
        raise PluginError(f"{g('ggml_backend_dev_name')(dev).decode()} gives no instance of itself: see --verbose")
    reg = g("ggml_backend_dev_backend_reg")(dev)
    set_threads = g("ggml_backend_reg_get_proc_address")(reg, b"ggml_backend_set_n_threads")
    if n_threads and set_threads:
        ctypes.CFUNCTYPE(None, P, INT)(set_threads)(backend, n_threads)
    return backend
