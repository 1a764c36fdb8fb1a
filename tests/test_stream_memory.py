"""Where streamed experts come from: pinned copies, FP8 codes that the device expands, and types without a kernel of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# NMSE of a layer whose activations the simulated device (the host's CPU back end) rounds to BF16, or to Q8_K.
BF16, Q8_K = 1e-4, 5e-3


def run(
    simgpu: Path, scenario: str, n_tokens: int = 100, slp: str = "on", **variables: object
) -> tuple[dict[str, Any], str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    environment |= {"HYBRID_MOE_SLP": slp, "HYBRID_MOE_CPU_HELP": "off"}
    environment |= {name: str(value) for name, value in variables.items()}
    script = Path(__file__).parent / "stream_memory.py"
    child = subprocess.run(
        [sys.executable, str(script), str(simgpu), scenario, str(n_tokens)],
        env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout.splitlines()[-1])
    assert seen["statuses"] == [0, 0]
    return seen, child.stderr


def test_the_device_expands_fp8_and_half_the_bytes_cross_the_link(simgpu):
    cpu, _ = run(simgpu, "in_files")
    gpu, _ = run(simgpu, "in_files", SIMGPU_FP8=1)
    assert cpu["nmse"] == pytest.approx(gpu["nmse"], rel=1e-4), (
        "both round to BF16 in the same way; only sums' order differs"
    )
    assert max(gpu["nmse"]) <= BF16
    by_cpu, by_gpu = (seen["report"]["devices"][0] for seen in (cpu, gpu))
    assert by_cpu["source_bytes"] > 0 and by_cpu["expert_bytes"] == 2 * by_cpu["source_bytes"]
    assert by_gpu["source_bytes"] < by_gpu["expert_bytes"] < 1.05 * by_gpu["source_bytes"], "codes and their scales"
    assert by_gpu["fp8"] == "codes cross the link" and "the CPU expands" in by_cpu["fp8"]


@pytest.mark.parametrize("devices", (1, 2))
def test_pinned_experts_are_not_staged(simgpu, devices):
    pinned = {"SIMGPU_FP8": 1, "SIMGPU_DEVICES": devices, "SIMGPU_PINNED_SHARED": 1}
    staged, _ = run(simgpu, "in_files", **pinned)
    direct, _ = run(simgpu, "in_files", HYBRID_MOE_EXPERTS_MEMORY="pinned", **pinned)
    assert max(direct["nmse"]) <= BF16 and direct["memory_troubles"] == []
    bytes_of = [[d["direct_bytes"] for d in seen["report"]["devices"]] for seen in (staged, direct)]
    assert not any(bytes_of[0]) and bytes_of[1][0] > 0
    assert direct["report"]["devices"][0]["direct_bytes"] >= 0.9 * direct["report"]["devices"][0]["source_bytes"]


@pytest.mark.parametrize(
    ("variables", "trouble"),
    (
        ({"SIMGPU_FAIL_HOST_ALLOC": "1+"}, "no device pins"),
        ({"SIMGPU_HOST_MEMORY_MIB": 1}, "no device pins"),
        ({"HYBRID_MOE_PINNED_GIB": 0.0001}, "the budget of 0 MiB of pinned memory is used up"),
    ),
)
def test_what_cannot_be_pinned_is_copied_and_staged(simgpu, variables, trouble):
    seen, log = run(simgpu, "in_files", HYBRID_MOE_EXPERTS_MEMORY="pinned", **variables)
    assert max(seen["nmse"]) <= BF16
    assert [t for t in seen["memory_troubles"] if trouble in t], seen["memory_troubles"]
    assert log.count("experts_memory=pinned") == 1, "said once"
    assert not any(d["direct_bytes"] for d in seen["report"]["devices"])


def test_without_a_device_nothing_is_copied_for_one(simgpu):
    seen, log = run(
        simgpu, "in_files", HYBRID_MOE_EXPERTS_MEMORY="pinned", HYBRID_MOE_DEVICES="none", HYBRID_MOE_SLP="auto"
    )
    assert max(seen["nmse"]) <= BF16 and log.count("they stay in their files") == 1
    assert [t for t in seen["memory_troubles"] if "no device to pin experts for" in t]


@pytest.mark.parametrize(("slp", "on_cpu"), (("on", 0), ("auto", None)))
def test_types_without_a_kernel_stream(simgpu, slp, on_cpu, tmp_path):
    seen, _ = run(simgpu, "foreign", slp=slp, XDG_CACHE_HOME=tmp_path)
    assert max(seen["nmse"]) <= Q8_K
    report = seen["report"]
    assert report["layers"] + report["layers_on_cpu"] == 4
    # The host's own kernels have the first layer, which shows how long they take.
    assert report["layers_on_cpu"] == on_cpu if on_cpu is not None else report["layers_on_cpu"] >= 1


def test_a_failed_device_leaves_types_without_a_kernel_to_the_host(simgpu):
    seen, log = run(simgpu, "foreign", SIMGPU_FAIL_COPY="1+")
    assert max(seen["nmse"]) <= Q8_K and seen["report"]["layers"] == 0 and seen["report"]["layers_on_cpu"] == 4
    assert log.count("the CPU computes the layer instead") == 1


def test_single_products_of_such_types_are_the_hosts(simgpu):
    seen, _ = run(simgpu, "foreign_alone")
    assert max(seen["nmse"]) <= Q8_K and seen["report"]["layers"] == 0
