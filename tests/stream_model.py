"""Layers whose experts are streamed to simulated GPUs, in processes of their own: simulated devices and the plug-in read their
settings once. A case is a fork of a process that has loaded neither, so that hundreds of them cost seconds. No tests here."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "simgpu"))

import host
import numpy as np

from ggml_graph import ABORT_CALLBACK, G, P, backend, bind, expert_files, set_tensor
from hybrid_moe_ext import _native, register
from layer_graph import Layer, LayerGraph, Route, activate

LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, P)
B = bind(ggml_log_set=(None, [LOG_CALLBACK, P]))
DATA = 248  # offset of ggml_tensor.data
PATIENCE_S = int(os.environ.get("STREAM_PATIENCE_S", "60"))  # a case that takes longer hangs
NMSE = {
    "F32": 1e-12,
    "F16": 2e-6,
    "BF16": 3e-5,
    "FP8": 3e-5,
    "Q8_0": 2e-4,
}  # by what the CPU back end rounds activations to
QUANTISED_NMSE = 1e-3


def nmse_of(kind: str) -> float:
    return NMSE.get(kind, QUANTISED_NMSE)


def expected(layer: Layer, x: np.ndarray, route: Route) -> np.ndarray:
    """y in float64, expert by expert. x: [n_tokens, n_embd], or [n_tokens, n_used, n_embd]: a row per choice."""
    y = np.zeros((len(x), layer.n_embd))
    for e in np.unique(route.ids):
        tokens, slots = np.nonzero(route.ids == e)
        rows = (x[tokens] if x.ndim == 2 else x[tokens, slots % x.shape[1]]).astype(np.float64)

        def project(name: str, v: np.ndarray, e: int = e) -> np.ndarray:
            v = v @ layer.weights[name].values[e].T * float(layer.scales[name][e] if layer.scales else 1)
            return v + layer.biases[name][e] if layer.biases else v

        gate = project("gate", rows) if "gate" in layer.weights else None
        out = project("down", activate(layer.activation, gate, project("up", rows)))
        np.add.at(y, tokens, out * route.weights[tokens, slots, None].astype(np.float64))
    return y


def nmse(y: np.ndarray, truth: np.ndarray) -> float:
    """Infinite for NaN anywhere."""
    return float(((y - truth) ** 2).sum() / (truth**2).sum()) if np.isfinite(y).all() else float("inf")


class Model:
    """Layers in one graph with their weights loaded once; run as often as wanted."""

    def __init__(
        self,
        layers: list[Layer],
        n_tokens: int,
        abort: Callable[[], bool] | None = None,
        n_x_slots: int = 1,
        home: str = "HybridMoE",  # the device whose kind of buffer holds everything
    ):
        self.layers, self.graph = layers, LayerGraph(layers, n_tokens, plain_sum=False, n_x_slots=n_x_slots)
        self.abort = ABORT_CALLBACK(lambda _: abort()) if abort else None
        self.open = contextlib.ExitStack()
        self.backend = self.open.enter_context(backend("HybridMoE", 1, self.abort))
        self.folder = Path(self.open.enter_context(tempfile.TemporaryDirectory()))
        in_files = {t for t, (_, w) in self.graph.experts.items() if w.kind == "FP8"}
        with contextlib.ExitStack() as loading:
            if in_files:
                table = _native.ExpertTable(copied=False)
                for tensor in in_files:
                    name, w = self.graph.experts[tensor]
                    table.add(expert_files(self.folder / f"{name}.bin", w, name))
                loading.enter_context(table)
            buffer_type = host.dev_buffer_type(G.ggml_backend_dev_by_name(home.encode()))
            self.buffer = host.alloc_tensors(self.graph.ctx, buffer_type)
        assert self.buffer
        for tensor, (_, w) in self.graph.experts.items():
            if tensor not in in_files:
                set_tensor(tensor, w.codes)
        for tensor, data in self.graph.data:
            set_tensor(tensor, data)

    def compute(self, x: np.ndarray, routes: list[Route], x_is_there: bool = False) -> tuple[int, np.ndarray]:
        if not x_is_there:
            set_tensor(self.graph.x, x)
        for (ids, weights), route in zip(self.graph.routes, routes, strict=True):
            set_tensor(ids, route.ids)
            set_tensor(weights, route.weights)
        status = G.ggml_backend_graph_compute(self.backend, self.graph.graph)
        y = np.empty((len(x), self.layers[-1].n_embd), np.float32)
        G.ggml_backend_tensor_get(self.graph.y, y.ctypes.data, 0, y.nbytes)
        return status, y

    def lay_over(self, tensor: int, other: int) -> None:
        """The tensor's bytes lie where the other's lie from now on."""
        ctypes.c_void_p.from_address(tensor + DATA).value = ctypes.c_void_p.from_address(other + DATA).value

    def free(self) -> None:
        G.ggml_backend_buffer_free(self.buffer)
        G.ggml_free(self.graph.ctx)
        self.open.close()


def run_once(layers: list[Layer], x: np.ndarray, routes: list[Route]) -> tuple[int, np.ndarray]:
    model = Model(layers, len(x), n_x_slots=1 if x.ndim == 2 else x.shape[1])
    result = model.compute(x, routes)
    model.free()
    return result


def report() -> dict[str, Any]:
    return json.loads(_native.library().hybrid_moe_stream_report())


class Started:
    """A host process with simulated devices and the plug-in; keeps what is logged."""

    def __init__(self, variables: dict[str, object]):
        self.log: list[str] = []
        self._callback = LOG_CALLBACK(
            lambda level, text, _: self.log.append(text.decode(errors="replace")) if level != 5 else None
        )
        for name in [n for n in os.environ if n.startswith("SIMGPU_")]:
            del os.environ[name]
        os.environ.update({name: str(value) for name, value in variables.items()})
        B.ggml_log_set(self._callback, None)
        assert host.load(sys.argv[1].encode()), self.log
        register()
        B.ggml_log_set(self._callback, None)

    def ours(self) -> list[str]:
        return [line.strip() for line in self.log if line.startswith("hybrid-moe")]


def fork(variables: dict[str, object], work: Callable[[Started], Any], patience_s: int = PATIENCE_S) -> Any:
    """What `work` returns, run in a process of its own; {"crash": ...} with stack dumps when it crashes or hangs."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.dup2(errors.fileno(), 2)
            _be_case(write_end, variables, work, patience_s)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        said = errors.read()
    if status != 0 or not text:
        return {"crash": f"status {status} under {variables}: {said}"}
    return json.loads(text)


def _be_case(write_end: int, variables: dict[str, object], work: Callable[[Started], Any], patience_s: int) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(patience_s, exit=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        result = work(Started(variables))
        with os.fdopen(write_end, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
