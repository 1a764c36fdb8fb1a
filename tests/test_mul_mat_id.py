"""MUL_MAT_ID on our device, as a host calls it, against float64: shapes, routing, broadcasting, threads, faults."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggml_graph import ABORT_CALLBACK, ABORTED, FAILED, SUCCESS, expert_files, mul_mat_id
from hybrid_moe_ext import counters, register
from layer_graph import random_layer, random_route, run_layers
from quantised import FORMATS
from weights import FLOATS_FROM, GROUP, Weights, met_by, random_weights, tolerance, whole_groups

KINDS = ["FP8", "BF16", "F16", "F32", *FORMATS]


def run(tmp_path, w: Weights, x, ids, **options):
    if w.kind == "FP8":
        options["experts"] = expert_files(tmp_path / "experts.bin", w, "blk.0.ffn_up_exps.weight")
    return mul_mat_id(w, x, ids, **options)


def check(tmp_path, w: Weights, x: np.ndarray, ids: np.ndarray, **options) -> None:
    status, y = run(tmp_path, w, x, ids, **options)
    assert status == SUCCESS
    isa = register().isa
    for t in range(len(ids)):
        for s, expert in enumerate(ids[t]):
            row = met_by(w.kind, isa, x[t, s % x.shape[1]][None], int((ids == expert).sum()))
            exact = row @ w.values[expert].T
            assert np.all(np.abs(y[t, s] - exact[0]) <= tolerance(w, row, expert)[0]), (t, s, expert)


def inputs(rng, n_tokens, n_slots, k, n_expert, n_used):
    x = rng.standard_normal((n_tokens, n_slots, k)).astype(np.float32)
    ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    return x, ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [1, 3, 300])
@pytest.mark.parametrize("rows, k", [(192, 96), (72, 320), (576, 160)])
def test_shapes_and_batches(tmp_path, kind, n_tokens, rows, k):
    rng = np.random.default_rng(1)
    k = whole_groups(kind, k)
    w = random_weights(kind, rows, k, rng, n_expert=6)
    before = counters()
    check(tmp_path, w, *inputs(rng, n_tokens, 1, k, 6, 3))
    after = counters()
    assert after.n_matmuls == before.n_matmuls + 1
    assert after.n_rows == before.n_rows + 3 * n_tokens
    used_gemm = after.n_gemm_experts > before.n_gemm_experts
    expanded = kind not in FORMATS or kind in FLOATS_FROM
    assert used_gemm == (n_tokens == 300 and expanded), (
        "few rows take the dot kernel, many the gemm kernel, or int8 all of them"
    )


@pytest.mark.parametrize("kind", ["FP8", "Q8_0"])
@pytest.mark.parametrize("n_expert, n_used", [(1, 1), (2, 2), (60, 4), (160, 6), (384, 8), (1024, 16)])
def test_expert_counts(tmp_path, kind, n_expert, n_used):
    rng = np.random.default_rng(n_expert)
    w = random_weights(kind, 24, 32, rng, block=(16, 16), n_expert=n_expert)
    check(tmp_path, w, *inputs(rng, 3, 1, 32, n_expert, n_used))


@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_broadcast(tmp_path, n_slots):
    """One input row for all experts of a token (gate, up), one each (down), and groups of them."""
    rng = np.random.default_rng(2)
    w = random_weights("FP8", 40, 64, rng, n_expert=5)
    x, ids = inputs(rng, 7, n_slots, 64, 5, 4)
    check(tmp_path, w, x, ids)


def test_repeated_ids_and_a_view_of_ids(tmp_path):
    rng = np.random.default_rng(3)
    w = random_weights("BF16", 40, 64, rng, n_expert=8)
    x = rng.standard_normal((9, 1, 64)).astype(np.float32)
    check(tmp_path, w, x, np.full((9, 3), 5, np.int32), ids_stride=8)
    check(tmp_path, w, x, rng.integers(0, 8, (9, 3)).astype(np.int32), ids_stride=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 300),
    groups=st.integers(1, 12),
    n_expert=st.integers(1, 20),
    n_used=st.integers(1, 6),
    n_tokens=st.integers(0, 40),
    n_threads=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_anything(tmp_path, kind, rows, groups, n_expert, n_used, n_tokens, n_threads, seed):
    rng = np.random.default_rng(seed)
    k = whole_groups(kind, groups * 32)
    w = random_weights(kind, rows, k, rng, n_expert=n_expert)
    x = rng.standard_normal((n_tokens, 1, k)).astype(np.float32)
    ids = rng.integers(0, n_expert, (n_tokens, n_used)).astype(np.int32)
    check(tmp_path, w, x, ids, n_threads=min(n_threads, 2))


@pytest.mark.parametrize("n_tokens", [1, 10, 70])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *FORMATS])
def test_same_as_the_cpu_back_end(tmp_path, kind, n_tokens):
    """The stock CPU rounds activations for BF16 and F16, so it is only close there; for quantised types so do we."""
    rng = np.random.default_rng(4)
    k = 3 * max(64, GROUP[kind])
    w = random_weights(kind, 64, k, rng, n_expert=4)
    x, ids = inputs(rng, n_tokens, 1, k, 4, 2)
    _, ours = run(tmp_path, w, x, ids)
    _, stock = run(tmp_path, w, x, ids, device="CPU")
    nmse = np.sum((ours - stock) ** 2) / np.sum(stock**2)
    int8 = kind in FORMATS and register().isa != "scalar" and not (n_tokens > 30 and kind in FLOATS_FROM)
    exact = kind == "F32" or int8
    assert nmse < (1e-12 if exact else 1e-4)


def test_quantised_types_are_left_to_stock_where_its_kernels_are_faster():
    """On the scalar kernels: the host must get a no, so that it keeps its own layouts."""
    script = (
        "import ggml_graph, numpy as np, weights;"
        "w = weights.random_weights('Q4_K', 8, 256, np.random.default_rng(0), n_expert=2);"
        "ggml_graph.mul_mat_id(w, np.zeros((1, 1, 256), np.float32), np.zeros((1, 1), np.int32))"
    )
    for isa, taken in (("scalar", False), (register().isa, register().isa != "scalar")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=os.path.dirname(__file__),
            env={**os.environ, "HYBRID_MOE_ISA": isa},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) == taken
        assert ("AssertionError" in done.stderr) != taken


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_are_an_error_and_not_a_crash(tmp_path, bad, capfd):
    rng = np.random.default_rng(5)
    w = random_weights("F32", 16, 32, rng, n_expert=4)
    x, ids = inputs(rng, 3, 1, 32, 4, 2)
    ids[1, 1] = bad
    status, _ = run(tmp_path, w, x, ids)
    assert status == FAILED


def test_nan_codes_and_scales_are_an_error_at_first_use(tmp_path):
    rng = np.random.default_rng(6)
    x, ids = inputs(rng, 3, 1, 64, 4, 2)
    for damage in ("code", "scale"):
        w = random_weights("FP8", 40, 64, rng, n_expert=4)
        used, unused = ids[0, 0], next(i for i in range(5) if i not in ids)
        if unused < 4:  # an expert that nobody asks for is not looked at
            w.codes[unused, 3, 5] = 0x7F
            assert run(tmp_path, w, x, ids)[0] == SUCCESS
        if damage == "code":
            w.codes[used, 39, 63] = 0xFF
        else:
            w.scales[used, 0, 0] = np.inf
        status, _ = run(tmp_path, w, x, ids)
        assert status == FAILED


def test_abort_callback_stops_the_layer(tmp_path):
    rng = np.random.default_rng(7)
    w = random_weights("F32", 64, 32, rng, n_expert=4)
    x, ids = inputs(rng, 3, 1, 32, 4, 2)
    asked = []
    abort = ABORT_CALLBACK(lambda _: asked.append(1) or True)
    assert run(tmp_path, w, x, ids, abort=abort)[0] == ABORTED
    assert asked
    go_on = ABORT_CALLBACK(lambda _: False)
    assert run(tmp_path, w, x, ids, abort=go_on)[0] == SUCCESS


@pytest.mark.parametrize("n_tokens", [1, 50])
@pytest.mark.parametrize("whole", [False, True])
def test_the_abort_callback_is_asked_on_the_callers_thread(whole, n_tokens):
    """As stock does: what a host's callback reads may belong to that thread."""
    rng = np.random.default_rng(9)
    asked = set()
    abort = ABORT_CALLBACK(lambda _: asked.add(threading.get_ident()) or False)
    for _ in range(5):
        layer = random_layer(rng, 64, 512, n_expert=8)
        x = rng.standard_normal((n_tokens, 64)).astype(np.float32)
        route = random_route(rng, layer, n_tokens)
        assert run_layers([layer], x, [route], whole=whole, abort=abort)[0] == SUCCESS
    assert asked == {threading.get_ident()}


def test_i8_without_scales_is_refused(tmp_path):
    """A tensor of codes whose scales nobody declared must not be computed with."""
    rng = np.random.default_rng(8)
    w = random_weights("FP8", 16, 32, rng, n_expert=2)
    x, ids = inputs(rng, 1, 1, 32, 2, 1)
    with pytest.raises(MemoryError):
        mul_mat_id(w, x, ids)
