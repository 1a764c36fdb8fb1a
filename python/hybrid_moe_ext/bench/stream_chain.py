"""A chain of MoE layers on our device, one graph each, as a host's scheduler gives them to us: attention, then a layer.
Their intermediate results share one buffer, as a host's do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import PluginError
from .graph import Shape
from .stream_experts import StreamExperts
from .stream_ggml import F32, I32, context, g, start


@dataclass(frozen=True)
class Batch:
    """What all layers of a chain compute: x [n_tokens, n_embd]; per layer ids and weights [n_tokens, n_used]."""

    x: NDArray[np.float32]
    ids: list[NDArray[np.int32]]
    weights: list[NDArray[np.float32]]

    @property
    def n_tokens(self) -> int:
        return len(self.x)


def random_batch(shape: Shape, n_layers: int, n_tokens: int, routing: str) -> Batch:
    """`routing`: "uniform", or "skewed": half of the tokens want expert 0, and half of the experts nobody wants."""
    rng = np.random.default_rng(n_tokens)
    x = rng.standard_normal((n_tokens, shape.n_embd), np.float32)
    ids = [_ids(shape, n_tokens, routing, rng) for _ in range(n_layers)]
    weights = [rng.uniform(0.05, 0.2, i.shape).astype(np.float32) for i in ids]
    return Batch(x, ids, weights)


def _ids(shape: Shape, n_tokens: int, routing: str, rng: np.random.Generator) -> NDArray[np.int32]:
    n_wanted = shape.n_expert if routing == "uniform" else max(shape.n_used, shape.n_expert // 2)
    rank = rng.random((n_tokens, n_wanted), np.float32)
    if routing == "skewed":
        rank[::2, 0] = -1
        rank[1::2, 0] = 2
    return np.argpartition(rank, shape.n_used - 1, 1)[:, : shape.n_used].astype(np.int32)


@dataclass(frozen=True)
class Round:
    """Seconds per layer."""

    layer_s: float  # attention included
    attention_s: float  # as long as the sleep really took


class Chain:
    def __init__(self, experts: StreamExperts, batch: Batch, n_threads: int):
        self._shape, self._batch = experts.shape, batch
        self._device = _native.device_handle()
        self._backend = start(self._device or 0, n_threads)
        self._inputs_ctx = context()
        self._x = g("ggml_new_tensor_3d")(self._inputs_ctx, F32, self._shape.n_embd, 1, batch.n_tokens)
        self._routes = [self._new_route() for _ in batch.ids]
        self._inputs = g("ggml_backend_alloc_ctx_tensors")(self._inputs_ctx, self._backend)
        self._set(self._x, batch.x)
        for (ids, weights), i, w in zip(self._routes, batch.ids, batch.weights, strict=True):
            self._set(ids, i)
            self._set(weights, w)
        self._work = g("ggml_gallocr_new")(g("ggml_backend_dev_buffer_type")(self._device))
        self._contexts: list[Any] = []
        self._graphs, self._results = [], []
        self._i_next = 0
        for tensors, route in zip(experts.tensors, self._routes, strict=True):
            graph, y = self._build(tensors, *route)
            if not g("ggml_gallocr_alloc_graph")(self._work, graph):
                raise PluginError(f"no memory for a layer of {batch.n_tokens} tokens: choose fewer --tokens")
            self._graphs.append(graph)
            self._results.append(y)

    def _new_route(self) -> tuple[Any, Any]:
        n_used, n_tokens = self._shape.n_used, self._batch.n_tokens
        ids = g("ggml_new_tensor_2d")(self._inputs_ctx, I32, n_used, n_tokens)
        return ids, g("ggml_new_tensor_3d")(self._inputs_ctx, F32, 1, n_used, n_tokens)

    @staticmethod
    def _set(tensor: Any, data: NDArray[Any]) -> None:
        whole: NDArray[Any] = np.ascontiguousarray(data)
        g("ggml_backend_tensor_set")(tensor, whole.ctypes.data, 0, whole.nbytes)

    def _build(self, w: dict[str, Any], ids: Any, weights: Any) -> tuple[Any, Any]:
        ctx = context()
        self._contexts.append(ctx)
        graph = g("ggml_new_graph")(ctx)
        up = g("ggml_mul_mat_id")(ctx, w["up"], self._x, ids)
        if not g("ggml_backend_dev_supports_op")(self._device, up):
            raise PluginError("the plug-in does not compute this weight type here: choose another --type")
        gate = g("ggml_mul_mat_id")(ctx, w["gate"], self._x, ids)
        down = g("ggml_mul_mat_id")(ctx, w["down"], g("ggml_swiglu_split")(ctx, gate, up), ids)
        y = weighted_sum(ctx, graph, g("ggml_mul")(ctx, down, weights), self._shape, self._batch.n_tokens)
        g("ggml_build_forward_expand")(graph, y)
        return graph, y

    def run(self, attention_s: float = 0.0) -> Round:
        """Once through all layers, each behind a sleep that stands for its attention, after one more that is not timed: then the
        look-ahead is where it is in the middle of a long model. Layers always follow one another in the same circle."""
        self._run_next(attention_s)
        n = len(self._graphs)
        begin = time.perf_counter()
        slept = sum(self._run_next(attention_s) for _ in range(n))
        return Round((time.perf_counter() - begin) / n, slept / n)

    def run_one(self, i_layer: int) -> NDArray[np.float32]:
        self._i_next = i_layer
        self._run_next(0.0)
        y = np.empty((self._batch.n_tokens, self._shape.n_embd), np.float32)
        g("ggml_backend_tensor_get")(self._results[i_layer], y.ctypes.data, 0, y.nbytes)
        return y

    def run_layer_s(self) -> float:
        begin = time.perf_counter()
        self._run_next(0.0)
        return time.perf_counter() - begin

    def _run_next(self, attention_s: float) -> float:
        """Seconds that it slept."""
        i_layer, begin = self._i_next, time.perf_counter()
        self._i_next = (i_layer + 1) % len(self._graphs)
        if attention_s > 0:
            time.sleep(attention_s)
        slept = time.perf_counter() - begin if attention_s > 0 else 0.0
        status = g("ggml_backend_graph_compute")(self._backend, self._graphs[i_layer])
        if status != 0:
            raise PluginError(f"layer {i_layer} did not run (status {status}): see --verbose")
        return slept

    def close(self) -> None:
        g("ggml_gallocr_free")(self._work)
        g("ggml_backend_buffer_free")(self._inputs)
        for ctx in (*self._contexts, self._inputs_ctx):
            g("ggml_free")(ctx)
        g("ggml_backend_free")(self._backend)


def weighted_sum(
    ctx: Any, graph: Any, weighted: Any, shape: Shape, n_tokens: int, nodes: list[Any] | None = None
) -> Any:
    """The nodes that llama.cpp adds up a token's experts with, in its order; also put into `nodes`."""
    row = 4 * shape.n_embd
    made = [
        g("ggml_view_2d")(ctx, weighted, shape.n_embd, n_tokens, row * shape.n_used, row * i)
        for i in range(shape.n_used)
    ]
    for view in made:
        g("ggml_build_forward_expand")(graph, view)
    y = made[0]
    for view in list(made[1:]):
        y = g("ggml_add")(ctx, y, view)
        made.append(y)
    if len(made) == 1:
        y = g("ggml_cont")(ctx, y)
        made.append(y)
    if nodes is not None:
        nodes += made
    return y
