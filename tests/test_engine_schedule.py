"""The benchmark of dual batch runs: the real engine on a simulated GPU and CPU stage. What it measures is asserted nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

import engine_schedule as schedule
from test_simgpu import run as simulate
from tiny_families import write_model


@pytest.mark.parametrize("dual", ["on", "auto"])
def test_the_engine_runs_on_simulated_stages(dual: str, simgpu: Path, tmp_path: Path) -> None:
    told = schedule.run([], simgpu, write_model(tmp_path / "model.gguf", schedule.SHAPE), dual, 5.0, 100.0)
    assert told["experts_us"] == pytest.approx(
        100, rel=0.01
    )  # one charge per layer, of as many experts as one token chooses
    assert told["n_ops"] > schedule.N_LAYERS
    assert all(told[str(n)] > 0 for n in schedule.SIZES)
    expected = "on from 2 sequences (as given)" if dual == "on" else " ms in two"
    assert expected in told["dual"]


def test_experts_are_charged_only_where_nothing_is_computed(simgpu: Path) -> None:
    with pytest.raises(AssertionError, match="SIMGPU_MODE=timing beside it"):
        simulate(simgpu, "copies", EXPERTS=1)


def test_the_command_says_what_it_takes() -> None:
    done = subprocess.run([sys.executable, schedule.__file__, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--attention-us" in done.stdout
