"""The oracle is right: every order of the stages of small cases is tried. And what it says of the paper's stage times."""

import itertools

import pytest

from engine_oracle import PAPER_GAINS, PAPER_US, Stages, stages


def _makespan(gpu: tuple[int, ...], cpu: tuple[int, ...], a: tuple, m: tuple) -> float | None:
    """Of two lanes when each machine serves them in this order of turns; None: the orders wait for each other."""
    n_gpu, n_cpu, ready, free = [0, 0], [0, 0], [0.0, 0.0], [0.0, 0.0]
    i = j = 0
    while i < len(gpu) or j < len(cpu):
        if i < len(gpu) and n_gpu[gpu[i]] == n_cpu[gpu[i]]:  # its experts of the layer before are done
            lane = gpu[i]
            free[0] = ready[lane] = max(free[0], ready[lane]) + a[lane]
            n_gpu[lane] += 1
            i += 1
        elif j < len(cpu) and n_gpu[cpu[j]] == n_cpu[cpu[j]] + 1:
            lane = cpu[j]
            free[1] = ready[lane] = max(free[1], ready[lane]) + m[lane]
            n_cpu[lane] += 1
            j += 1
        else:
            return None
    return max(ready)


def _best_makespan(n_layers: int, a: tuple, m: tuple) -> float:
    places = itertools.combinations(range(2 * n_layers), n_layers)
    orders = [tuple(int(i in chosen) for i in range(2 * n_layers)) for chosen in places]
    spans = (_makespan(gpu, cpu, a, m) for gpu in orders for cpu in orders)
    return min(span for span in spans if span is not None)


@pytest.mark.parametrize(
    ("a", "m"),
    [
        ((350, 350), (450, 450)), ((450, 450), (350, 350)), ((400, 400), (400, 400)), ((50, 50), (450, 450)),
        ((350, 350), (450, 1300)), ((100, 900), (900, 100)), ((300, 500), (700, 200)), ((10, 10), (10, 1000)),
    ],
)  # fmt: skip
def test_no_order_beats_the_oracle_and_one_reaches_it(a: tuple, m: tuple) -> None:
    for n_layers in (1, 2, 4):
        oracle = Stages(n_layers, lambda n: a[n], lambda n: m[n])
        best = _best_makespan(n_layers, a, m)
        # A round of the steady state; what is finite has a beginning and an end on top.
        assert oracle.dual_us(0, 1) <= best <= oracle.dual_us(0, 1) + min(sum(a), sum(m), a[0] + m[0], a[1] + m[1])


def test_one_lane_does_one_thing_at_a_time() -> None:
    s = stages(350, 450, n_layers=10)
    assert s.single_us(1) == pytest.approx(8000) and s.single(1) == pytest.approx(125)
    assert s.dual_us(1, 1) == pytest.approx(9000) and s.dual(2) == pytest.approx(2 / 9000e-6)
    assert s.dual(1) == 0 and s.best(1) == s.single(1)


def test_the_papers_gains_are_possible() -> None:
    """Two lanes reach them with the paper's stage times; one lane with the same stages does not for two sequences."""
    s = stages(*PAPER_US)
    for n, gain in PAPER_GAINS.items():
        assert s.dual(n) / s.single(1) > gain
        assert s.dual(n) > 1.05 * s.single(n)
    assert s.single(2) / s.single(1) < 1.3


def test_where_two_lanes_lose() -> None:
    assert stages(50, 450).dual(2) / stages(50, 450).single(2) == pytest.approx(
        1.04, abs=0.01
    )  # less than its overhead
    every_token_reads_all = stages(350, 450, n_expert=8, n_used=8)
    assert every_token_reads_all.dual(4) < every_token_reads_all.single(4) == every_token_reads_all.best(4)
