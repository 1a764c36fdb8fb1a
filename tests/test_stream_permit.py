"""An engine says what long batches may use while decode has priority: obeyed within a layer, and the result is right."""

from __future__ import annotations

from stream_run import run

NMSE = 1e-12  # F32


def test_devices_are_taken_away_and_given_back_within_a_layer(simgpu, tmp_path):
    first, second, both = run(simgpu, tmp_path, "stream_permit", "during_a_layer")
    for seen in (first, second, both):
        assert seen["status"] == 0 and seen["nmse"] < NMSE and sum(seen["experts"]) == 64
    # What was on its way to it is still computed: four copies, and what had arrived.
    assert first["allowed"] == "SimGPU0" and first["experts"][1] < 20 < 44 < first["experts"][0]
    assert second["allowed"] == "SimGPU1" and second["experts"][0] < 20 < 44 < second["experts"][1]
    assert both["allowed"] == "SimGPU0,SimGPU1" and min(both["experts"]) > 20


def test_next_layers_obey(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_permit", "who_may")
    for layer in seen["layers"]:
        assert layer["status"] == 0 and layer["nmse"] < NMSE
    before, one, two, none, after = seen["layers"]
    assert sum(before["experts"]) + before["cpu"] == 64
    assert one["experts"] == [0, 64] and one["cpu"] == 0
    assert sum(two["experts"]) == 64 and two["cpu"] == 0
    assert none["experts"] == [0, 0], "without a device it is the CPU's"
    assert sum(after["experts"]) + after["cpu"] == 64
    assert seen["error"] == "nothing is streamed to a device 'SimGPU7'"


def test_a_thread_with_priority_does_not_wait_for_a_device(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_permit", "first")
    assert seen["status"] == 0 and seen["nmse"] < NMSE
    assert seen["did_not_wait"] and seen["on_cpu"] == 1
    assert seen["on_cpu_alone"] == 0, "a device that is free serves it"
