"""Devices that fail, one way after another: stream_faults.py LIBRARY SCENARIO ARGUMENT..., prints JSON."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from typing import Any

import numpy as np

from stream_model import Model, Started, fork, nmse, report, run_once  # isort: skip
from stream_scenarios import ON, books, chain, one_layer, truth_of

N_PASSES = 2


@functools.cache
def case() -> Any:
    rng = np.random.default_rng(20)
    layers, x, routes = chain(rng, 2, 40, n_embd=64, n_ff=64, n_expert=6)
    return layers, x, routes, truth_of(layers, x, routes)


def passes(started: Started, n_passes: int = N_PASSES) -> dict[str, Any]:
    """Two layers, again and again, in one process."""
    layers, x, routes, truth = case()
    model, seen = Model(layers, len(x)), []
    for _ in range(n_passes):
        status, y = model.compute(x, routes)
        seen.append({"status": status, "nmse": nmse(y, truth)})
    model.free()
    said = report()
    return {
        "passes": seen,
        "log": started.ours(),
        "troubles": said["troubles"],
        "streamed": said["layers"],
        "on_cpu": said["layers_on_cpu"],
        "failures": [d["failures"] for d in said["devices"]],
        "calls": [d["calls"] for d in books()],
        "memory": [d["memory"]["used"] for d in books()],
        "pinned": [d["pinned_staging"] for d in said["devices"]],
    }


def sweep(setting: str, what: str, n_devices: str, measured: str, step: str = "1") -> Any:
    """SIMGPU_<setting>=n for every `step`-th n that a run without faults counts. `measured`: "known": rates are known."""
    with tempfile.TemporaryDirectory() as cache:
        variables = ON | {"SIMGPU_DEVICES": n_devices, "XDG_CACHE_HOME": cache}
        counts = fork(variables, passes)
        if measured == "known":
            counts = fork(variables, passes)
        else:
            variables["XDG_CACHE_HOME"] = "/dev/null/nowhere"
        n_max = max(calls[what] for calls in counts["calls"])
        cases = {str(n): fork(variables | {f"SIMGPU_{setting}": n}, passes) for n in range(1, n_max + 1, int(step))}
        return {"without": counts, "cases": cases}


def device_memory() -> Any:
    """Devices without room for two experts, and one of two without."""
    return {
        "none": fork(ON | {"SIMGPU_MEMORY_MIB": 0.1}, passes),
        "one of two": fork(ON | {"SIMGPU_DEVICES": 2, "SIMGPU_MEMORY_MIB": "64,0.1"}, passes),
        "never any": fork(ON | {"SIMGPU_FAIL_ALLOC": "1+"}, passes),
    }


def pinning() -> Any:
    return {
        "refused": fork(ON | {"SIMGPU_FAIL_HOST_ALLOC": "1+"}, passes),
        "second refused": fork(ON | {"SIMGPU_FAIL_HOST_ALLOC": "2"}, passes),
        "little": fork(ON | {"SIMGPU_HOST_MEMORY_MIB": 20}, passes),
    }


def always_failing() -> Any:
    """Every copy fails, on the only device, on one of two; lost from the start."""
    return {
        "only": fork(ON | {"SIMGPU_FAIL_COPY": "1+"}, lambda s: passes(s, 6)),
        "one of two": fork(ON | {"SIMGPU_DEVICES": 2, "SIMGPU_FAIL_COPY": ",1+"}, lambda s: passes(s, 6)),
        "lost": fork(ON | {"SIMGPU_LOSE_AT": "1"}, lambda s: passes(s, 6)),
        "both lost": fork(ON | {"SIMGPU_DEVICES": 2, "SIMGPU_LOSE_AT": "200"}, lambda s: passes(s, 6)),
    }


def stalls() -> Any:
    """An op that takes 300 ms, on one of two devices and on the only one."""
    return {
        str((n, at)): fork(ON | {"SIMGPU_DEVICES": n, "SIMGPU_STALL": f"{at}:300"}, passes)
        for n in (1, 2)
        for at in (60, 150)
    }


def names() -> Any:
    """HYBRID_MOE_DEVICES with an unknown name, beside a known one and alone."""
    two = ON | {"SIMGPU_DEVICES": 2}
    return {
        "beside": fork(two | {"HYBRID_MOE_DEVICES": "SimGPU1, CUDA7"}, passes),
        "alone": fork(two | {"HYBRID_MOE_DEVICES": "CUDA7"}, passes),
        "one": fork(two | {"HYBRID_MOE_DEVICES": "SimGPU0"}, passes),
    }


def with_cpu_help(setting: str, values: str) -> Any:
    """The same while the CPU takes a share of every layer."""
    layer, x, route, truth = one_layer(np.random.default_rng(21), 64, n_embd=128, n_ff=64, n_expert=8)

    def work(started: Started) -> Any:
        seen = []
        for _ in range(3):
            status, y = run_once([layer], x, [route])
            seen.append({"status": status, "nmse": nmse(y, truth)})
        return {"passes": seen, "log": started.ours(), "cpu_experts": report()["cpu_experts"]}

    slow = {"HYBRID_MOE_SLP": "on", "SIMGPU_PINNED_GBPS": 0.1}
    return {v: fork(slow | {f"SIMGPU_{setting}": v}, work) for v in values.split()}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
