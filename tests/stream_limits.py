"""What a device may take, and what may be read ahead of time: stream_limits.py LIBRARY SCENARIO, prints JSON. No tests here."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from stream_model import Model, Started, expected, fork, nmse, report  # isort: skip
from layer_graph import random_layer, random_route
from stream_scenarios import ON, chain, truth_of


def two_sizes(ring_mib: str) -> Any:
    """Layers of large and of small experts by turns, whose slots share one ring."""
    rng = np.random.default_rng(70)
    large, small = ({"n_embd": 128, "n_ff": n_ff, "n_expert": 24} for n_ff in (512, 64))
    layers = [random_layer(rng, **shape) for shape in (large, small, large, small)]
    x = rng.standard_normal((96, 128)).astype(np.float32)
    routes, truth = [], x
    for layer in layers:
        route = random_route(rng, layer, len(x))
        route.weights /= np.float32(np.abs(expected(layer, truth, route)).std())
        routes.append(route)
        truth = expected(layer, truth, route).astype(np.float32)

    def work(started: Started) -> Any:
        model = Model(layers, len(x))
        status, y = model.compute(x, routes)
        device = report()["devices"][0]
        model.free()
        return {
            "status": status,
            "nmse": nmse(y, truth_of(layers, x, routes)),
            "ring_bytes": device["slots"] * device["slot_bytes"],
            "streamed": report()["layers"],
            "log": started.ours(),
        }

    return fork(ON | {"HYBRID_MOE_RING_MIB": ring_mib}, work)


def elsewhere(where: str) -> Any:
    """Experts in our buffers, or in those of the host's CPU back end, which tells nobody when it frees them."""
    layers, x, routes = chain(np.random.default_rng(71), 3, 96, n_embd=64, n_ff=96, n_expert=8)

    def work(started: Started) -> Any:
        model = Model(layers, len(x), home={"ours": "HybridMoE", "cpu": "CPU"}[where])
        passes = [model.compute(x, routes) for _ in range(3)]
        device = report()["devices"][0]
        model.free()
        return {
            "passes": [{"status": status, "nmse": nmse(y, truth_of(layers, x, routes))} for status, y in passes],
            "ahead_bytes": device["ahead_bytes"],
            "streamed": report()["layers"],
            "log": started.ours(),
        }

    return fork(ON, work)


def named_twice() -> Any:
    layers, x, routes = chain(np.random.default_rng(72), 1, 64, n_embd=64, n_ff=96, n_expert=8)

    def work(started: Started) -> Any:
        model = Model(layers, len(x))
        model.compute(x, routes)
        model.free()
        return {"devices": [d["name"] for d in report()["devices"]], "log": started.ours()}

    return fork(ON | {"HYBRID_MOE_DEVICES": "SimGPU0,SimGPU0"}, work)


SCENARIOS = {f.__name__: f for f in (two_sizes, elsewhere, named_twice)}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[2]](*sys.argv[3:])))
