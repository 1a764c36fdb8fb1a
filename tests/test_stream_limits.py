"""Device memory as configured whatever layers follow one another, and nothing read ahead that might be gone.

The cases are in stream_limits.py; each runs in a process of its own."""

from __future__ import annotations

import pytest

from stream_run import run


def test_ring_keeps_its_size_when_experts_are_smaller(simgpu, tmp_path):
    seen = run(simgpu, tmp_path, "stream_limits", "two_sizes", 4)
    assert seen["status"] == 0 and seen["nmse"] < 1e-12 and seen["log"] == []
    assert seen["streamed"] == 4
    assert 0 < seen["ring_bytes"] <= 4 << 20


@pytest.mark.parametrize("where", ["ours", "cpu"])
def test_only_memory_whose_end_we_learn_is_read_ahead(simgpu, tmp_path, where):
    seen = run(simgpu, tmp_path, "stream_limits", "elsewhere", where)
    assert all(p["status"] == 0 and p["nmse"] < 1e-12 for p in seen["passes"]), seen
    assert seen["streamed"] == 9 and seen["log"] == []
    assert (seen["ahead_bytes"] > 0) == (where == "ours")


def test_a_device_named_twice_is_one(simgpu, tmp_path):
    assert run(simgpu, tmp_path, "stream_limits", "named_twice") == {"devices": ["SimGPU0"], "log": []}
