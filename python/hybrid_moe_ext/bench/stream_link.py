"""How fast a device's link is, measured with large copies of pinned and of ordinary memory, up and down."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PluginError
from .stream_ggml import F32, GpuDevice, context, g, start

COPY_BYTES = 32 << 20
ROUNDS = 5


@dataclass(frozen=True)
class Link:
    """GB/s; without pinned memory its figures are those of ordinary memory."""

    device: str
    up_gbps: float
    down_gbps: float
    pageable_up_gbps: float
    pageable_down_gbps: float
    is_pinned: bool


@contextlib.contextmanager
def pinned_memory(dev: int, n_bytes: int) -> Iterator[int | None]:
    """The address of host memory that the device copies at full speed, or None where there is none."""
    buffer_type = g("ggml_backend_dev_host_buffer_type")(dev)
    buffer = g("ggml_backend_buft_alloc_buffer")(buffer_type, n_bytes) if buffer_type else None
    try:
        # Some back ends answer with ordinary memory when they cannot pin.
        is_pinned = buffer and g("ggml_backend_buffer_get_type")(buffer) == buffer_type
        yield g("ggml_backend_buffer_get_base")(buffer) if is_pinned else None
    finally:
        if buffer:
            g("ggml_backend_buffer_free")(buffer)


def measure_link(device: GpuDevice) -> Link:
    backend, ctx = start(device.handle), context()
    tensor = g("ggml_new_tensor_2d")(ctx, F32, COPY_BYTES // 4, 1)
    buffer = g("ggml_backend_alloc_ctx_tensors")(ctx, backend)
    try:
        if not buffer:
            raise PluginError(f"{device.name} has no {COPY_BYTES >> 20} MiB of free memory: end what else runs on it")
        ordinary = np.zeros(COPY_BYTES, np.uint8)
        with pinned_memory(device.handle, COPY_BYTES) as pinned:
            up, down = (
                [
                    _gbps(backend, tensor, address, name)
                    for address in (pinned or ordinary.ctypes.data, ordinary.ctypes.data)
                ]
                for name in ("ggml_backend_tensor_set_async", "ggml_backend_tensor_get_async")
            )
        return Link(device.name, up[0], down[0], up[1], down[1], pinned is not None)
    finally:
        if buffer:
            g("ggml_backend_buffer_free")(buffer)
        g("ggml_free")(ctx)
        g("ggml_backend_free")(backend)


def _gbps(backend: Any, tensor: Any, address: int, name: str) -> float:
    def copy() -> None:
        g(name)(backend, tensor, address, 0, COPY_BYTES)
        g("ggml_backend_synchronize")(backend)

    copy()  # the first one also pays for pages
    return COPY_BYTES / min(_seconds(copy) for _ in range(ROUNDS)) / 1e9  # what else the host does only slows it


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
