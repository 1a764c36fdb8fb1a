"""Contexts at once, models that come and go while experts are fetched ahead, callbacks that abort, ends of processes:
stream_threads.py LIBRARY SCENARIO ARGUMENT..., prints JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np

from stream_model import Model, Started, fork, nmse, report  # isort: skip
from stream_scenarios import ON, books, chain, truth_of

Chain = tuple[Any, np.ndarray, list[Any], np.ndarray]


def make(seed: int, n_layers: int = 2, n_tokens: int = 48, **shape: Any) -> Chain:
    shape = {"n_embd": 64, "n_ff": 64, "n_expert": 6} | shape
    layers, x, routes = chain(np.random.default_rng(seed), n_layers, n_tokens, **shape)
    return layers, x, routes, truth_of(layers, x, routes)


def compute(model: Model, case: Chain) -> dict[str, Any]:
    _, x, routes, truth = case
    status, y = model.compute(x, routes)
    return {"status": status, "nmse": nmse(y, truth)}


def contexts(n_devices: str, other: str) -> Any:
    """Two threads with a context each, of one shape or of two."""
    shapes = [{}, {"same": {}, "different": {"n_ff": 160, "n_expert": 9, "activation": "relu"}}[other]]
    cases = [make(30 + i, 3, **shape) for i, shape in enumerate(shapes)]

    def work(started: Started) -> Any:
        models = [Model(c[0], len(c[1])) for c in cases]
        seen: list[list[dict[str, Any]]] = [[], []]

        def run(i: int) -> None:
            for _ in range(8):
                seen[i].append(compute(models[i], cases[i]))

        threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for m in models:
            m.free()
        return {"passes": seen[0] + seen[1], "streamed": report()["layers"], "log": started.ours()}

    return fork(ON | {"SIMGPU_DEVICES": n_devices}, work)


def one_shares_with_cpu() -> Any:
    """A context that streams and one whose batches are too short for it, at once."""
    long, short = make(32), make(33, n_tokens=8)

    def work(started: Started) -> Any:
        models = [Model(c[0], len(c[1])) for c in (long, short)]
        seen: list[list[dict[str, Any]]] = [[], []]
        threads = [
            threading.Thread(target=lambda i=i, c=c: seen[i].extend(compute(models[i], c) for _ in range(10)))
            for i, c in enumerate((long, short))
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return {"passes": seen[0] + seen[1], "streamed": report()["layers"], "log": started.ours()}

    return fork(ON, work)


def aborts(n_devices: str, help_of_cpu: str) -> Any:
    """A callback that ends the layer at its k-th call, with links that take seconds; afterwards the same model computes."""
    case = make(34, 2, n_embd=128, n_expert=8)
    variables = {
        "HYBRID_MOE_SLP": "on",
        "HYBRID_MOE_CPU_HELP": help_of_cpu,
        "SIMGPU_DEVICES": n_devices,
        "SIMGPU_PINNED_GBPS": 0.01,
    }

    def work(started: Started) -> Any:
        calls = {"n": 0, "at": 0}

        def must_abort() -> bool:
            calls["n"] += 1
            return 0 < calls["at"] <= calls["n"]

        model, seen = Model(case[0], len(case[1]), must_abort), []
        seen.append(compute(model, case)["status"])  # rates are measured
        for at in (1, 2, 5, 9):
            calls.update(n=0, at=at)
            seen.append(compute(model, case)["status"])
        calls.update(at=0)
        last = compute(model, case)
        model.free()
        return {"aborted": seen, "passes": [last], "log": started.ours()}

    return fork(variables, work)


def come_and_go(n_devices: str, n_times: str) -> Any:
    """Models that go while their experts are fetched ahead, each replaced by one with other weights in the same place."""
    cases = [make(40 + i, 2, n_tokens=32) for i in range(3)]
    variables = ON | {"SIMGPU_DEVICES": n_devices, "SIMGPU_PINNED_GBPS": 0.02}

    def work(started: Started) -> Any:
        seen, n_ahead, places = [], 0, set()
        for i in range(int(n_times)):
            case = cases[i % 3]
            model = Model(case[0], len(case[1]))
            places.add(model.buffer)
            first, second = compute(model, case), compute(model, case)
            before = sum(d["wasted_bytes"] for d in report()["devices"])
            model.free()
            n_ahead += sum(d["wasted_bytes"] for d in report()["devices"]) > before
            seen += [first, second]
        return {"passes": seen, "n_ahead": n_ahead, "streamed": report()["layers"], "log": started.ours()}

    return fork(variables, work)


def other_goes() -> Any:
    """A model goes again and again while another one streams."""
    stays, goes = make(45, 3), make(46, 2, n_tokens=32)

    def work(started: Started) -> Any:
        model = Model(stays[0], len(stays[1]))
        seen: list[dict[str, Any]] = []
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                seen.append(compute(model, stays))

        thread = threading.Thread(target=run)
        thread.start()
        of_others = []
        for _ in range(15):
            other = Model(goes[0], len(goes[1]))
            of_others.append(compute(other, goes))
            other.free()
        stop.set()
        thread.join()
        model.free()
        return {"passes": seen + of_others, "streamed": report()["layers"], "log": started.ours()}

    return fork(ON | {"SIMGPU_PINNED_GBPS": 0.1}, work)


def traced(path: str) -> Any:
    """A trace of two devices, two contexts and the CPU's share, of a process that ends while experts are on their way."""
    cases = [make(48, 3), make(49, 2)]
    variables = {"HYBRID_MOE_SLP": "on", "HYBRID_MOE_TRACE": path, "SIMGPU_DEVICES": 2, "SIMGPU_PINNED_GBPS": 0.02}
    Started(variables)
    models = [Model(c[0], len(c[1])) for c in cases]
    seen: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda m=m, c=c: seen.append(compute(m, c))) for m, c in zip(models, cases, strict=True)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return {"passes": seen, "experts": sum(d["experts"] for d in report()["devices"])}


def leave_while_fetching(how: str) -> Any:
    """Not a fork: this process ends in the ordinary way while experts are on their way to a device."""
    case = make(47, 2, n_tokens=32)
    Started(ON | {"SIMGPU_PINNED_GBPS": 0.002})
    model = Model(case[0], len(case[1]))
    result = compute(model, case)
    if how == "freed":
        model.free()
    up = books()[0]["up"]
    return {"passes": [result], "bytes": up["bytes"], "ahead": report()["devices"][0]["ahead_bytes"]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])), flush=True)
