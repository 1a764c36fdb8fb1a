"""The peer of streaming: what a stock host does with a long batch whose experts lie in host memory. Per matrix product it waits
for the device, copies the experts that the batch uses, neighbours together, and computes; nothing is fetched ahead. Written
anew after the order of calls of ggml's scheduler."""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PluginError
from .graph import GGML_TYPES
from .stream_chain import Batch, Round, weighted_sum
from .stream_experts import StreamExperts, row_bytes
from .stream_ggml import F32, I32, GpuDevice, context, g, start
from .stream_link import pinned_memory

ORDER = ("up", "gate", "down")
END_PADDING = 512  # bytes of the next expert that go along: some kernels read beyond the last one


def neighbours(ids: NDArray[np.int32]) -> list[tuple[int, int]]:
    """First and last expert of every run of used experts without a gap."""
    used = np.unique(ids)
    breaks = np.flatnonzero(np.diff(used) > 1)
    firsts = np.concatenate([used[:1], used[breaks + 1]])
    lasts = np.concatenate([used[breaks], used[-1:]])
    return [(int(a), int(b)) for a, b in zip(firsts, lasts, strict=True)]


class CopyThenCompute:
    """A chain of layers on one device. `pinned`: experts and activations lie in memory that the device copies at full speed
    (one layer's experts stand for all); otherwise where the streaming engine has them too. FP8 experts are copied as the
    BF16 that they are computed in: stock ggml has no FP8."""

    def __init__(self, device: GpuDevice, experts: StreamExperts, batch: Batch, pinned: bool):
        self._experts, self._batch, self._shape = experts, batch, experts.shape
        self.kind = "BF16" if experts.kind == "FP8" else experts.kind
        self._stack = ExitStack()
        self._backend = start(device.handle)
        self._stack.callback(g("ggml_backend_free"), self._backend)
        try:
            self._build(device)
            self._take_host_memory(device, pinned)
            self._fill()
        except BaseException:
            self.close()
            raise

    def _new_context(self) -> Any:
        ctx = context()
        self._stack.callback(g("ggml_free"), ctx)
        return ctx

    def _build(self, device: GpuDevice) -> None:
        s, n_tokens = self._shape, self._batch.n_tokens
        leaves, ctx = self._new_context(), self._new_context()
        self._w = {
            name: g("ggml_new_tensor_3d")(leaves, GGML_TYPES[self.kind], k, rows, s.n_expert)
            for name, (rows, k) in s.weights().items()
        }
        self._x = g("ggml_new_tensor_3d")(leaves, F32, s.n_embd, 1, n_tokens)
        self._ids = g("ggml_new_tensor_2d")(leaves, I32, s.n_used, n_tokens)
        self._weights = g("ggml_new_tensor_3d")(leaves, F32, 1, s.n_used, n_tokens)
        up = g("ggml_mul_mat_id")(ctx, self._w["up"], self._x, self._ids)
        gate = g("ggml_mul_mat_id")(ctx, self._w["gate"], self._x, self._ids)
        hidden = g("ggml_swiglu_split")(ctx, gate, up)
        down = g("ggml_mul_mat_id")(ctx, self._w["down"], hidden, self._ids)
        weighted = g("ggml_mul")(ctx, down, self._weights)
        for node in (up, gate, hidden, down, weighted):
            if not g("ggml_backend_dev_supports_op")(device.handle, node):
                raise PluginError(f"{device.name} does not compute {self.kind} experts by itself")
        whole = g("ggml_new_graph")(ctx)
        g("ggml_build_forward_expand")(whole, up)
        sums: list[Any] = []
        self._y = weighted_sum(ctx, whole, weighted, s, n_tokens, sums)
        g("ggml_build_forward_expand")(whole, self._y)
        self._allocate(device, leaves, whole)
        pieces = {"up": [up], "gate": [gate, hidden], "down": [down, weighted, *sums]}
        self._graphs = {name: self._piece(nodes) for name, nodes in pieces.items()}

    def _allocate(self, device: GpuDevice, leaves: Any, whole: Any) -> None:
        buffer = g("ggml_backend_alloc_ctx_tensors")(leaves, self._backend)
        work = g("ggml_gallocr_new")(g("ggml_backend_dev_buffer_type")(device.handle))
        self._stack.callback(g("ggml_gallocr_free"), work)
        if buffer:
            self._stack.callback(g("ggml_backend_buffer_free"), buffer)
        if not buffer or not g("ggml_gallocr_alloc_graph")(work, whole):
            raise PluginError(
                f"{device.name} has no memory for all experts of a layer and their results beside the ring"
            )

    def _piece(self, nodes: list[Any]) -> Any:
        graph = g("ggml_new_graph")(self._new_context())
        for node in nodes:
            g("ggml_graph_add_node")(graph, node)
        return graph

    def _bytes_of(self, name: str) -> int:
        rows, k = self._shape.weights()[name]
        return rows * row_bytes(self.kind, k)

    def _take_host_memory(self, device: GpuDevice, pinned: bool) -> None:
        """Where experts and activations are copied from and to."""
        s = self._shape
        sizes = {name: s.n_expert * self._bytes_of(name) for name in ORDER}
        self._has_own_experts = pinned or self._experts.kind == "FP8"
        sizes = (sizes if self._has_own_experts else {}) | {"x": self._batch.x.nbytes, "y": self._batch.x.nbytes}
        n_bytes = sum(sizes.values()) + 64 * len(sizes)
        if pinned:
            base = self._stack.enter_context(pinned_memory(device.handle, n_bytes))
            if base is None:
                raise PluginError(f"{device.name} gives no pinned memory of {n_bytes >> 20} MiB")
        else:
            self._plain = np.empty(n_bytes, np.uint8)  # keeps the memory
            base = self._plain.ctypes.data
        self._at = {}
        for name, n in sizes.items():
            self._at[name] = base
            base += -(-n // 64) * 64

    def _fill(self) -> None:
        ctypes.memmove(self._at["x"], self._batch.x.ctypes.data, self._batch.x.nbytes)
        for name in ORDER if self._has_own_experts else ():
            n = self._shape.n_expert * self._bytes_of(name)
            if self._experts.kind == "FP8":
                ctypes.memset(self._at[name], 0, n)
            else:
                ctypes.memmove(self._at[name], self._experts.address(0, name), n)

    def run(self, attention_s: float = 0.0) -> Round:
        """Once through all layers, each behind a sleep that stands for its attention."""
        begin, slept = time.perf_counter(), 0.0
        for i in range(self._experts.n_layers):
            if attention_s > 0:
                at = time.perf_counter()
                time.sleep(attention_s)
                slept += time.perf_counter() - at
            self.run_layer(i)
        n = self._experts.n_layers
        return Round((time.perf_counter() - begin) / n, slept / n)

    def run_layer(self, i_layer: int, with_copies: bool = True) -> None:
        """Without copies it computes what was copied before: the device's own time for a layer."""
        b, batch = self._backend, self._batch
        set_, compute = g("ggml_backend_tensor_set_async"), g("ggml_backend_graph_compute_async")
        if with_copies:
            ids, weights = batch.ids[i_layer], batch.weights[i_layer]
            set_(b, self._x, self._at["x"], 0, batch.x.nbytes)
            set_(b, self._ids, ids.ctypes.data, 0, ids.nbytes)
            set_(b, self._weights, weights.ctypes.data, 0, weights.nbytes)
        for name in ORDER:
            g("ggml_backend_synchronize")(b)  # nothing reads the weights' memory any more
            if with_copies:
                self._copy_experts(i_layer, name)
            if compute(b, self._graphs[name]) != 0:
                raise PluginError("the copy-then-compute peer did not run: see --verbose")
        if with_copies:
            g("ggml_backend_tensor_get_async")(b, self._y, self._at["y"], 0, batch.x.nbytes)
        g("ggml_backend_synchronize")(b)

    def _copy_experts(self, i_layer: int, name: str) -> None:
        n = self._bytes_of(name)
        base = self._at[name] if self._has_own_experts else self._experts.address(i_layer, name)
        for first, last in neighbours(self._batch.ids[i_layer]):
            padding = min(n, END_PADDING) if last < self._shape.n_expert - 1 else 0
            size = (last - first + 1) * n + padding
            g("ggml_backend_tensor_set_async")(self._backend, self._w[name], base + first * n, first * n, size)

    @property
    def has_true_experts(self) -> bool:
        return self._experts.kind != "FP8"

    def compute_s(self) -> float:
        begin = time.perf_counter()
        self.run_layer(0, with_copies=False)
        return time.perf_counter() - begin

    def output(self) -> NDArray[np.float32]:
        """Of the layer that ran last."""
        n = self._batch.x.nbytes
        return np.frombuffer(ctypes.string_at(self._at["y"], n), np.float32).reshape(self._batch.x.shape)

    def close(self) -> None:
        self._stack.close()
