"""Devices that fail, threads that meet, models that go: the right answer by the CPU, one line in the log, no deadlock.

The cases are in stream_faults.py and stream_threads.py; each runs in a process of its own, which is killed when it hangs.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from stream_run import run

RIGHT = 1e-12


def assert_right(case: dict[str, Any], what: object = "") -> None:
    assert all(p["status"] == 0 and p["nmse"] < RIGHT for p in case["passes"]), (what, case)
    assert len(set(case["log"])) == len(case["log"]), (what, case["log"])


def check_sweep(seen: Any, n_least: int) -> list[int]:
    """All cases; how many layers were the CPU's in each."""
    assert_right(seen["without"])
    assert seen["without"]["on_cpu"] == 0 and len(seen["cases"]) >= n_least
    for n, case in seen["cases"].items():
        assert_right(case, n)
        assert case["streamed"] + case["on_cpu"] == 4, (n, case)
        assert sum(case["failures"]) == 0 or case["log"], (n, case)
    return [case["on_cpu"] for case in seen["cases"].values()]


@pytest.mark.parametrize(("n_devices", "measured", "step"), [(1, "known", 1), (2, "anew", 3)])
def test_any_copy_fails(simgpu, tmp_path, n_devices, measured, step):
    """Inputs, experts, results, those fetched ahead, those of the measurement."""
    seen = run(simgpu, tmp_path, "stream_faults", "sweep", "FAIL_COPY", "copies", n_devices, measured, step)
    on_cpu = check_sweep(seen, 60 // step)
    assert sum(n > 0 for n in on_cpu) > len(on_cpu) // 3 and max(on_cpu) <= 2


@pytest.mark.parametrize("n_devices", [1, 2])
def test_device_is_lost_at_any_op(simgpu, tmp_path, n_devices):
    seen = run(simgpu, tmp_path, "stream_faults", "sweep", "LOSE_AT", "ops", n_devices, "known", 5)
    on_cpu = check_sweep(seen, 20)
    assert max(on_cpu) >= 3 and min(on_cpu) <= 1


@pytest.mark.parametrize(("n_devices", "measured"), [(1, "known"), (1, "anew"), (2, "anew")])
def test_any_allocation_fails(simgpu, tmp_path, n_devices, measured):
    check_sweep(run(simgpu, tmp_path, "stream_faults", "sweep", "FAIL_ALLOC", "allocs", n_devices, measured), 7)


def test_too_little_device_memory(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_faults", "device_memory")
    for name, case in seen.items():
        assert_right(case, name)
        assert len(case["log"]) == 1 and "memory" in case["log"][0], (name, case)
    assert [seen[k]["streamed"] for k in ("none", "one of two", "never any")] == [0, 4, 0]
    assert seen["none"]["memory"] == seen["never any"]["memory"] == [0]


def test_nothing_can_be_pinned(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_faults", "pinning")
    for name, case in seen.items():
        assert_right(case, name)
        assert case["streamed"] == 4, (name, case)
    assert seen["refused"]["pinned"] == [False]


def test_devices_that_always_fail_are_given_up(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_faults", "always_failing")
    for name, case in seen.items():
        assert_right(case, name)
        assert case["streamed"] + case["on_cpu"] == 12
        n_given_up = sum(n >= 3 for n in case["failures"])
        assert [
            sum(word in line for line in case["log"]) for word in ("the device failed", "several times in a row")
        ] == [n_given_up] * 2
    assert [seen[k]["streamed"] for k in ("only", "one of two", "lost")] == [0, 12, 0]  # the measurement finds out
    assert seen["only"]["failures"] == seen["lost"]["failures"] == [3]


def test_stalled_devices(simgpu, tmp_path):
    for name, case in run(simgpu, tmp_path, "stream_faults", "stalls").items():
        assert_right(case, name)
        assert case["streamed"] == 4 and case["log"] == [], (name, case)


def test_names_of_devices(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_faults", "names")
    line = "HYBRID_MOE_DEVICES: there is no GPU device 'CUDA7'; there are: SimGPU0, SimGPU1"
    for case in seen.values():
        assert_right(case)
    assert [c["log"] for c in seen.values()] == [[f"hybrid-moe: {line}"], [f"hybrid-moe: {line}"], []]
    assert [c["streamed"] for c in seen.values()] == [4, 0, 4]
    assert seen["beside"]["memory"][0] == seen["one"]["memory"][1] == 0


@pytest.mark.parametrize(
    ("setting", "values"), [("FAIL_COPY", "3 5 9 11 14 25+ 1+"), ("LOSE_AT", "1 20 40"), ("STALL", "30:200")]
)
def test_faults_while_the_cpu_helps(simgpu, tmp_path, setting, values):
    for name, case in run(simgpu, tmp_path, "stream_faults", "with_cpu_help", setting, values).items():
        assert_right(case, name)


@pytest.mark.parametrize(("n_devices", "other"), [(1, "same"), (1, "different"), (2, "different")])
def test_two_contexts_at_once(simgpu, tmp_path, n_devices, other):
    seen = run(simgpu, tmp_path, "stream_threads", "contexts", n_devices, other)
    assert_right(seen)
    assert len(seen["passes"]) == 16 and seen["streamed"] == 48 and seen["log"] == []


def test_a_context_of_short_batches_meanwhile(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_threads", "one_shares_with_cpu")
    assert_right(seen)
    assert len(seen["passes"]) == 20 and seen["streamed"] == 20


@pytest.mark.parametrize(("n_devices", "cpu_help"), [(1, "off"), (2, "auto")])
def test_callback_aborts(simgpu, tmp_path, n_devices, cpu_help):
    seen = run(simgpu, tmp_path, "stream_threads", "aborts", n_devices, cpu_help)
    assert seen["aborted"] == [0, 1, 1, 1, 1] and seen["log"] == []
    assert_right(seen)


@pytest.mark.parametrize(("n_devices", "n_times"), [(1, 50), (2, 20)])
def test_models_come_and_go(simgpu, tmp_path, n_devices, n_times):
    seen = run(simgpu, tmp_path, "stream_threads", "come_and_go", n_devices, n_times)
    assert_right(seen)
    assert seen["n_ahead"] == n_times  # each went while something of it was being fetched
    assert seen["streamed"] == 4 * n_times


def test_a_model_goes_while_another_streams(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_threads", "other_goes")
    assert_right(seen)
    assert seen["log"] == []


@pytest.mark.parametrize("how", ["freed", "open"])
def test_process_ends_while_fetching(simgpu, tmp_path, how):
    seen = run(simgpu, tmp_path, "stream_threads", "leave_while_fetching", how)
    assert_right(seen | {"log": []})
    assert seen["ahead"] > 0


def test_trace_is_whole(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_threads", "traced", tmp_path / "trace.json")
    assert_right(seen | {"log": []})
    events = json.loads((tmp_path / "trace.json").read_text())  # also when the process ended in the middle
    events = [e for e in events if e["name"] != "layer"]  # of all threads together, which compute at the same time here
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert len(lanes) >= 4 and {"SimGPU0", "SimGPU1", "upload", "compute"} <= names
    computed = [e for e in events if e["ph"] == "X" and e["name"] == "expert" and e["args"]["bytes"] == 0]
    assert len(computed) == seen["experts"]
    for lane in lanes:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == lane)
        overlap = [(a, b) for a, b in itertools.pairwise(spans) if a[1] > b[0] + 1e-3]
        assert not overlap, lane  # one thing at a time


def test_a_damaged_input_on_a_device_is_never_computed_with(simgpu, tmp_path):
    """Right, or an error that says so; NaN is neither."""
    outcomes = set()
    for n, case in run(simgpu, tmp_path, "stream_inputs", "any_copy_fails").items():
        for one in case["passes"]:
            outcomes.add(one["status"])
            assert one["nmse"] <= 1e-9 if one["status"] == 0 else any("is damaged" in line for line in case["log"]), n
    assert outcomes == {0, -1}, "both were met"
