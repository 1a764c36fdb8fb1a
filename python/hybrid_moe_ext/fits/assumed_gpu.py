"""GPUs that are not here, for accounting only: ggml devices with a name and a memory size that take no bytes and compute nothing.

llama.cpp plans a model for them as for any GPU, so that its own accounting answers "what would a GPU of N GiB hold". They run
every operation that the CPU back end runs, except products by integer weights, and align tensors to 128 bytes, as CUDA does.
Structures as in ggml-backend-impl.h, which no Python package carries; another release of ggml is refused. For a process of its
own: what is registered stays.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .._native import PINNED_LLAMA_CPP_PYTHON, ggml_function, host_version
from ..errors import PluginError

API_VERSION = 2
ALIGNMENT = 128
_TYPE_GPU = 1
_TESTED = "0.25."  # releases of ggml in which these structures were tried
_MUL_MAT, _MUL_MAT_ID = b"MUL_MAT", b"MUL_MAT_ID"
_INTEGERS = (24, 25, 26, 27)  # GGML_TYPE_I8, I16, I32, I64: ids and indices to a GPU, never weights

_P = ctypes.c_void_p
_S = ctypes.c_size_t
_Text = ctypes.CFUNCTYPE(_P, _P)
_Number = ctypes.CFUNCTYPE(_S, _P)
_Flag = ctypes.CFUNCTYPE(ctypes.c_bool, _P)
_Judge = ctypes.CFUNCTYPE(ctypes.c_bool, _P, _P)
_Give = ctypes.CFUNCTYPE(_P, _P)


class _Caps(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_bool) for name in ("asynchronous", "host_buffer", "buffer_from_host_ptr", "events", "mmap")
    ]


class _Props(ctypes.Structure):
    _fields_ = [
        ("name", _P), ("description", _P), ("memory_free", _S), ("memory_total", _S), ("type", ctypes.c_int),
        ("device_id", _P), ("caps", _Caps),
    ]  # fmt: skip


_Memory = ctypes.CFUNCTYPE(None, _P, ctypes.POINTER(_S), ctypes.POINTER(_S))
_GetProps = ctypes.CFUNCTYPE(None, _P, ctypes.POINTER(_Props))
_GetType = ctypes.CFUNCTYPE(ctypes.c_int, _P)
_Init = ctypes.CFUNCTYPE(_P, _P, _P)
_Free = ctypes.CFUNCTYPE(None, _P)
_At = ctypes.CFUNCTYPE(_P, _P, _S)


class _BufferType(ctypes.Structure):
    _fields_ = [
        ("get_name", _Text), ("alloc_buffer", _At), ("get_alignment", _Number), ("get_max_size", _P),
        ("get_alloc_size", _P), ("is_host", _Flag), ("device", _P), ("context", _P),
    ]  # fmt: skip


class _Backend(ctypes.Structure):
    """Nothing asynchronous, no plans, no events, and no graph_compute: whoever computes on it dies."""

    _fields_ = [
        ("guid", _P), ("get_name", _Text), ("free", _Free), ("unused", _P * 14), ("device", _P), ("context", _P),
    ]  # fmt: skip


class _Device(ctypes.Structure):
    _fields_ = [
        ("get_name", _Text), ("get_description", _Text), ("get_memory", _Memory), ("get_type", _GetType),
        ("get_props", _GetProps), ("init_backend", _Init), ("get_buffer_type", _Give), ("get_host_buffer_type", _P),
        ("buffer_from_host_ptr", _P), ("supports_op", _Judge), ("supports_buft", _Judge), ("offload_op", _P),
        ("events", _P * 3), ("reg", _P), ("context", _P),
    ]  # fmt: skip


class _Registry(ctypes.Structure):
    _fields_ = [
        ("api_version", ctypes.c_int), ("get_name", _Text), ("get_device_count", _Number), ("get_device", _At),
        ("get_proc_address", _At), ("context", _P),
    ]  # fmt: skip


class _AssumedGpu:
    """One device. Everything C holds a pointer to is an attribute."""

    def __init__(self, name: str, n_bytes: int, registry: _Registry):
        self._name = ctypes.create_string_buffer(name.encode())
        self._description = ctypes.create_string_buffer(b"assumed GPU")
        self._guid = ctypes.create_string_buffer(f"hybrid-moe {name}".encode()[:16].ljust(16), 16)
        self._n_bytes = n_bytes
        self._cpu = ggml_function("ggml_backend_dev_by_type", _P, [ctypes.c_int])(0)
        self._cpu_judges = ggml_function("ggml_backend_dev_supports_op", ctypes.c_bool, [_P, _P])
        self._op = ggml_function("ggml_op_desc", ctypes.c_char_p, [_P])
        self._buffer_type = _BufferType(
            get_name=_Text(lambda _: ctypes.addressof(self._name)),
            alloc_buffer=_At(lambda *_: None),
            get_alignment=_Number(lambda _: ALIGNMENT),
            is_host=_Flag(lambda _: False),
        )
        self._backend = _Backend(
            guid=ctypes.addressof(self._guid),
            get_name=_Text(lambda _: ctypes.addressof(self._name)),
            free=_Free(lambda _: None),
        )
        self.device = _Device(
            get_name=_Text(lambda _: ctypes.addressof(self._name)),
            get_description=_Text(lambda _: ctypes.addressof(self._description)),
            get_memory=_Memory(self._memory),
            get_type=_GetType(lambda _: _TYPE_GPU),
            get_props=_GetProps(self._props),
            init_backend=_Init(lambda *_: ctypes.addressof(self._backend)),
            get_buffer_type=_Give(lambda _: ctypes.addressof(self._buffer_type)),
            supports_op=_Judge(self._supports_op),
            supports_buft=_Judge(lambda _, buft: buft == ctypes.addressof(self._buffer_type)),
            reg=ctypes.addressof(registry),
        )
        self._buffer_type.device = self._backend.device = ctypes.addressof(self.device)

    def _memory(self, _device: int, free: Any, total: Any) -> None:
        free[0] = total[0] = self._n_bytes

    def _props(self, _device: int, props: Any) -> None:
        p = props[0]
        p.name, p.description = ctypes.addressof(self._name), ctypes.addressof(self._description)
        p.memory_free = p.memory_total = self._n_bytes
        p.type, p.device_id, p.caps = _TYPE_GPU, None, _Caps(mmap=True)

    def _supports_op(self, _device: int, op: int) -> bool:
        if self._op(op) in (_MUL_MAT, _MUL_MAT_ID) and _weight_type(op) in _INTEGERS:
            return False
        return bool(self._cpu_judges(self._cpu, op))


# ggml_tensor: type, buffer, ne[4], nb[4], op, op_params[16], flags, src[10], ...
_SRC0 = 4 + 4 + 8 + 32 + 32 + 4 + 64 + 4


def _weight_type(op: int) -> int:
    source = _P.from_address(op + _SRC0).value
    return ctypes.c_int.from_address(source).value if source else -1


_kept: list[Any] = []  # ggml never forgets a registry, so neither do we


def register(sizes: list[int]) -> None:
    """One device per size in bytes, named GPU0, GPU1, ..."""
    if not host_version().startswith(_TESTED):
        raise PluginError(
            f"GPUs can be assumed in ggml {_TESTED}x, this one is {host_version()}: "
            f"install the tested release, llama-cpp-python=={PINNED_LLAMA_CPP_PYTHON}, or give no --vram"
        )
    name = ctypes.create_string_buffer(b"assumed")
    registry = _Registry(api_version=API_VERSION)
    gpus = [_AssumedGpu(f"GPU{i}", n_bytes, registry) for i, n_bytes in enumerate(sizes)]
    registry.get_name = _Text(lambda _: ctypes.addressof(name))
    registry.get_device_count = _Number(lambda _: len(gpus))
    registry.get_device = _At(lambda _, i: ctypes.addressof(gpus[i].device))
    registry.get_proc_address = _At(lambda *_: None)
    _kept.extend((name, registry, gpus))
    ggml_function("ggml_backend_register", None, [_P])(ctypes.addressof(registry))
