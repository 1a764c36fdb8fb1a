"""The simulated GPU charges what its settings say, keeps its memory bounded, fails where it is told to, and computes exactly.

Modelled times are compared exactly; real times only from below, because these machines may be busy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
from simgpu.build import SOURCE

MIB = 1 << 20
MS = 1_000_000


def run(simgpu: Path, scenario: str, *arguments: object, **variables: object) -> tuple[Any, str]:
    """What the scenario saw under these SIMGPU_ settings, and what it logged."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    environment |= {f"SIMGPU_{name}": str(value) for name, value in variables.items()}
    environment["HYBRID_MOE_SLP"] = "off"  # nothing but what the test asks for runs on the devices
    command = [sys.executable, SOURCE / "scenarios.py", simgpu, scenario, *arguments]
    child = subprocess.run(
        [str(c) for c in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1]), child.stderr


def test_copies(simgpu):
    """latency + bytes / (GB/s), by kind and direction; within a device at the speed of its memory."""
    seen, _ = run(
        simgpu, "copies", MODE="timing", DEVICES=2, LATENCY_US="100,50", LAUNCH_US=20, MEMORY_GBPS=4,
        PINNED_GBPS="2/1", PAGEABLE_GBPS="0.5/0.25", STAGED_GBPS="0.8/0.4,0.2/0.1",
    )  # fmt: skip
    n = seen["n"]
    cases = {
        "up_pinned": ("up", "pinned", 100_000 + n // 2),
        "up_called": ("up", "pinned", 100_000 + n // 2),
        "up_odd": ("up", "pinned", 100_000 + (n - 4) // 2),
        "up_pageable": ("up", "pageable", 100_000 + n * 2),
        "up_foreign": ("up", "pageable", 100_000 + n * 2),  # another device's pinned memory
        "down_pinned": ("down", "pinned", 100_000 + n),
        "down_pageable": ("down", "pageable", 100_000 + n * 4),
        "down_called": ("down", "pageable", 100_000 + n * 4),
    }
    for name, (link, kind, ns) in cases.items():
        books = seen[name]["devices"][0]
        moved = n - 4 if name == "up_odd" else n
        assert books[link]["n"] == 1 and books[link]["bytes"] == books[link][f"{kind}_bytes"] == moved, name
        assert books[link]["modelled_ns"] == books[link]["busy_ns"] == ns, name
        assert books["down" if link == "up" else "up"]["n"] == books["compute"]["n"] == 0, name
        assert seen[name]["wall_ns"] >= ns, name
    within = seen["within"]["devices"][0]
    assert within["compute"]["busy_ns"] == 20_000 + 2 * n // 4 and within["up"]["n"] == within["down"]["n"] == 0
    for name in ("between_called", "between_queued"):
        source, target = seen[name]["devices"]
        ns = 150_000 + n * 5  # the slower of 0.4 down and 0.2 up
        assert source["down"]["busy_ns"] == target["up"]["busy_ns"] == ns <= seen[name]["wall_ns"]
        assert source["down"]["staged_bytes"] == target["up"]["staged_bytes"] == n
        assert source["up"]["n"] == target["down"]["n"] == 0
    assert seen["pageable_blocks"]["wall_ns"] >= 100_000 + n * 2


def test_pinned_memory_may_count_for_all_devices(simgpu):
    seen, _ = run(simgpu, "copies", MODE="timing", DEVICES=2, PINNED_SHARED=1)
    assert seen["up_foreign"]["devices"][0]["up"]["pinned_bytes"] == seen["n"]


def test_what_overlaps(simgpu):
    """Copies up, copies down and compute are independent; each of them is one at a time, whatever the instance."""
    seen, _ = run(
        simgpu, "overlaps", MODE="timing", DEVICES=2, LATENCY_US=0, LAUNCH_US=0, PINNED_GBPS="0.1,0.01", TFLOPS=0.00001
    )
    copy, compute = seen["n"] * 10, 2 * 64 * 256 * 32 * 100
    gate = seen["n"] * 100
    books = {name: s["devices"][0] for name, s in seen.items() if name != "n"}
    wall = {name: s["wall_ns"] for name, s in seen.items() if name != "n"}

    assert books["upload_upload"]["up"]["busy_ns"] == 2 * copy and wall["upload_upload"] >= gate + 2 * copy
    assert (
        books["compute_compute"]["compute"]["busy_ns"] == 2 * compute and wall["compute_compute"] >= gate + 2 * compute
    )
    both = books["upload_compute"]
    assert (both["up"]["busy_ns"], both["compute"]["busy_ns"]) == (copy, compute)
    assert both["overlap_ns"] == {"up_compute": min(copy, compute), "down_compute": 0, "up_down": 0}
    both = books["upload_download"]
    assert both["up"]["busy_ns"] == both["down"]["busy_ns"] == both["overlap_ns"]["up_down"] == copy
    fenced = books["fenced"]
    assert fenced["overlap_ns"]["up_compute"] == 0 and wall["fenced"] >= copy + compute
    assert (fenced["up"]["busy_ns"], fenced["compute"]["busy_ns"]) == (copy, compute)


def test_compute_and_the_cpu_stage(simgpu):
    seen, _ = run(
        simgpu, "compute", MODE="timing", DEVICES=2, TFLOPS="0.001,1000", MEMORY_GBPS="1000,0.1", LAUNCH_US="30", SLOW="1,3",
        STALL=",2:40", CPU_GBPS=0.5, CPU_TFLOPS=0.25,
    )  # fmt: skip
    flops, n_bytes = 2 * 64 * 256 * 32, 4 * (64 * 256 + 32 * 256 + 32 * 64)
    for i, ns in enumerate((flops + 30_000, 3 * n_bytes * 10 + 30_000)):
        first, second = seen[f"first{i}"]["compute"], seen[f"second{i}"]["compute"]
        assert first["n"] == 1 and first["modelled_ns"] == first["busy_ns"] == ns
        assert second["modelled_ns"] == ns + (40 * MS if i == 1 else 0)
        assert first["n_overruns"] == second["n_overruns"] == 0
    assert seen["experts"]["compute"]["modelled_ns"] == 2 * 64 * 256 * 2 * 3 + 30_000
    for n_rows, n_bytes, bits, ns in seen["asked"]:
        if n_rows < 0 or bits == 0:
            assert ns == -1
        else:
            by_compute = 2 * n_rows * (n_bytes * 8 / bits) / 250
            assert ns == (round(max(n_bytes / 0.5, by_compute)) if n_rows else 0)
    assert seen["stage"]["cpu"]["busy_ns"] == 3 * 2 * MIB <= seen["stage"]["wall_ns"] and seen["stage"]["cpu"]["n"] == 3


def test_memory_is_bounded_and_out_of_reach(simgpu):
    seen, log = run(simgpu, "memory", MEMORY_MIB=10, HOST_MEMORY_MIB=5)
    assert (seen["n_devices"], seen["type"]) == (1, 1)  # GGML_BACKEND_DEVICE_TYPE_GPU
    assert seen["is_host"] == [False, True] and seen["access"] == "---p"
    assert seen["before"] == seen["after"] == [10 * MIB, 10 * MIB] and seen["during"] == [4 * MIB, 10 * MIB]
    assert not seen["too_large"] and seen["fits_again"] and seen["pinned"] == [True, False]
    assert "SIMGPU_MEMORY_MIB" in log and "SIMGPU_HOST_MEMORY_MIB" in log


def test_faults(simgpu):
    seen, log = run(
        simgpu, "faults", DEVICES=4, FAIL_ALLOC="2,0", FAIL_HOST_ALLOC=",2+,0", FAIL_COPY=",,3,0", LOSE_AT=",,,2"
    )
    assert seen["allocs"] == [True, False, True, True]
    assert seen["pins"] == [True, False, False, False]
    assert seen["read"] == [[0, 1, 2, 3], [None] * 4]
    assert seen["after_failed_copy"] == [-1, 0]  # GGML_STATUS_FAILED, once
    assert seen["lost"] == [0, -1, -1] and not seen["lost_alloc"] and not seen["lost_instance"]
    assert [d["lost"] for d in seen["stats"]] == [False, False, False, True]
    assert [d["calls"]["failed_copies"] for d in seen["stats"]] == [0, 0, 1, 0]
    assert "copy 3 fails" in log and "SimGPU3: lost" in log


def test_results_are_those_of_the_cpu(simgpu):
    """And what took the host longer than the model is charged and said: here all of it, on a GPU of no cost."""
    seen, _ = run(simgpu, "exact", TFLOPS=1e9, MEMORY_GBPS=1e9, LAUNCH_US=0)
    assert all(seen.pop("declines"))
    books = seen.pop("books")
    assert books["n"] == books["n_overruns"] == 10 and books["busy_ns"] == books["modelled_ns"] + books["overrun_ns"]
    assert len(seen) == 10
    for name, (status, same, error) in seen.items():
        assert status == [0, 0] and same, name
        assert error < 0.02, name  # activations of quantised products are rounded to 8 bits


def test_a_model_on_two_devices(simgpu):
    seen, _ = run(simgpu, "model", models.twin("F32"), models.fp8_directory(), DEVICES=2)
    for name in ("all", "offload", "hybrid"):
        assert seen[name]["nmse"] <= 1e-9, name
    first, second = seen["all"]["devices"]
    assert min(first["compute"]["n"], second["compute"]["n"]) > 50  # attention and experts
    assert second["up"]["staged_bytes"] > 0, "activations went from one device to the other"
    assert (
        seen["offload"]["devices"][0]["up"]["pageable_bytes"] > 0 and seen["offload"]["devices"][0]["compute"]["n"] > 0
    )
    assert all(d["compute"]["n"] > 20 for d in seen["hybrid"]["devices"]) and seen["n_matmuls"] > 0


WRONG = {
    "SIMGPU_PINED_GBPS=1": "SIMGPU_PINED_GBPS is no setting; there are: SIMGPU_DEVICES",
    "SIMGPU_PINNED_GBPS=fast": "UP/DOWN",
    "SIMGPU_PINNED_GBPS=1,2": "one value per device, and there are 1",
    "SIMGPU_DEVICES=0": "1 to 16",
    "SIMGPU_MODE=quick": "exact, copies or timing",
    "SIMGPU_MEMORY_MIB=nan": "a number above 0",
    "SIMGPU_FAIL_COPY=-1": "the N-th call",
    "SIMGPU_STALL=3": "OP:MILLISECONDS",
}


def test_wrong_settings_are_refused_and_right_ones_load_once(simgpu):
    cases = [dict([setting.split("=")]) for setting in WRONG] + [{"SIMGPU_STALL": "3:5"}]
    seen, _ = run(simgpu, "refuse", json.dumps(cases))
    for (setting, rule), case in zip(WRONG.items(), seen, strict=False):
        assert not case["first"] and rule in case["log"], setting
    assert seen[-1]["first"] and not seen[-1]["second"] and "once is enough" in seen[-1]["log"]
    assert len(seen) == len(WRONG) + 1


def test_every_setting_is_documented():
    settings = set(re.findall(r"\{\"(SIMGPU_\w+)\"", (SOURCE / "settings.cpp").read_text()))
    assert len(settings) > 20
    assert set(re.findall(r"^\| `(SIMGPU_\w+)` \|", (SOURCE / "README.md").read_text(), re.M)) == settings
