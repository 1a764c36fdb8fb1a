"""The search for the largest n_ubatch, what limits it and what follows for speed, on accounts that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_moe_ext.fits.accounting import Account, Gpu, Use
from hybrid_moe_ext.fits.cost import Cost, prompt_cost
from hybrid_moe_ext.fits.search import SLOTS, STEP, Setting, judge, limit, search
from hybrid_moe_ext.fits.source import Source

GIB, MIB = 1 << 30, 1 << 20


def setting(n_ctx: int = 8192, gib: float = 8.0, n_gpus: int = 1, **changes: object) -> Setting:
    """Experts of 1 MiB, 64 in each of 4 layers."""
    source = Source("made-up", "gguf", "", ("Q8_0",), 4, 64, 256 * MIB, 256 * MIB, MIB, MIB, 10**6)
    gpus = tuple(Gpu(f"GPU{i}", "", "assumed", int(gib * GIB)) for i in range(n_gpus))
    s = Setting(source, gpus, (10.0,) * n_gpus, None, n_ctx, 1024, n_ctx, 100.0, 0, Cost(1e12, 1e12, 1e12))
    return replace(s, **changes)


def account(s: Setting, n_ubatch: int) -> Account:
    """1 GiB of weights, half of KV cache, and 1 MiB of compute buffers per token."""
    use = Use(GIB, GIB // 2, n_ubatch * MIB)
    return Account({gpu.name: use for gpu in s.gpus}, Use(), 0)


def test_search_finds_the_largest():
    s = setting()
    rows = search(s, lambda n: account(s, n))
    largest = max(row.n_ubatch for row in rows if row.fits)
    stream = 2 * 1024 * 4  # input and partial sum, bytes per token
    exact = (8 * GIB - GIB - GIB // 2 - SLOTS * MIB) / (MIB + stream)
    assert exact - STEP < largest <= exact and largest % STEP == 0
    assert not judge(s, largest + STEP, account(s, largest + STEP)).fits
    for row in rows:
        (d,) = row.devices
        assert d.ring == d.usable - d.weights - d.kv_cache - d.compute - d.stream
        assert d.slots == max(0, d.ring) // MIB and row.fits == (d.slots >= SLOTS)
        assert row.ceiling_tps == pytest.approx(row.n_ubatch / (256 * MIB / 10e9))
        assert row.tps < row.ceiling_tps


def test_search_stops_at_the_context_and_below_the_first():
    s = setting(n_ctx=300)
    (row,) = search(s, lambda n: account(s, n))
    assert row.n_ubatch == 300 and row.fits
    s = setting(gib=1.2)
    (row,) = search(s, lambda n: account(s, n))
    assert row.n_ubatch == 512 and not row.fits and row.devices[0].slots == 0


def test_links_and_compute_add_up():
    """Two equal links halve the pass. A prompt never takes less than its copies, nor than its compute."""
    one, two = setting(n_gpus=1), setting(n_gpus=2)
    assert two.pass_s == pytest.approx(one.pass_s / 2)
    for s in (one, two):
        for tflops in (1e-3, 1.0, 1e6):
            t = replace(s, tflops=tflops)
            seconds = t.n_prompt / judge(t, 4096, account(t, 4096)).tps
            copies = 2 * t.pass_s + t.n_prompt * 4 * t.n_embd * 4 / 10e9  # two passes, and four layers' results
            compute = (2e12 + 1e12 / len(t.gpus)) / tflops / 1e12
            assert seconds >= max(copies, compute) * (1 - 1e-9)
            assert seconds <= (copies + compute) * (1 + 1e-9)


def test_a_longer_ring_hides_more_of_attention():
    s = setting(tflops=31.0)  # a layer: 8 ms of copies, 8 of attention, 4 of experts
    short, long = (
        judge(replace(s, gpus=(Gpu("GPU0", "", "assumed", int(g * GIB)),)), 4096, account(s, 4096)) for g in (5.54, 8)
    )
    assert short.fits and long.tps > 1.05 * short.tps


@pytest.mark.parametrize(
    ("gib", "cause"),
    [(0.5, "weights"), (1.2, "KV cache"), (1.8, "compute buffers"), (2.0055, "the ring"), (64, "the context")],
)
def test_what_limits(gib, cause):
    s = setting(gib=gib)
    assert limit(s, search(s, lambda n: account(s, n))).startswith(cause)


def test_a_reserve_that_leaves_nothing_is_named():
    s = replace(setting(gib=1.2), reserve=GIB)
    assert limit(s, search(s, lambda n: account(s, n))).startswith("weights")  # nor would it fit without
    s = replace(setting(gib=4), reserve=4 * GIB)
    assert limit(s, search(s, lambda n: account(s, n))).startswith(
        "the reserve: but for its 4096 MiB, 512 tokens would fit"
    )


def test_cost_says_what_it_does_not_know():
    source = setting().source
    meta = {
        "general.architecture": "x",
        "x.block_count": "2",
        "x.embedding_length": "64",
        "x.attention.head_count": "[4, 2]",
    }
    assert prompt_cost(meta, source, 3).attention == 2 * (4 + 2) * 32 * 6
    windowed = prompt_cost(meta | {"x.attention.sliding_window": "2"}, source, 3)
    assert windowed.attention == 2 * (4 + 2) * 32 * 6 and "counted as full" in windowed.note
    hybrid = prompt_cost(meta | {"x.ssm.state_size": "2"}, source, 3)
    assert hybrid.attention is None and hybrid.outside_experts == hybrid.projections and hybrid.note
