"""The benchmarks of layers and kernels: they run on our device, compare with float64 before they time, and refuse nonsense."""

import json
import re

import numpy as np
import pytest

from hybrid_moe_ext import OptionError, PluginError, counters, register
from hybrid_moe_ext.bench import Limits, bench_kernels, bench_layer, measure_limits, torch_peer
from hybrid_moe_ext.bench import kernels as kernels_module
from hybrid_moe_ext.bench import layer as layer_module
from hybrid_moe_ext.bench import limits as limits_module
from hybrid_moe_ext.bench.graph import LayerGraph, Shape
from hybrid_moe_ext.cli import bench as cli_module
from hybrid_moe_ext.cli import run as command_line

LIMITS = Limits(1, 10.0, 100.0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(layer_module.SHAPES, "small", Shape(256, 512, 8, 2))
    monkeypatch.setitem(layer_module.SHAPES, "odd", Shape(288, 96, 8, 2))
    monkeypatch.setattr(kernels_module, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(kernels_module, "ROUND_S", 1e-4)
    monkeypatch.setattr(kernels_module.os, "sysconf", lambda name: 0)
    register()


def engines_for(kind: str) -> set[str]:
    """Those that must be there; repacked layouts depend on the CPU."""
    torch = {"torch"} if torch_peer.is_installed() and kind in torch_peer.KINDS else set()
    return {"hybrid-moe"} | torch | ({"ggml"} if kind in layer_module.STOCK else set())


@pytest.mark.parametrize("kind", layer_module.OURS)
def test_every_type_of_ours_runs_as_a_whole_layer(kind):
    before = counters()
    results = list(bench_layer("small", [kind], [1, 20], 1, LIMITS, rounds=1))
    assert counters().n_layers > before.n_layers
    assert {r.engine for r in results} - {"ggml repacked"} == engines_for(kind)
    assert {r.n_tokens for r in results if r.engine == "hybrid-moe"} == {1, 20}
    assert all(r.ms > 0 and r.gbps > 0 and r.gflops > 0 for r in results)


@pytest.mark.parametrize("kind", layer_module.OURS)
def test_every_type_of_ours_as_a_product(kind):
    before = counters()
    results = list(bench_kernels(["small"], [kind], [1, 20], 1, LIMITS, rounds=1))
    after = counters()
    assert after.n_matmuls > before.n_matmuls and after.n_layers == before.n_layers
    assert {r.engine for r in results} - {"ggml repacked"} == engines_for(kind)
    assert {(r.shape, r.n_tokens) for r in results if r.engine == "hybrid-moe"} == {("256x512", 1), ("256x512", 20)}
    assert all(r.ms > 0 and r.gbps > 0 and r.gflops > 0 for r in results)


@pytest.mark.parametrize("bench", [lambda: bench_layer("small", ["FP8"], [2], 1, LIMITS),
                                   lambda: bench_kernels(["small"], ["FP8"], [2], 1, LIMITS)])  # fmt: skip
def test_wrong_results_are_not_timed(monkeypatch, bench):
    true = LayerGraph.output

    def wrong(self) -> np.ndarray:
        y = true(self)
        y[-1] *= 1.03
        return y

    monkeypatch.setattr(LayerGraph, "output", wrong)
    with pytest.raises(PluginError, match="hybrid-moe is wrong"):
        list(bench())


@pytest.mark.parametrize(
    "shape, kinds, message",
    [("huge", ["FP8"], "deepseek"), ("small", ["FP9"], "FP8"), ("odd", ["Q4_K"], "blocks of 256")],
)
def test_unknown_shapes_and_types(shape, kinds, message):
    with pytest.raises(OptionError, match=message):
        list(bench_layer(shape, kinds, [1], 1, LIMITS))
    with pytest.raises(OptionError, match=message):
        list(bench_kernels([shape], kinds, [1], 1, LIMITS))


def test_limits(monkeypatch):
    monkeypatch.setattr(limits_module, "READ_BYTES", 16 << 20)
    limits = measure_limits(1)
    assert limits.n_threads == 1 and limits.read_gbps > 0.1 and limits.fma_gflops > 0.1


@pytest.mark.parametrize("command", [["kernels", "--shapes"], ["layer", "--shape"]])
def test_command_line(command, capfd, monkeypatch):
    monkeypatch.setattr(cli_module, "measure_limits", lambda n_threads: LIMITS)
    arguments = ["bench", *command, "small", "--types", "bf16", "--rows", "1", "--rounds", "1", "--threads", "1"]
    assert command_line([*arguments, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["limits"]["read_gbps"] == 10 and {r["engine"] for r in told["results"]} >= {"hybrid-moe", "ggml"}
    assert command_line(arguments) == 0
    table = capfd.readouterr().out
    assert "hybrid-moe" in table and re.search(r"\d\.\d\dx", table)
    assert command_line([*arguments[:3], "nonsense"]) == 2


@pytest.mark.parametrize("arguments", [
    ["layer", "--types", ""], ["layer", "--rows", ""], ["layer", "--rows", "99999999999999999999"], ["layer", "--rows", "0"],
    ["kernels", "--types", ","], ["kernels", "--shapes", " , "], ["kernels", "--rows", "65537"], ["model", "--types", ""],
])  # fmt: skip
def test_nothing_to_time_and_too_much_is_refused_before_anything_is_measured(arguments, monkeypatch, capfd):
    monkeypatch.setattr(cli_module, "measure_limits", lambda n: pytest.fail("measured"))
    assert command_line(["bench", *arguments]) == 2
    assert arguments[1] in capfd.readouterr().err
