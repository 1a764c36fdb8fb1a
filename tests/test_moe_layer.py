"""Whole MoE blocks on our device, against float64: every variant that llama.cpp builds, awkward sizes, bad input.
Each test that says "one step" asserts by the counters that it was."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggml_graph import FAILED, SUCCESS, mul_mat_id
from hybrid_moe_ext import counters
from hybrid_moe_ext.loading import take_failure
from layer_graph import ACTIVATIONS, GATED, Layer, Route, random_layer, random_route, reference, run_layers

KINDS = ["F32", "F16", "BF16", "Q8_0", "FP8"]
NMSE = 1e-11  # float32 sums of a few hundred terms
NMSE_GELU = 1e-6  # ggml's GELU takes and gives half floats
NMSE_INT8 = 2e-3  # activations of few rows are rounded to int8, as stock does it


def nmse(found: np.ndarray, want: np.ndarray) -> float:
    return float(((found - want) ** 2).sum() / (want**2).sum())


def check(layers: list[Layer], x: np.ndarray, routes: list[Route], tmp_path=None, **options) -> np.ndarray:
    """Every layer in one step, and close to float64."""
    before = counters().n_layers
    status, y = run_layers(layers, x, routes, folder=tmp_path, **options)
    assert status == SUCCESS and counters().n_layers == before + len(layers)
    want = x
    for layer, route in zip(layers, routes, strict=True):
        want = reference(layer, want, route)
    assert nmse(y, want) <= len(layers) * max(limit(layer) for layer in layers)
    return y


def limit(layer: Layer) -> float:
    if layer.weights["up"].kind == "Q8_0":
        return NMSE_INT8
    return NMSE_GELU if layer.activation in ("gelu", "geglu") else NMSE


def case(rng, n_tokens: int = 5, **options) -> tuple[Layer, np.ndarray, Route]:
    layer = random_layer(rng, **options)
    x = rng.standard_normal((n_tokens, layer.n_embd)).astype(np.float32)
    return layer, x, random_route(rng, layer, n_tokens)


@pytest.mark.parametrize("n_tokens", [1, 60])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("activation", "merged"), [(a, False) for a in ACTIVATIONS] + [(a, True) for a in GATED])
def test_variants(activation, merged, scaled, biased, n_tokens):
    rng = np.random.default_rng(1)
    layer, x, route = case(rng, n_tokens, activation=activation, merged=merged, scaled=scaled, biased=biased)
    check([layer], x, [route])


@pytest.mark.parametrize("n_tokens", [1, 7, 300])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_types(tmp_path, kind, scaled, n_tokens):
    rng = np.random.default_rng(2)
    layer, x, route = case(rng, n_tokens, kind=kind, scaled=scaled, n_used=1 if kind == "F16" else 3)
    check([layer], x, [route], tmp_path)


@pytest.mark.parametrize("n_expert, n_used", [(1, 1), (60, 4), (160, 6), (288, 8), (384, 8), (512, 10), (896, 16)])
@pytest.mark.parametrize("kind", ["FP8", "Q8_0"])
def test_expert_counts(tmp_path, kind, n_expert, n_used):
    rng = np.random.default_rng(n_expert)
    layer, x, route = case(rng, 6, kind=kind, n_embd=32, n_ff=32, n_expert=n_expert, n_used=n_used, scaled=True)
    check([layer], x, [route], tmp_path)


SIZES = [(96, 6, 3), (32, 60, 1), (320, 2, 2), (64, 160, 8), (96, 5, 5)]  # n_ff, n_expert, n_used


@pytest.mark.parametrize("n_tokens", [1, 50])
def test_layers_of_different_sizes_in_one_model(n_tokens):
    """They share one working memory: a small layer after a large one, and more experts after fewer."""
    rng = np.random.default_rng(3)
    layers = [random_layer(rng, 64, n_ff, n_expert, n_used) for n_ff, n_expert, n_used in SIZES]
    for layer in layers:  # keeps values near one from layer to layer
        for w in layer.weights.values():
            w.codes = (w.codes.view(np.float32) / np.float32(4)).view(np.uint8)
            w.values = w.values / 4
    x = rng.standard_normal((n_tokens, 64)).astype(np.float32)
    check(layers, x, [random_route(rng, layer, n_tokens) for layer in layers])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    activation=st.sampled_from(ACTIVATIONS),
    merged=st.booleans(),
    scaled=st.booleans(),
    biased=st.booleans(),
    n_embd=st.integers(1, 8),
    n_ff=st.integers(1, 8),
    n_expert=st.integers(1, 20),
    n_used=st.integers(1, 6),
    n_tokens=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_anything(tmp_path, kind, activation, merged, scaled, biased, n_embd, n_ff, n_expert, n_used, n_tokens, seed):
    rng = np.random.default_rng(seed)
    variant = {"activation": activation, "merged": merged and activation in GATED, "scaled": scaled, "biased": biased}
    sizes = {"n_embd": 32 * n_embd, "n_ff": 32 * n_ff, "n_expert": n_expert, "n_used": min(n_used, n_expert)}
    layer, x, route = case(rng, n_tokens, kind=kind, **sizes, **variant)
    check([layer], x, [route], tmp_path)


# --- Bad input: an error or the reference's answer, never a crash.


@pytest.mark.parametrize("scaled", [False, True])
def test_no_rows(scaled):
    layer, x, route = case(np.random.default_rng(4), 0, scaled=scaled, biased=True)
    status, y = run_layers([layer], x, [route])
    assert status == SUCCESS and y.shape == (0, 64)


@pytest.mark.parametrize("n_tokens", [0, 1, 9])
def test_no_experts_used(n_tokens):
    """One product is all that can be asked for: ggml itself divides by zero when another shall read its result."""
    rng = np.random.default_rng(5)
    w = random_layer(rng).weights["up"]
    x = rng.standard_normal((n_tokens, 1, 64)).astype(np.float32)
    before = counters().n_rows
    status, y = mul_mat_id(w, x, np.empty((n_tokens, 0), np.int32))
    assert status == SUCCESS and y.shape == (n_tokens, 0, 96) and counters().n_rows == before


@pytest.mark.parametrize("scaled", [False, True])
def test_a_block_that_is_not_whole_runs_by_operations(scaled):
    rng = np.random.default_rng(6)
    layer, x, route = case(rng, 9, scaled=scaled, biased=True)
    before = counters().n_layers
    status, y = run_layers([layer], x, [route], whole=False)
    assert status == SUCCESS and counters().n_layers == before
    assert nmse(y.sum(1, dtype=np.float64), reference(layer, x, route)) <= NMSE


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1, -(2**31)])
def test_ids_out_of_range(bad, whole, n_tokens):
    rng = np.random.default_rng(7)
    layer, x, route = case(rng, n_tokens, scaled=True, biased=True)
    good = route.ids.copy()
    route.ids[-1, 1] = bad
    take_failure()
    assert run_layers([layer], x, [route], whole=whole)[0] == FAILED
    assert str(bad) in take_failure()
    route.ids[:] = good
    assert run_layers([layer], x, [route], whole=whole)[0] == SUCCESS and not take_failure()


@pytest.mark.parametrize("n_tokens", [1, 60])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_as_in_stock(activation, n_tokens):
    """Rows with them get NaN and infinity where stock's CPU back end has them; all other rows stay as they were."""
    rng = np.random.default_rng(8)
    layer, x, route = case(rng, n_tokens, activation=activation, scaled=True, biased=True)
    _, clean = run_layers([layer], x, [route])
    for value in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[n_tokens // 2, 7] = value
        status, ours = run_layers([layer], bad, [route])
        assert status == SUCCESS
        _, stock = run_layers([layer], bad, [route], device="CPU")
        assert np.array_equal(np.isnan(ours), np.isnan(stock))
        assert np.array_equal(np.isposinf(ours), np.isposinf(stock)) and np.array_equal(
            np.isneginf(ours), np.isneginf(stock)
        )
        others = np.arange(n_tokens) != n_tokens // 2
        assert np.array_equal(ours[others], clean[others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [2, 60])
def test_nan_and_infinity_in_one_row_of_every_type(tmp_path, kind, n_tokens):
    rng = np.random.default_rng(9)
    layer, x, route = case(rng, n_tokens, kind=kind)
    bad = x.copy()
    bad[1, 3] = np.nan
    _, clean = run_layers([layer], x, [route], folder=tmp_path)
    _, ours = run_layers([layer], bad, [route], folder=tmp_path)
    assert np.isnan(ours[1]).all()
    others = np.arange(n_tokens) != 1
    assert np.array_equal(ours[others], clean[others])


def test_a_weight_of_nan_or_zero_for_an_expert():
    """Weights of experts multiply what was computed: 0 x NaN is NaN, as in the graph's own order."""
    rng = np.random.default_rng(10)
    layer, x, route = case(rng, 3)
    route.weights[1, 0] = np.nan
    route.weights[2, 0] = 0
    _, ours = run_layers([layer], x, [route])
    assert np.isnan(ours[1]).all() and np.isfinite(ours[[0, 2]]).all()
    x[2, 0] = np.nan
    assert np.isnan(run_layers([layer], x, [route])[1][2]).all()
