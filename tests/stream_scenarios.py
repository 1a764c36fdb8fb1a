"""What tests of streaming run in processes of their own: stream_scenarios.py LIBRARY SCENARIO ARGUMENT..., prints JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from typing import Any

import numpy as np

from stream_model import Model, Started, expected, fork, host, nmse, nmse_of, report, run_once  # isort: skip
from layer_graph import ACTIVATIONS, GATED, Layer, Route, random_layer, random_route
from weights import GGML_TYPES

ON: dict[str, object] = {"HYBRID_MOE_SLP": "on", "HYBRID_MOE_CPU_HELP": "off"}
KINDS = list(GGML_TYPES)


def chain(
    rng: np.random.Generator, n_layers: int, n_tokens: int, **shape: Any
) -> tuple[list[Layer], np.ndarray, list[Route]]:
    """Layers that follow one another, with routing weights that keep values about 1."""
    layers = [random_layer(rng, **shape) for _ in range(n_layers)]
    x = rng.standard_normal((n_tokens, layers[0].n_embd)).astype(np.float32)
    routes, v = [], x
    for layer in layers:
        route = random_route(rng, layer, n_tokens)
        y = expected(layer, v, route)
        route.weights /= np.float32(np.abs(y).std())
        routes.append(route)
        v = expected(layer, v, route).astype(np.float32)
    return layers, x, routes


def truth_of(layers: list[Layer], x: np.ndarray, routes: list[Route]) -> np.ndarray:
    v: np.ndarray = x
    for layer, route in zip(layers, routes, strict=True):
        v = expected(layer, v, route)
    return v


def books() -> list[dict[str, Any]]:
    return host.stats()["devices"]


def one_layer(rng: np.random.Generator, n_tokens: int, **shape: Any) -> tuple[Layer, np.ndarray, Route, np.ndarray]:
    layer = random_layer(rng, **shape)
    x = rng.standard_normal((n_tokens, layer.n_embd)).astype(np.float32)
    route = random_route(rng, layer, n_tokens)
    return layer, x, route, expected(layer, x, route)


def judged(layer: Layer, x: np.ndarray, route: Route, truth: np.ndarray) -> dict[str, Any]:
    """One run: its error relative to what its type allows, and what the devices did."""
    before = report()
    status, y = run_once([layer], x, [route])
    after = report()
    kind = max((w.kind for w in layer.weights.values()), key=nmse_of)
    return {
        "status": status,
        "error": nmse(y, truth) / nmse_of(kind),
        "streamed": after["layers"] - before["layers"],
        "rows": [d["rows"] for d in after["devices"]],
    }


def types(n_devices: str) -> Any:
    """Every weight type, also mixed."""
    rng = np.random.default_rng(1)
    cases = {kind: one_layer(rng, 90, n_embd=256, n_ff=256, n_expert=6, kind=kind) for kind in KINDS}
    mixed = one_layer(rng, 90, n_embd=256, n_ff=256, n_expert=6, kind="Q4_K")
    mixed[0].weights["down"] = random_layer(rng, n_embd=256, n_ff=256, n_expert=6, kind="Q6_K").weights["down"]
    cases["Q4_K and Q6_K"] = (*mixed[:3], expected(*mixed[:3]))
    return fork(ON | {"SIMGPU_DEVICES": n_devices}, lambda _: {k: judged(*c) for k, c in cases.items()})


def activations(n_devices: str) -> Any:
    """Every activation, plain, with biases, scales, both; merged gate and up; one expert per token."""
    rng = np.random.default_rng(2)
    cases = {}
    for activation in ACTIVATIONS:
        for extra in ({}, {"biased": True}, {"scaled": True}, {"biased": True, "scaled": True}):
            name = f"{activation} {' '.join(extra)}"
            cases[name] = one_layer(rng, 70, n_embd=96, n_ff=64, n_expert=5, activation=activation, **extra)
        if activation in GATED:
            cases[f"{activation} merged"] = one_layer(
                rng, 70, activation=activation, merged=True, biased=True, scaled=True
            )
        cases[f"{activation} n_used 1"] = one_layer(rng, 70, activation=activation, n_used=1)
    cases["wide"] = one_layer(rng, 70, n_embd=64, n_ff=200)  # the routing weight comes after the down projection
    return fork(ON | {"SIMGPU_DEVICES": n_devices}, lambda _: {k: judged(*c) for k, c in cases.items()})


def batches(n_devices: str, share: str) -> Any:
    """Ragged tiles (1024 rows) and several passes over the experts, in devices of 8 MiB."""
    rng = np.random.default_rng(3)
    layer = random_layer(rng, n_embd=96, n_ff=64, n_expert=4, n_used=2)
    cases = {}
    for n in (32, 33, 63, 65, 1000, 2049, 5000):
        x = rng.standard_normal((n, 96)).astype(np.float32)
        route = random_route(rng, layer, n)
        cases[str(n)] = (layer, x, route, expected(layer, x, route))
    variables = ON | {"SIMGPU_DEVICES": n_devices, "SIMGPU_MEMORY_MIB": 8, "HYBRID_MOE_VRAM_SHARE": share}

    def work(started: Started) -> Any:
        seen = {k: judged(*c) for k, c in cases.items()}
        peak = max(d["memory"]["peak"] / d["memory"]["total"] for d in books())
        return {"cases": seen, "peak": peak, "log": started.ours()}

    return fork(variables, work)


def limited_tensors() -> Any:
    """A device that refuses larger tensors than half of this batch."""
    case = one_layer(np.random.default_rng(60), 3000, n_embd=96, n_ff=64, n_expert=4, n_used=2)
    return fork(ON | {"SIMGPU_MAX_TENSOR_MIB": 3000 * 96 * 4 / 2**21}, lambda _: judged(*case))


def cpu_help(n_devices: str) -> Any:
    """A slow link: the CPU takes most experts. Twice, with rates measured and with rates known."""
    rng = np.random.default_rng(4)
    case = one_layer(rng, 200, n_embd=256, n_ff=256, n_expert=12, n_used=3)
    slow = {
        "HYBRID_MOE_SLP": "on",
        "SIMGPU_DEVICES": n_devices,
        "SIMGPU_PINNED_GBPS": 0.05,
        "SIMGPU_PAGEABLE_GBPS": 0.05,
    }

    def work(_: Started) -> Any:
        seen = [judged(*case), judged(*case)]
        return {
            "cases": seen,
            "cpu_experts": report()["cpu_experts"],
            "rows": sum(d["rows"] for d in report()["devices"]),
        }

    with tempfile.TemporaryDirectory() as cache:
        return [fork(slow | {"XDG_CACHE_HOME": cache}, work) for _ in range(2)]


def many_experts() -> Any:
    """More graphs than are queued between two synchronisations, few slots, slow compute: no slot is filled while it is read."""
    rng = np.random.default_rng(5)
    case = one_layer(rng, 150, n_embd=256, n_ff=128, n_expert=150, n_used=4)
    variables = ON | {"HYBRID_MOE_RING_MIB": 1, "SIMGPU_LAUNCH_US": 100}
    return fork(
        variables, lambda _: {"cases": [judged(*case) for _ in range(2)], "slots": report()["devices"][0]["slots"]}
    )


def look_ahead(n_devices: str) -> Any:
    """Three layers, twice. In the first pass only names tell what comes next."""
    rng = np.random.default_rng(6)
    layers, x, routes = chain(rng, 3, 64, n_embd=64, n_ff=64, n_expert=8)
    truth = truth_of(layers, x, routes)

    def work(_: Started) -> Any:
        model, seen = Model(layers, len(x)), []
        for _i in range(3):
            status, y = model.compute(x, routes)
            devices = report()["devices"]
            seen.append({"status": status, "nmse": nmse(y, truth), "ahead": [d["ahead_bytes"] for d in devices]})
        model.free()
        return {"passes": seen, "report": report()}

    return fork(ON | {"SIMGPU_DEVICES": n_devices}, work)


def unequal_layers(n_devices: str) -> Any:
    """Types, numbers of experts and sizes that differ from layer to layer: slots and tensors are made anew."""
    rng = np.random.default_rng(7)
    shapes = [
        {"n_ff": 64, "n_expert": 6},
        {"n_ff": 256, "n_expert": 3, "activation": "gelu"},
        {"n_ff": 128, "n_expert": 9, "kind": "BF16"},
        {"n_ff": 64, "n_expert": 6, "biased": True, "activation": "swiglu_oai"},
        {"n_ff": 320, "n_expert": 4, "merged": True},
    ]
    n = 80
    x = rng.standard_normal((n, 64)).astype(np.float32)
    layers, routes, v = [], [], x
    for shape in shapes:
        layer, _, route = chain(rng, 1, n, n_embd=64, n_used=2, **shape)
        scale = np.abs(expected(layer[0], v, route[0])).std() / np.abs(expected(layer[0], np.sign(v), route[0])).std()
        route[0].weights /= np.float32(max(scale, 1e-3))
        layers.append(layer[0])
        routes.append(route[0])
        v = expected(layer[0], v, route[0]).astype(np.float32)
    truth = truth_of(layers, x, routes)

    def work(_: Started) -> Any:
        model, seen = Model(layers, n), []
        for _i in range(3):
            status, y = model.compute(x, routes)
            seen.append({"status": status, "error": nmse(y, truth) / nmse_of("BF16")})
        model.free()
        return {"passes": seen, "report": report()}

    return fork(ON | {"SIMGPU_DEVICES": n_devices}, work)


def skewed(n_devices: str) -> Any:
    """One expert has half of the rows, half of the experts have none: those are not copied."""
    rng = np.random.default_rng(8)
    layer = random_layer(rng, n_embd=64, n_ff=64, n_expert=16, n_used=2)
    n = 600
    ids = np.zeros((n, 2), np.int32)
    ids[:, 1] = rng.integers(1, 8, n)
    route = Route(ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32))
    x = rng.standard_normal((n, 64)).astype(np.float32)
    truth = expected(layer, x, route)
    expert_bytes = 3 * 64 * 64 * 4
    with tempfile.TemporaryDirectory() as cache:
        variables = ON | {"SIMGPU_DEVICES": n_devices, "XDG_CACHE_HOME": cache}
        fork(variables, lambda _: judged(layer, x, route, truth))  # measures the rates

        def work(_: Started) -> Any:
            seen = judged(layer, x, route, truth)
            copied = sum(d["expert_bytes"] for d in report()["devices"]) / expert_bytes
            return seen | {"copied": copied, "up": sum(d["up"]["bytes"] for d in books()), "expert_bytes": expert_bytes}

        return fork(variables, work)


def unequal_devices() -> Any:
    """Equal links, slow compute on one, rings of two slots: what is left is the other's, and both slots hold the next layer's."""
    rng = np.random.default_rng(9)
    layers, x, routes = chain(rng, 2, 100, n_embd=256, n_ff=128, n_expert=30)
    for route in routes:  # ten rows for each, so that predictions are right
        route.ids[:] = np.arange(300).reshape(100, 3) % 30
    truth = truth_of(layers, x, routes)
    variables = ON | {
        "SIMGPU_DEVICES": 2,
        "SIMGPU_PINNED_GBPS": 0.05,
        "SIMGPU_LAUNCH_US": "10000,2",
        "HYBRID_MOE_RING_MIB": 1,
    }

    def work(_: Started) -> Any:
        model, seen = Model(layers, len(x)), []
        for _i in range(2):
            status, y = model.compute(x, routes)
            seen.append({"status": status, "nmse": nmse(y, truth)})
        return {"passes": seen, "experts": [d["experts"] for d in report()["devices"]]}

    return fork(variables, work)


def memory_books(share: str, ring_mib: str) -> Any:
    """What a layer with more experts than fit takes of a device's and the host's memory."""
    rng = np.random.default_rng(10)
    case = one_layer(rng, 256, n_embd=256, n_ff=256, n_expert=24, n_used=2)
    variables = ON | {"SIMGPU_MEMORY_MIB": 16, "HYBRID_MOE_VRAM_SHARE": share, "HYBRID_MOE_RING_MIB": ring_mib}

    def work(_: Started) -> Any:
        seen = judged(*case)
        device = report()["devices"][0]
        return seen | {"books": books()[0], "device": device}

    return fork(variables, work)


def less_memory() -> Any:
    """A long batch, then somebody else takes device memory, then a short batch: its share of what there is then."""
    rng = np.random.default_rng(17)
    layer = random_layer(rng, n_embd=256, n_ff=256, n_expert=24, n_used=2)
    cases = []
    for n in (3100, 64):
        x = rng.standard_normal((n, 256)).astype(np.float32)
        route = random_route(rng, layer, n)
        cases.append((layer, x, route, expected(layer, x, route)))

    def work(started: Started) -> Any:
        seen = [judged(*cases[0]) | {"used": books()[0]["memory"]["used"]}]
        host.tensor(host.device(0), (3 << 20) // 4)
        seen.append(judged(*cases[1]) | {"used": books()[0]["memory"]["used"] - (3 << 20)})
        return {"cases": seen, "log": started.ours()}

    return fork(ON | {"SIMGPU_MEMORY_MIB": 16, "HYBRID_MOE_VRAM_SHARE": 0.8}, work)


def choices() -> Any:
    """A token that chooses an expert twice, and experts that nobody chooses."""
    rng = np.random.default_rng(11)
    layer = random_layer(rng, n_embd=64, n_ff=64, n_expert=4, n_used=3)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    twice = random_route(rng, layer, 64)
    twice.ids[5] = (2, 2, 1)
    twice.ids[6] = (3, 3, 3)
    one = Route(np.zeros_like(twice.ids), twice.weights)
    one.ids[:] = (0, 1, 3)
    cases = {"twice": (layer, x, twice), "some": (layer, x, one)}
    return fork(ON, lambda _: {k: judged(*c, expected(*c)) for k, c in cases.items()})


def slots_of_x(n_devices: str) -> Any:
    """A row of x for every choice of a token instead of one for all."""
    rng = np.random.default_rng(12)
    layer = random_layer(rng, n_embd=64, n_ff=96, n_expert=5, n_used=3)
    x = rng.standard_normal((64, 3, 64)).astype(np.float32)
    route = random_route(rng, layer, 64)
    return fork(ON | {"SIMGPU_DEVICES": n_devices}, lambda _: judged(layer, x, route, expected(layer, x, route)))


def in_place() -> Any:
    """The result lies where the inputs lie, as hosts do it when they need these no more."""
    rng = np.random.default_rng(13)
    layer, x, route, truth = one_layer(rng, 64, n_embd=64, n_ff=96, n_expert=5)

    def work(_: Started) -> Any:
        seen = {}
        for what in ("x", "ids", "weights"):
            model = Model([layer], len(x))
            source = {"x": model.graph.x, "ids": model.graph.routes[0][0], "weights": model.graph.routes[0][1]}[what]
            model.lay_over(model.graph.y, source)
            status, y = model.compute(x, [route])
            seen[what] = {"status": status, "nmse": nmse(y, truth), "layers": report()["layers"]}
            model.free()
        return seen

    return fork(ON, work)


def refusals() -> Any:
    """Ids out of range, damaged FP8 weights in an expert that is used and in one that is not: the CPU's words."""
    rng = np.random.default_rng(14)
    layer, x, route, truth = one_layer(rng, 64, n_embd=64, n_ff=96, n_expert=8, n_used=2, kind="FP8")
    route.ids %= 6  # experts 6 and 7 have no rows
    route.ids[:, 1] = (route.ids[:, 0] + 1) % 6
    truth = expected(layer, x, route)

    def damaged(part: str, expert: int) -> Layer:
        codes = layer.weights[part].codes.copy()
        codes[expert, 3, 5] = 0x7F
        return Layer(layer.weights | {part: dataclasses.replace(layer.weights[part], codes=codes)}, layer.n_used)

    def with_id(i: int) -> Route:
        ids = route.ids.copy()
        ids[37, 1] = i
        return Route(ids, route.weights)

    cases = {f"{p} {e}": (damaged(p, e), route) for p in ("gate", "up", "down") for e in (4, 6)}
    cases |= {"id -1": (layer, with_id(-1)), "id 8": (layer, with_id(8)), "fine": (layer, route)}

    def work(started: Started) -> Any:
        seen = {}
        for name, (of_case, with_route) in cases.items():
            del started.log[:]
            # Two layers: the second one's experts are fetched ahead, damage and all.
            status, y = run_once([of_case], x, [with_route])
            seen[name] = {"status": status, "nmse": nmse(y, truth) if status == 0 else 0.0, "log": started.ours()}
        return {"cases": seen, "streamed": report()["layers"]}

    return [fork(ON | {"SIMGPU_DEVICES": n}, work) for n in (1, 2)] + [fork({"HYBRID_MOE_SLP": "off"}, work)]


