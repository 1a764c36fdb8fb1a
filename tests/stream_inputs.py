"""Inputs that a streaming device holds already, handed over as ggml's scheduler does it: stream_inputs.py LIBRARY SCENARIO
ARGUMENT..., prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from stream_model import Model, Started, fork, host, nmse, report  # isort: skip
from ggml_graph import set_tensor
from stream_scenarios import ON, books, one_layer

SHAPE = {"n_embd": 64, "n_ff": 96, "n_expert": 5}


class Attention:
    """What computes x on a device: hands it to a model's input, whose own bytes are nonsense until they are asked for."""

    def __init__(self, i_device: int, n_tokens: int):
        self.device = host.device(i_device)
        self.backend = host.dev_init(self.device, None)
        self.ctx = host.ggml_init(host.InitParams(1 << 12, None, True))
        self.x = host.new_tensor(self.ctx, host.F32, SHAPE["n_embd"], n_tokens, 1)
        assert host.alloc_tensors(self.ctx, host.dev_buffer_type(self.device))

    def hand_over(self, x: np.ndarray, model: Model) -> None:
        set_tensor(model.graph.x, np.full_like(x, np.nan))
        host.tensor_set(self.x, np.ascontiguousarray(x).ctypes.data, 0, x.nbytes)
        host.copy_async(self.backend, model.backend, self.x, model.graph.x)


def run(
    variables: dict[str, object], over: str = "", given_up: bool = False, n_tokens: int = 96, n_passes: int = 3
) -> Any:
    """`over`: y lies where x does. `given_up`: each graph is prepared once in vain, with another x."""
    layer, x, route, truth = one_layer(np.random.default_rng(50), n_tokens, **SHAPE)

    def work(started: Started) -> Any:
        model = Model([layer], len(x))
        if over:
            model.lay_over(model.graph.y, model.graph.x)
        attention, seen = Attention(0, n_tokens), []
        for _ in range(n_passes):
            if given_up:
                attention.hand_over(x * 3, model)
            attention.hand_over(x, model)
            in_bytes = sum(d["in_bytes"] for d in report()["devices"])
            down = books()[0]["down"]["bytes"]
            status, y = model.compute(x, [route], x_is_there=True)
            after = report()
            seen.append({
                "status": status,
                "nmse": nmse(y, truth),
                "in_bytes": sum(d["in_bytes"] for d in after["devices"]) - in_bytes,
                "down": books()[0]["down"]["bytes"] - down,
            })  # fmt: skip
        model.free()
        return {
            "passes": seen,
            "x_bytes": x.nbytes,
            "y_bytes": 4 * truth.size,
            "log": started.ours(),
            "streamed": report()["layers"],
        }

    return fork(variables, work)


def all_ways() -> Any:
    two = ON | {"SIMGPU_DEVICES": 2}
    slow = {"HYBRID_MOE_SLP": "on", "SIMGPU_PINNED_GBPS": 0.02}
    small = {"SIMGPU_MEMORY_MIB": 8, "HYBRID_MOE_VRAM_SHARE": 0.3}
    return {
        f"{name}{' over' if over else ''}{' given up' if given_up else ''}": run(variables, over, given_up, **more)
        for name, variables, more in (
            ("one", ON, {}),
            ("two", two, {}),
            ("not the first", two | {"HYBRID_MOE_DEVICES": "SimGPU1"}, {}),
            ("with the CPU", slow, {}),
            ("several passes", ON | small, {"n_tokens": 2500}),
            ("on the CPU", ON | {"SIMGPU_MEMORY_MIB": 0.5, "HYBRID_MOE_VRAM_SHARE": 0.1}, {}),
            ("short", ON, {"n_tokens": 16}),
            ("failing", ON | {"SIMGPU_FAIL_COPY": "12"}, {}),
            ("no streaming", {"HYBRID_MOE_SLP": "off"}, {}),
        )
        for over in ("", "x")
        for given_up in (False, True)
    }


def any_copy_fails() -> Any:
    """Also the copies that hand the input over: each way of failing at one of the first copies."""
    return {str(n): run(ON | {"SIMGPU_FAIL_COPY": n}, n_passes=2) for n in range(1, 40)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
