"""`hybrid-moe run` and `info` with GPUs, which are simulated: what the user is told, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import models
from placement_host import child_of


@pytest.fixture
def run(simgpu: Path, tmp_path: Path) -> Any:
    return child_of(simgpu, tmp_path)


def test_run_takes_the_gpu_of_a_named_back_end(simgpu: Path):
    """As `info` and `fits` do."""
    command = [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()", "run", models.twin("F32")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    done = subprocess.run(
        [*command, "-p", "the", "-n", "2", "-t", "1"],
        env=environment | {"GGML_BACKEND_PATH": str(simgpu)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "placement: long prompts stream experts to SimGPU0; all layers" in done.stderr


def test_run_says_where_each_phase_ran(run, tmp_path):
    text = "the licence of this " * 8
    arguments = ["run", str(models.fp8_directory()), "-p", text, "-n", "3", "-t", "1", "-c", "256"]
    told = {}
    for flags in ([], ["--slp", "on", "--cpu-help", "off", "--devices", "SimGPU1"], ["--slp", "off"]):
        done = run("command", arguments=[*arguments, "--json", *flags])
        assert done.returncode == 0, done.stderr
        told[" ".join(flags)] = json.loads(done.stdout)
    by_measurement, streamed, off = told.values()
    assert streamed["placement"]["devices"] == ["SimGPU1"] and streamed["device"] == "SimGPU1 (simulated GPU)"
    assert streamed["ttft_s"] > 0 and streamed["passes"] == 1 and streamed["tokens"] == 3
    prefill = streamed["prefill"]
    assert (
        prefill["layers"] == 1 and prefill["layers_on_cpu"] == 0 and prefill["cpu_share"] == 0
    )  # the last one has one token left
    assert [share["name"] for share in prefill["devices"]] == ["SimGPU1"] and prefill["devices"][0]["experts"] > 0
    assert streamed["decode"]["layers"] == 0 and streamed["decode"]["devices"] == []
    assert streamed["experts_on"] == "HybridMoE" and streamed["expert_matmuls"] > 0
    assert by_measurement["prefill"]["layers"] + by_measurement["prefill"]["layers_on_cpu"] == 1
    assert "predicted" in by_measurement["prefill"]["plan"]
    assert off["prefill"] is None and off["placement"]["devices"] == [] and off["device"].startswith("CPU")

    done = run("command", arguments=[*arguments, "--slp", "on", "--cpu-help", "off", "-ub", "40", "-ngl", "0"])
    lines = [line for line in done.stderr.splitlines() if not line.startswith("load_backend")]
    assert [line.split(":")[0] for line in lines] == [
        "prefill", "prefill experts", "decode", "device", "experts", "placement",
    ]  # fmt: skip
    assert "first token after " in lines[0] and lines[3].startswith("device: CPU")
    assert lines[1].startswith("prefill experts: streamed to SimGPU") and lines[1].endswith(" passes")
    assert "40 tokens per pass" in lines[5] and "as given: n_gpu_layers" in lines[5]


def test_run_tells_of_trouble(run):
    """A device whose copies fail, which has no layers: the answer is the CPU's, and the reason is said."""
    arguments = ["run", str(models.twin("F32")), "-p", "the licence of this " * 8, "-n", "2", "-t", "1", "-c", "256"]
    done = run("command", settings={"SIMGPU_FAIL_COPY": "0,2+"}, arguments=[*arguments, "--slp", "on", "-ngl", "0"])
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("streaming: ") and "SimGPU1" in line for line in done.stderr.splitlines()), done.stderr


def test_commands_refuse_wrong_devices(run):
    for flags, message in ((["--devices", "SimGPU9"], "SimGPU9"), (["-ub", "0"], "-ub"), (["-ngl", "-2"], "-ngl")):
        done = run("command", arguments=["run", str(models.twin("F32")), "-p", "a", *flags])
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr


def test_info_says_which_gpus_there_are(run):
    model = str(models.fp8_directory())
    lines = run("command", arguments=["info", model]).stdout.splitlines()
    gpus = next(i for i, line in enumerate(lines) if line.startswith("GPUs:"))
    assert lines[gpus].startswith("GPUs:         SimGPU0 (simulated GPU, 1.1 of 1.1 GB free), SimGPU1 (")
    assert lines[gpus + 1].startswith(
        "long prompts: experts are streamed to SimGPU0, SimGPU1 where that is measured to be faster"
    )
    lines = run("command", arguments=["info", model], settings={"HYBRID_MOE_SLP": "off"}).stdout.splitlines()
    assert "long prompts: experts stay on the CPU (slp=off)" in lines
    done = run("command", arguments=["info", model, "--json"], settings={"HYBRID_MOE_DEVICES": "SimGPU1"})
    told = json.loads(done.stdout)
    assert [gpu["name"] for gpu in told["gpus"]] == ["SimGPU0", "SimGPU1"] and told["streams_to"] == ["SimGPU1"]
    done = run("command", arguments=["info", model], settings={"HYBRID_MOE_DEVICES": "SimGPU2"})
    assert done.returncode == 2 and "there are: SimGPU0, SimGPU1" in done.stderr
    assert "GPUs" not in run("command", n_devices=0, arguments=["info", model]).stdout
