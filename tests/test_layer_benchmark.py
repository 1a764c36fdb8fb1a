"""The layer benchmark: it runs whole layers on our device, agrees with stock ggml before it times, and refuses nonsense."""

import pytest

from hybrid_moe_ext import OptionError, counters, register
from hybrid_moe_ext.bench import Limits, bench_layer
from hybrid_moe_ext.bench import layer as layer_module
from hybrid_moe_ext.bench.graph import Shape

LIMITS = Limits(1, 10.0, 100.0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(layer_module.SHAPES, "small", Shape(512, 256, 8, 2))
    register()


@pytest.mark.parametrize("kind", layer_module.OURS)
def test_every_type_of_ours_runs_as_a_whole_layer(kind):
    before = counters()
    results = list(bench_layer("small", [kind], [1, 20], 1, LIMITS, rounds=1))
    assert counters().n_layers > before.n_layers
    assert {r.n_tokens for r in results if r.engine == "hybrid-moe"} == {1, 20}
    assert all(r.ms > 0 and r.gbps > 0 and r.gflops > 0 for r in results)
    assert ("ggml" in {r.engine for r in results}) == (kind in layer_module.STOCK)


@pytest.mark.parametrize(
    "shape, kinds, message",
    [
        ("huge", ["FP8"], "deepseek"),
        ("small", ["FP9"], "FP8"),
        ("gpt-oss", ["MXFP4", "Q4_K"], "Q4_K has blocks of 256"),
    ],
)
def test_unknown_shapes_and_types(shape, kinds, message):
    with pytest.raises(OptionError, match=message):
        list(bench_layer(shape, kinds, [1], 1, LIMITS))
