"""What long batches may use changes while they run: stream_permit.py LIBRARY SCENARIO, prints JSON. No tests."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

from stream_model import Model, Started, expected, fork, nmse, report  # isort: skip
from hybrid_moe_ext import _native
from layer_graph import Layer, Route, random_layer, random_route

ON: dict[str, object] = {"HYBRID_MOE_SLP": "on", "SIMGPU_DEVICES": 2}
# 64 experts of 48 KiB: half a second of copying for two devices.
SLOW: dict[str, object] = {"SIMGPU_PINNED_GBPS": 0.003, "SIMGPU_PAGEABLE_GBPS": 0.003, "HYBRID_MOE_CPU_HELP": "off"}


def _layer(n_tokens: int) -> tuple[Layer, np.ndarray, Route]:
    rng = np.random.default_rng(3)
    layer = random_layer(rng, n_embd=64, n_ff=64, n_expert=64)
    return layer, rng.standard_normal((n_tokens, 64)).astype(np.float32), random_route(rng, layer, n_tokens)


def _experts() -> list[int]:
    return [d["experts"] for d in report()["devices"]]


def _wait_for_experts(n: list[int]) -> None:
    """Until each device has computed so many."""
    while not report()["devices"] or any(has < wanted for has, wanted in zip(_experts(), n, strict=True)):
        time.sleep(0.002)


def during_a_layer() -> Any:
    """A device is taken away when it has computed some experts of the layer at hand, then the other one, then given back."""
    layer, x, route = _layer(400)
    truth = expected(layer, x, route)

    def work(_: Started) -> Any:
        model, seen = Model([layer], len(x)), []
        model.compute(x, [route])  # measures the rates
        for allowed in (b"SimGPU0", b"SimGPU1", None):
            _native.allow_streaming(None, cpu_may_help=True)
            before = _experts()
            computing = threading.Thread(target=lambda: seen.append(model.compute(x, [route])))
            computing.start()
            _wait_for_experts([n + 2 for n in before])
            _native.allow_streaming(allowed, cpu_may_help=True)
            computing.join()
            status, y = seen[-1]
            seen[-1] = {
                "status": status,
                "nmse": nmse(y, truth),
                "experts": [n - m for n, m in zip(_experts(), before, strict=True)],
                "allowed": report()["allowed"],
            }
        return seen

    with tempfile.TemporaryDirectory() as cache:
        return fork(ON | SLOW | {"XDG_CACHE_HOME": cache}, work)


def who_may() -> Any:
    """Devices and the CPU's help, from layer to layer; unknown names."""
    layer, x, route = _layer(400)
    truth = expected(layer, x, route)

    def work(_: Started) -> Any:
        model, seen = Model([layer], len(x)), []
        model.compute(x, [route])  # measures the rates
        for devices, cpu in ((None, 1), (b"SimGPU1", 0), (b"SimGPU0, SimGPU1", 0), (b"", 1), (None, 1)):
            _native.allow_streaming(devices, bool(cpu))
            before, helped = _experts(), report()["cpu_experts"]
            status, y = model.compute(x, [route])
            seen.append(
                {
                    "status": status,
                    "nmse": nmse(y, truth),
                    "experts": [n - m for n, m in zip(_experts(), before, strict=True)],
                    "cpu": report()["cpu_experts"] - helped,
                }
            )
        try:
            _native.allow_streaming(b"SimGPU7", True)
        except Exception as error:
            return {"layers": seen, "error": str(error)}
        return {"layers": seen}

    return fork(ON, work)


def first() -> Any:
    """A thread whose batches have priority, while another one streams."""
    layer, x, route = _layer(400)
    short_x, short_route = x[:64], Route(route.ids[:64], route.weights[:64])
    truth = expected(layer, short_x, short_route)

    def work(_: Started) -> Any:
        long, short = Model([layer], len(x)), Model([layer], len(short_x))
        computing = threading.Thread(target=lambda: long.compute(x, [route]))
        computing.start()
        _wait_for_experts([1])
        _native.put_this_thread_first()
        before = report()["layers_on_cpu"]
        status, y = short.compute(short_x, [short_route])
        on_cpu = report()["layers_on_cpu"] - before
        did_not_wait = computing.is_alive()
        computing.join()
        alone = report()["layers_on_cpu"]
        short.compute(short_x, [short_route])
        return {
            "status": status,
            "nmse": nmse(y, truth),
            "on_cpu": on_cpu,
            "did_not_wait": did_not_wait,
            "on_cpu_alone": report()["layers_on_cpu"] - alone,
        }

    return fork(ON | SLOW | {"SIMGPU_DEVICES": "1"}, work)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]]()))