def damaged_ahead() -> Any:
    """The second layer has a damaged expert, which is being fetched ahead when the layer begins."""
    rng = np.random.default_rng(15)
    layers, x, routes = chain(rng, 2, 64, n_embd=64, n_ff=64, n_expert=8, kind="FP8")
    codes = layers[1].weights["down"].codes

    def work(_: Started) -> Any:
        seen = []
        for expert in range(8):
            byte, codes[expert, 0, 0] = codes[expert, 0, 0], 0xFF
            model = Model(layers, len(x))
            seen += [model.compute(x, routes)[0] for _ in range(2)]
            model.free()
            codes[expert, 0, 0] = byte
        return {"statuses": seen, "report": report()}

    return [fork(ON | {"SIMGPU_PINNED_GBPS": gbps, "SIMGPU_PAGEABLE_GBPS": gbps}, work) for gbps in (0.003, 0.01, 10)]


def short_batches() -> Any:
    """Fewer than 32 tokens never stream; other batches do as HYBRID_MOE_SLP says."""
    rng = np.random.default_rng(16)
    cases = {str(n): one_layer(np.random.default_rng(n), n) for n in (1, 31, 32)}
    del rng
    off = fork({"HYBRID_MOE_SLP": "off"}, lambda _: judged(*cases["32"]))
    none = fork(ON | {"HYBRID_MOE_DEVICES": "none"}, lambda _: judged(*cases["32"]))
    return {"off": off, "none": none, "on": fork(ON, lambda _: {k: judged(*c) for k, c in cases.items()})}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
