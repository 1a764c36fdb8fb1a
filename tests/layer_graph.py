"""Whole MoE blocks as llama.cpp builds them, run on a device through ggml's own functions, and their float64 values.
Several blocks in one graph follow one another as a model's layers do. Helpers, not tests."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ggml_graph import G, InitParams, backend, bind, expert_files, set_tensor
from hybrid_moe_ext import _native
from weights import GGML_TYPES, Weights, random_weights

P, I64, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
F32, I32 = 0, 26
B = bind(
    ggml_new_tensor_1d=(P, [P, ctypes.c_int, I64]),
    ggml_reshape_3d=(P, [P, P, I64, I64, I64]),
    ggml_repeat_4d=(P, [P, P, I64, I64, I64, I64]),
    ggml_get_rows=(P, [P, P, P]),
    ggml_view_3d=(P, [P, P, I64, I64, I64, SIZE, SIZE, SIZE]),
    ggml_add_id=(P, [P, P, P, P]),
    ggml_swiglu_split=(P, [P, P, P]),
    ggml_geglu_split=(P, [P, P, P]),
    ggml_reglu_split=(P, [P, P, P]),
    ggml_swiglu_oai=(P, [P, P, P, FLOAT, FLOAT]),
    ggml_silu=(P, [P, P]),
    ggml_gelu=(P, [P, P]),
    ggml_relu=(P, [P, P]),
    ggml_sqr=(P, [P, P]),
    ggml_mul=(P, [P, P, P]),
    ggml_add=(P, [P, P, P]),
    ggml_cont=(P, [P, P]),
)
ALPHA, LIMIT = 1.702, 7.0
ACTIVATIONS = ("swiglu", "geglu", "reglu", "swiglu_oai", "silu", "gelu", "relu", "relu_sqr")
GATED = ACTIVATIONS[:4]


@dataclass
class Layer:
    weights: dict[str, Weights]  # up, down, and gate where the activation has one; [n_expert, rows, k]
    n_used: int
    activation: str = "swiglu"
    scales: dict[str, np.ndarray] = field(default_factory=dict)  # projection -> [n_expert]
    biases: dict[str, np.ndarray] = field(default_factory=dict)  # projection -> [n_expert, rows]
    merged: bool = False  # gate and up as one tensor, gate first

    @property
    def n_expert(self) -> int:
        return len(self.weights["up"].values)

    @property
    def n_embd(self) -> int:
        return self.weights["up"].values.shape[2]

    @property
    def n_ff(self) -> int:
        return self.weights["up"].values.shape[1]


@dataclass
class Route:
    ids: np.ndarray  # int32 [n_tokens, n_used]
    weights: np.ndarray  # float32, the same shape


def random_layer(
    rng: np.random.Generator,
    n_embd: int = 64,
    n_ff: int = 96,
    n_expert: int = 6,
    n_used: int = 3,
    kind: str = "F32",
    activation: str = "swiglu",
    merged: bool = False,
    scaled: bool = False,
    biased: bool = False,
) -> Layer:
    names = ("gate", "up", "down") if activation in GATED else ("up", "down")
    shapes = {name: (n_embd, n_ff) if name == "down" else (n_ff, n_embd) for name in names}
    block = (16, 16)
    weights = {name: random_weights(kind, *shape, rng, block, n_expert) for name, shape in shapes.items()}
    layer = Layer(weights, n_used, activation, merged=merged)
    if scaled:
        layer.scales = {name: rng.uniform(-2, 2, n_expert).astype(np.float32) for name in names}
        if merged:
            layer.scales["gate"] = layer.scales["up"]
    if biased:
        layer.biases = {n: rng.standard_normal((n_expert, shapes[n][0])).astype(np.float32) for n in names}
    return layer


def random_route(rng: np.random.Generator, layer: Layer, n_tokens: int) -> Route:
    ids = [rng.permutation(layer.n_expert)[: layer.n_used] for _ in range(n_tokens)]
    ids = np.array(ids, np.int32).reshape(n_tokens, layer.n_used)
    return Route(ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32))


def reference(layer: Layer, x: np.ndarray, route: Route) -> np.ndarray:
    """y [n_tokens, n_embd] in float64."""
    y = np.zeros((len(x), layer.n_embd))
    for t, s in np.ndindex(route.ids.shape):
        e = route.ids[t, s]

        def project(name: str, v: np.ndarray, e: int = e) -> np.ndarray:
            v = layer.weights[name].values[e] @ v * float(layer.scales[name][e] if layer.scales else 1)
            return v + layer.biases[name][e] if layer.biases else v

        gate = project("gate", x[t]) if "gate" in layer.weights else None
        hidden = activate(layer.activation, gate, project("up", x[t].astype(np.float64)))
        y[t] += float(route.weights[t, s]) * project("down", hidden)
    return y


def activate(kind: str, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
    a = up if gate is None else gate
    if kind == "swiglu_oai":
        a, up = np.minimum(a, LIMIT), np.clip(up, -LIMIT, LIMIT)
        return a / (1 + np.exp(-ALPHA * a)) * (up + 1)
    if kind in ("swiglu", "silu"):
        f = a / (1 + np.exp(np.minimum(-a, 700)))
    elif kind in ("geglu", "gelu"):
        f = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * a * (1 + 0.044715 * a * a)))
    else:
        f = np.maximum(a, 0) ** (2 if kind == "relu_sqr" else 1)
    return f if gate is None else f * up


class LayerGraph:
    """The nodes of all layers, and what their tensors are to hold."""

    def __init__(self, layers: list[Layer], n_tokens: int, plain_sum: bool, n_x_slots: int = 1):
        self.ctx = G.ggml_init(InitParams(16 << 20, None, True))
        self.graph = G.ggml_new_graph(self.ctx)
        self.data: list[tuple[int, Any]] = []
        self.experts: dict[int, tuple[str, Weights]] = {}
        self.n_tokens, self.n_x_slots = n_tokens, n_x_slots
        self.x = G.ggml_new_tensor_2d(self.ctx, F32, layers[0].n_embd, n_tokens * n_x_slots)
        self.routes = [
            (
                G.ggml_new_tensor_2d(self.ctx, I32, layer.n_used, n_tokens),
                G.ggml_new_tensor_3d(self.ctx, F32, 1, layer.n_used, n_tokens),
            )
            for layer in layers
        ]
        y = self.x
        for i, layer in enumerate(layers):
            y = self._layer(i, layer, y, *self.routes[i], plain_sum)
        self.y = y

    def _leaf(self, data: np.ndarray) -> int:
        shape = (*data.shape[::-1], 1)[:2]
        tensor = G.ggml_new_tensor_2d(self.ctx, F32, *shape)
        self.data.append((tensor, data))
        return tensor

    def _experts(self, i: int, name: str, w: Weights) -> int:
        n_expert, rows, k = w.values.shape
        tensor = G.ggml_new_tensor_3d(self.ctx, GGML_TYPES[w.kind], k, rows, n_expert)
        full = f"blk.{i}.ffn_{name}_exps.weight"
        G.ggml_set_name(tensor, full.encode())
        self.experts[tensor] = full, w
        return tensor

    def _project(self, layer: Layer, name: str, w: int, x: int, ids: int, bias: np.ndarray | None) -> int:
        y = G.ggml_mul_mat_id(self.ctx, w, x, ids)
        if layer.scales:
            scale = B.ggml_new_tensor_1d(self.ctx, F32, layer.n_expert)
            self.data.append((scale, layer.scales[name]))
            s = B.ggml_reshape_3d(self.ctx, scale, 1, layer.n_expert, 1)
            s = B.ggml_repeat_4d(self.ctx, s, 1, layer.n_expert, self.n_tokens, 1)
            y = B.ggml_mul(self.ctx, y, B.ggml_get_rows(self.ctx, s, ids))
        return y if bias is None else B.ggml_add_id(self.ctx, y, self._leaf(bias), ids)

    def _layer(self, i: int, layer: Layer, x: int, ids: int, weights: int, plain_sum: bool) -> int:
        x = B.ggml_reshape_3d(self.ctx, x, layer.n_embd, self.n_x_slots if i == 0 else 1, self.n_tokens)
        bias, w = layer.biases, layer.weights
        gate = None
        if layer.merged:
            both = Weights(
                w["up"].kind,
                np.concatenate([w["gate"].codes, w["up"].codes], 1),
                np.concatenate([w["gate"].values, w["up"].values], 1),
                None if w["up"].scales is None else np.concatenate([w["gate"].scales, w["up"].scales], 1),
                w["up"].block,
            )
            joined = np.concatenate([bias["gate"], bias["up"]], 1) if bias else None
            t = self._project(layer, "up", self._experts(i, "gate_up", both), x, ids, joined)
            row, n_ff = 8 * layer.n_ff, layer.n_ff
            gate, up = (
                B.ggml_view_3d(self.ctx, t, n_ff, layer.n_used, self.n_tokens, row, row * layer.n_used, 4 * n_ff * half)
                for half in (0, 1)
            )
        else:
            up = self._project(layer, "up", self._experts(i, "up", w["up"]), x, ids, bias.get("up"))
            if "gate" in w:
                gate = self._project(layer, "gate", self._experts(i, "gate", w["gate"]), x, ids, bias.get("gate"))
        hidden = self._activation(layer.activation, gate, up)
        y = self._project(layer, "down", self._experts(i, "down", w["down"]), hidden, ids, bias.get("down"))
        y = B.ggml_mul(self.ctx, y, weights)
        G.ggml_build_forward_expand(self.graph, y)
        return y if plain_sum else self._sum(layer, y)

    def _activation(self, kind: str, gate: int | None, up: int) -> int:
        if kind == "swiglu_oai":
            return B.ggml_swiglu_oai(self.ctx, gate, up, ALPHA, LIMIT)
        if gate is not None:
            return getattr(B, f"ggml_{kind}_split")(self.ctx, gate, up)
        if kind == "relu_sqr":
            return B.ggml_sqr(self.ctx, B.ggml_relu(self.ctx, up))
        return getattr(B, f"ggml_{kind}")(self.ctx, up)

    def _sum(self, layer: Layer, y: int) -> int:
        row = 4 * layer.n_embd
        views = [
            G.ggml_view_2d(self.ctx, y, layer.n_embd, self.n_tokens, row * layer.n_used, row * s)
            for s in range(layer.n_used)
        ]
        for view in views:
            G.ggml_build_forward_expand(self.graph, view)
        total = views[0]
        for view in views[1:]:
            total = B.ggml_add(self.ctx, total, view)
            G.ggml_build_forward_expand(self.graph, total)
        if layer.n_used == 1:
            total = B.ggml_cont(self.ctx, total)
            G.ggml_build_forward_expand(self.graph, total)
        return total


def run_layers(
    layers: list[Layer],
    x: np.ndarray,
    routes: list[Route],
    device: str = "HybridMoE",
    n_threads: int = 2,
    folder: Path | None = None,
    whole: bool = True,
    abort: Any = None,
) -> tuple[int, np.ndarray]:
    """x: float32 [n_tokens, n_embd] -> (status, y of the last layer). `folder` holds FP8 experts. Without `whole` the sum
    over experts is left out: y [n_tokens, n_used, n_embd]."""
    g = LayerGraph(layers, len(x), not whole)
    with backend(device, n_threads, abort) as b:
        with contextlib.ExitStack() as stack:
            in_files = {t for t, (_, w) in g.experts.items() if w.kind == "FP8"}
            if in_files:
                table = _native.ExpertTable(copied=False)
                for tensor in in_files:
                    name, w = g.experts[tensor]
                    table.add(expert_files(folder / f"{name}.bin", w, name))
                stack.enter_context(table)
            buffer = G.ggml_backend_alloc_ctx_tensors(g.ctx, b)
        assert buffer, "the tensors have no memory"
        for tensor, (_, w) in g.experts.items():
            if tensor not in in_files:
                set_tensor(tensor, w.codes)
        for tensor, data in g.data:
            set_tensor(tensor, data)
        set_tensor(g.x, x)
        for (ids, weights), route in zip(g.routes, routes, strict=True):
            set_tensor(ids, route.ids)
            set_tensor(weights, route.weights)
        status = G.ggml_backend_graph_compute(b, g.graph)
        lead = (len(x),) if whole else (len(x), layers[-1].n_used)
        y = np.empty((*lead, layers[-1].n_embd), np.float32)
        if y.size:
            G.ggml_backend_tensor_get(g.y, y.ctypes.data, 0, y.nbytes)
        G.ggml_backend_buffer_free(buffer)
    G.ggml_free(g.ctx)
    return status, y
