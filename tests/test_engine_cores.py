"""How the cores are divided between the workers: what is tried, what is chosen, and that both workers follow."""

from __future__ import annotations

import pytest

from engine_solo import engine, greedy, prompt, result
from hybrid_moe_ext.engine.cores import MOST_TRIALS, Cores
from hybrid_moe_ext.engine.options import EngineOptions, Threads

pytestmark = pytest.mark.usefixtures("no_deadlock")


def run_pass(cores: Cores, step_s: dict[int, float], prefill_tps: dict[int, float], n_steps: int = 6) -> int:
    """One pass of 512 tokens on a machine of that kind. Returns the decode worker's threads meanwhile."""
    cores.begin_pass()
    decode = cores.decode
    for _ in range(n_steps):
        cores.step(4, step_s[decode])
    cores.end_pass(512, 512 / prefill_tps[decode])
    return decode


def decided(cores: Cores, step_s: dict[int, float], prefill_tps: dict[int, float]) -> int:
    tried = []
    while not cores.is_decided:
        tried.append(run_pass(cores, step_s, prefill_tps))
    assert tried == [4, 2, 6, 4] and {t.decode for t in cores.trials} == {2, 4, 6}
    assert run_pass(cores, step_s, prefill_tps) == cores.decode and cores.prefill == cores.alone - cores.decode
    return cores.decode


def test_within_the_service_level_prompts_get_the_rest():
    fast = {2: 0.04, 4: 0.03, 6: 0.028}
    assert decided(Cores(Threads(8, 4, 4), 0.05, False), fast, {2: 300, 4: 200, 6: 100}) == 2
    slower = {2: 0.08, 4: 0.045, 6: 0.028}
    assert decided(Cores(Threads(8, 4, 4), 0.05, False), slower, {2: 300, 4: 200, 6: 100}) == 4


def test_without_it_the_best_of_both():
    bound_by_memory = {2: 0.10, 4: 0.095, 6: 0.09}  # more threads do not decode faster
    assert decided(Cores(Threads(8, 4, 4), 0.05, False), bound_by_memory, {2: 300, 4: 200, 6: 100}) == 2
    cores = Cores(Threads(8, 4, 4), 0.05, False)
    assert decided(cores, {2: 0.60, 4: 0.20, 6: 0.06}, {2: 110, 4: 100, 6: 90}) == 6
    assert "6 threads decode beside 2" in str(cores) and "prompt 100 tokens/s, step 200.0 ms" in str(cores)


def test_it_ends_whatever_happens():
    cores = Cores(Threads(8, 4, 4), 0.05, False)
    for _ in range(MOST_TRIALS):
        assert not cores.is_decided
        run_pass(cores, {4: 0.01}, {4: 100}, n_steps=1)  # too few steps in a pass to tell
    assert cores.is_decided and cores.decode == 4 and not cores.trials


@pytest.mark.parametrize(("alone", "given"), [(1, False), (2, False), (8, True)])
def test_nothing_to_choose(alone: int, given: bool):
    half = max(1, alone // 2)
    cores = Cores(Threads(alone, half, max(1, alone - half)), 0.05, given)
    assert cores.is_decided and run_pass(cores, {half: 1.0}, {half: 1.0}) == half and not cores.trials


def test_an_engine_measures_and_decides():
    with engine("qwen3-30b", n_threads=4, n_ctx=512, prefill_batch=8) as e:
        beside = [e.submit(greedy(prompt(9, seed=i), 400)) for i in range(1)]
        while not e.cores.is_decided:
            result(e.submit(greedy(prompt(100, seed=3), 1)))
            if beside[-1].is_done:
                beside.append(e.submit(greedy(prompt(9, seed=9), 400)))
        assert {t.decode for t in e.cores.trials} <= {1, 2, 3} and e.cores.decode + e.cores.prefill == 4
        assert all(t.prefill_tps > 0 and t.step_s > 0 for t in e.cores.trials)
        for stream in beside:
            stream.cancel()
    with engine("qwen3-30b", n_threads=4, n_threads_decode=3) as e:
        assert e.cores.is_decided and (e.cores.decode, e.cores.prefill) == (3, 1)


def test_what_depends_on_where_attention_is_computed():
    many, few = EngineOptions(), EngineOptions(n_parallel=2)
    assert (many.wants_flash, few.wants_flash, EngineOptions(n_parallel=2, flash_attn="on").wants_flash) == (
        True,
        False,
        True,
    )
    assert many.resolved(False).min_chunk == 64 and many.resolved(True).min_chunk == 16
    assert few.resolved(False).min_chunk == 16 and EngineOptions(min_chunk=5).resolved(False).min_chunk == 5
    assert EngineOptions(n_batch=24).resolved(False).min_chunk == 16  # a step holds no more


def test_flash_attention_is_chosen_and_can_be_refused():
    def kind(**options: object) -> int:
        with engine("qwen3-30b", **options) as e:
            return int(e.llama.context_params.flash_attn_type)

    auto, off, on = -1, 0, 1
    chosen = (kind(flash_attn="auto", n_parallel=4), kind(flash_attn="auto", n_parallel=2))
    asked = (kind(flash_attn="off"), kind(flash_attn="on"))
    assert (chosen, asked) == ((auto, off), (off, on))
