"""The GPU devices of this process's ggml, and which of them the option `devices` chooses. Nothing is computed on them here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C

from ._native import ggml_function
from .errors import OptionError
from .options import origin

_TYPE_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU; integrated ones have a type of their own, their memory is the host's


@dataclass(frozen=True)
class Gpu:
    """`handle` is ggml's, which lives as long as the process."""

    name: str  # such as CUDA0
    description: str
    handle: int

    def memory(self) -> tuple[int, int]:
        """(free, total) in bytes, now; some back ends always say that all is free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _device("memory", None, [ctypes.POINTER(ctypes.c_size_t)] * 2)(
            self.handle, ctypes.byref(free), ctypes.byref(total)
        )
        return free.value, total.value

    def __str__(self) -> str:
        return f"{self.name} ({self.description})" if self.description else self.name


def find_gpus() -> list[Gpu]:
    """All of them, in ggml's order."""
    C.llama_backend_init()
    count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t, [])()
    get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t])
    handles = [get(i) for i in range(count)]
    return [
        Gpu(_text(_device("name", ctypes.c_char_p)(h)), _text(_device("description", ctypes.c_char_p)(h)), h)
        for h in handles
        if _device("type", ctypes.c_int)(h) == _TYPE_GPU
    ]


def choose_gpus(devices: str, option: str = "devices") -> list[Gpu]:
    """What that option's value names, in ggml's order, as the plug-in takes them. Raises OptionError for unknown ones."""
    if devices == "none":
        return []
    there = find_gpus()
    if devices == "auto":
        return there
    names = [name.strip() for name in devices.split(",") if name.strip()]
    for name in names:
        if name not in [gpu.name for gpu in there]:
            rest = (
                f"there are: {', '.join(gpu.name for gpu in there)}"
                if there
                else "this host has none: leave it out, or install a llama-cpp-python built for your GPU"
            )
            raise OptionError(f"{origin(option, devices)}={devices!r}: there is no GPU device {name!r}; {rest}")
    return [gpu for gpu in there if gpu.name in names]


def device_option(devices: Any, option: str = "devices") -> str | None:
    """That option as `Options` has it, from a list of names or a string."""
    if devices is None or isinstance(devices, str):
        return devices
    names = list(devices) if isinstance(devices, Iterable) else [devices]
    for name in names:
        if not isinstance(name, str) or not name.strip() or "," in name:
            raise OptionError(
                f"{option}={devices!r}: {name!r} is no device's name: give a list such as ['CUDA0', 'CUDA1']"
            )
    return ",".join(names) if names else "none"


def _device(what: str, result: Any, arguments: Iterable[Any] = ()) -> Any:
    return ggml_function(f"ggml_backend_dev_{what}", result, [ctypes.c_void_p, *arguments])


def _text(name: bytes | None) -> str:
    return name.decode("utf-8", "replace").strip() if name else ""
