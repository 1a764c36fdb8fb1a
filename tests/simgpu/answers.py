"""Scenarios about what the simulated GPU answers: products, whole models, and whether it loads at all. See scenarios.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host as h
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))


def exact() -> dict[str, Any]:
    """Whether each product has the same bits as on the CPU back end."""
    from weights import GGML_TYPES, random_weights

    out = {}
    cpu, gpu = h.dev_by_name(b"CPU"), h.device(0)
    backends = [(dev, h.dev_init(dev, None)) for dev in (cpu, gpu)]
    rng = np.random.default_rng(3)
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_K"):
        for n_used in (0, 3):
            n_expert, rows, k, n_tokens = 8 if n_used else 1, 48, 512, 7
            w = random_weights(kind, rows, k, rng, n_expert=n_expert)
            x = rng.standard_normal((n_tokens, k)).astype(np.float32)
            ids = rng.permuted(np.tile(np.arange(n_expert, dtype=np.int32), (n_tokens, 1)), axis=1)[:, :n_used]
            results = []
            for dev, backend in backends:
                product = h.Product(dev, GGML_TYPES[kind], (n_expert, rows, k), n_tokens, n_used)
                product.fill(w.codes, x, ids if n_used else None)
                status = h.graph_compute(backend, product.graph)
                results.append((status, product.fetch().copy()))
                product.free()
            picked = w.values[ids] if n_used else w.values[[[0]] * n_tokens]
            expected = np.einsum("turk,tk->tur", picked, x.astype(np.float64))
            name = f"MUL_MAT{'_ID' if n_used else ''} {kind}"
            error = float(np.abs(results[1][1] - expected).max() / np.abs(expected).max())
            out[name] = [[s for s, _ in results], bool(np.array_equal(results[0][1], results[1][1])), error]
    out["books"] = h.stats()["devices"][0]["compute"]
    out["declines"] = []
    for kind in (GGML_TYPES["FP8"], h.I32):  # whatever the CPU back end may say of them
        ctx = h.ggml_init(h.InitParams(1 << 16, None, True))
        op = h.mul_mat_id(
            ctx,
            h.new_tensor(ctx, kind, 64, 4, 2),
            h.new_tensor(ctx, h.F32, 64, 1, 1),
            h.new_tensor(ctx, h.I32, 1, 1, 1),
        )
        out["declines"].append(not h.dev_supports_op(gpu, op))
    return out


def model(library: str, gguf: str, directory: str) -> dict[str, Any]:
    """Logits by the CPU; with all layers on two devices; with weights offloaded from the host for a long batch; and with
    the plug-in's experts between attention on the devices. `directory` has the model of `gguf` with FP8 experts."""
    import llama_cpp

    import hybrid_moe_ext
    import models

    def run(llm: llama_cpp.Llama) -> np.ndarray:
        try:
            return models.logits(llm)
        finally:
            llm.close()

    # One thread: on a busy machine, teams that wait for each other at every node take most of the time.
    options = {**models.OPTIONS, "n_threads": 1, "n_threads_batch": 1}

    def stock(n_gpu_layers: int) -> llama_cpp.Llama:
        return llama_cpp.Llama(gguf, n_gpu_layers=n_gpu_layers, **options)

    expected = run(stock(0))
    assert h.load(library.encode())
    out: dict[str, Any] = {}

    def compare(name: str, open_model: Callable[[], llama_cpp.Llama]) -> None:
        h.reset_stats()
        out[name] = {"nmse": models.nmse(run(open_model()), expected), "devices": h.stats()["devices"]}

    compare("all", lambda: stock(99))
    compare("offload", lambda: stock(0))
    compare("hybrid", lambda: hybrid_moe_ext.Llama(directory, dense_type="f32", n_gpu_layers=99, **options))
    out["n_matmuls"] = hybrid_moe_ext.counters().n_matmuls
    return out


def refuse(library: str, cases: str) -> list[dict[str, Any]]:
    """Loads the library twice under each {variable: value}, in forks: a process reads them once. With what each logged."""
    out = []
    for variables in json.loads(cases):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.environ.update(variables)
            os.dup2(writer, 2)
            os._exit(sum(2**i for i in range(2) if h.load(library.encode())))
        os.close(writer)
        with os.fdopen(reader) as log:
            text = log.read()
        loaded = os.waitstatus_to_exitcode(os.wait()[1])
        out.append({"first": bool(loaded & 1), "second": bool(loaded & 2), "log": text})
    return out
