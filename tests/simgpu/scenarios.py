"""Child processes of test_simgpu: python scenarios.py LIBRARY SCENARIO [ARGUMENTS]. Each does things with the simulated GPU
and prints what it saw as JSON; the test judges it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import answers
import host as h
import numpy as np

MIB = 1 << 20


def timed(call: Callable[[], Any]) -> int:
    begin = time.monotonic_ns()
    call()
    return time.monotonic_ns() - begin


def measured(call: Callable[[], Any]) -> dict[str, Any]:
    """The books of one call alone, and its real time."""
    h.reset_stats()
    wall = timed(call)
    return {"wall_ns": wall, **h.stats()}


class Gate:
    """Holds several instances back until all their work is queued, so that the model has it begin at the same time.

    It is a copy on another device; the wait must be longer than the host's hiccups while it queues the work.
    """

    def __init__(self, dev: int, n_bytes: int):
        self.dev, self.n_bytes = dev, n_bytes
        self.instance = h.dev_init(dev, None)
        self.tensor, self.source = h.tensor(dev, n_bytes // 4), h.pinned(dev, n_bytes)

    def release(self, *instances: int) -> None:
        event = h.event_new(self.dev)
        h.set_async(self.instance, self.tensor, self.source, 0, self.n_bytes)
        h.event_record(event, self.instance)
        for instance in instances:
            h.event_wait(instance, event)
        h.event_free(event)  # what is queued goes on


def copies() -> dict[str, Any]:
    """SimGPU0: pinned and pageable memory, both ways, within and between devices, called and queued."""
    dev, other = h.device(0), h.device(1)
    a = h.dev_init(dev, None)
    n = 8 * MIB
    t, t2, far = h.tensor(dev, n // 4), h.tensor(dev, n // 4), h.tensor(other, n // 4)
    pinned, foreign = h.pinned(dev, n + 1), h.pinned(other, n)
    pageable = np.zeros(n // 4, np.float32)
    b = h.dev_init(other, None)

    def queued(call: Callable[..., None], *arguments: Any) -> dict[str, Any]:
        def run() -> None:
            call(*arguments)
            h.synchronize(a)
            h.synchronize(b)

        return measured(run)

    return {
        "n": n,
        "up_pinned": queued(h.set_async, a, t, pinned, 0, n),
        "up_pageable": queued(h.set_async, a, t, pageable.ctypes.data, 0, n),
        "up_foreign": queued(h.set_async, a, t, foreign, 0, n),
        "up_odd": queued(h.set_async, a, t, pinned + 1, 4, n - 4),
        "down_pinned": queued(h.get_async, a, t, pinned, 0, n),
        "down_pageable": queued(h.get_async, a, t, pageable.ctypes.data, 0, n),
        "up_called": measured(lambda: h.tensor_set(t, pinned, 0, n)),
        "down_called": measured(lambda: h.tensor_get(t, pageable.ctypes.data, 0, n)),
        "within": measured(lambda: h.copy(t, t2)),
        "between_called": measured(lambda: h.copy(t, far)),
        "between_queued": queued(h.copy_async, a, b, t, far),
        "pageable_blocks": measured(lambda: h.set_async(a, t, pageable.ctypes.data, 0, n)),
    }


def overlaps() -> dict[str, Any]:
    """Two instances of SimGPU0, gated by SimGPU1."""
    dev = h.device(0)
    a, b = h.dev_init(dev, None), h.dev_init(dev, None)
    n = 8 * MIB
    t, source = h.tensor(dev, n // 4), h.pinned(dev, n)
    t2, target = h.tensor(dev, n // 4), h.pinned(dev, n)
    product = h.Product(dev, h.F32, (1, 64, 256), 32)
    gate = Gate(h.device(1), 8 * MIB)
    uploaded = h.event_new(dev)

    def upload(instance: int) -> None:
        h.set_async(instance, t, source, 0, n)

    def download(instance: int) -> None:
        h.get_async(instance, t2, target, 0, n)

    def compute(instance: int) -> None:
        assert h.graph_compute_async(instance, product.graph) == h.SUCCESS

    def both(first: Callable[[int], None], second: Callable[[int], None]) -> dict[str, Any]:
        def run() -> None:
            gate.release(a, b)
            first(a)
            second(b)
            h.synchronize(a)
            h.synchronize(b)

        return measured(run)

    def fenced() -> None:
        upload(a)
        h.event_record(uploaded, a)
        h.event_wait(b, uploaded)
        compute(b)
        h.event_synchronize(uploaded)
        h.synchronize(b)

    never_recorded = h.event_new(dev)
    h.event_wait(a, never_recorded)
    h.event_synchronize(never_recorded)
    return {
        "n": n,
        "upload_upload": both(upload, upload),
        "upload_compute": both(upload, compute),
        "upload_download": both(upload, download),
        "compute_compute": both(compute, compute),
        "fenced": measured(fenced),
    }


def compute() -> dict[str, Any]:
    """The same product on two devices, of which one is slow and stalls at its second op; and the CPU stage."""
    out: dict[str, Any] = {}
    for i in (0, 1):
        b = h.dev_init(h.device(i), None)
        p = h.Product(h.device(i), h.F32, (1, 64, 256), 32)
        for run in ("first", "second"):
            out[f"{run}{i}"] = measured(lambda b=b, p=p: h.graph_compute(b, p.graph))["devices"][i]
    experts = h.Product(h.device(0), h.F32, (8, 64, 256), 2, 3)
    b = h.dev_init(h.device(0), None)
    out["experts"] = measured(lambda: h.graph_compute(b, experts.graph))["devices"][0]
    stage = h.proc("simgpu_cpu_expert", h.I64, h.I64, h.SIZE, h.ctypes.c_double)
    asked = h.proc("simgpu_cpu_expert_ns", h.I64, h.I64, h.SIZE, h.ctypes.c_double)
    cases = [
        (1, 44 * MIB, 8.0),
        (4096, 44 * MIB, 8.0),
        (4096, 44 * MIB, 4.5),
        (0, 44 * MIB, 8.0),
        (-1, 1, 8.0),
        (1, 1, 0.0),
    ]
    out["asked"] = [[*case, asked(*case)] for case in cases]
    out["stage"] = measured(lambda: [stage(3, MIB, 8.0) for _ in range(3)])
    return out


def memory() -> dict[str, Any]:
    dev = h.device(0)
    device_type, host_type = h.dev_buffer_type(dev), h.dev_host_buffer_type(dev)
    out = {"before": h.free_and_total(dev), "is_host": [h.buft_is_host(device_type), h.buft_is_host(host_type)]}
    first = h.buft_alloc_buffer(device_type, 6 * MIB)
    out["during"] = h.free_and_total(dev)
    out["too_large"] = h.buft_alloc_buffer(device_type, 6 * MIB)
    base = h.buffer_get_base(first)
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    spans = [([int(x, 16) for x in region[0].split("-")], region[1]) for region in regions]
    out["access"] = next(access for (begin, end), access in spans if begin <= base < end)
    h.buffer_free(first)
    out["after"] = h.free_and_total(dev)
    out["fits_again"] = bool(h.buft_alloc_buffer(device_type, 6 * MIB))
    out["pinned"] = [bool(h.buft_alloc_buffer(host_type, 3 * MIB)) for _ in range(2)]
    out["type"] = h.dev_type(dev)
    out["n_devices"] = h.reg_dev_count(h.reg_by_name(b"SimGPU"))
    return out


def faults() -> dict[str, Any]:
    """SimGPU0 fails its second allocation, 1 every pinning from the second on, 2 its third copy, 3 is lost at its second op."""
    out: dict[str, Any] = {}
    device_type, host_type = h.dev_buffer_type(h.device(0)), h.dev_host_buffer_type(h.device(1))
    out["allocs"] = [bool(h.buft_alloc_buffer(device_type, 64)) for _ in range(4)]
    out["pins"] = [bool(h.buft_alloc_buffer(host_type, 64)) for _ in range(4)]

    b = h.dev_init(h.device(2), None)
    t, values = h.tensor(h.device(2), 4), np.arange(4, dtype=np.float32)
    product = h.Product(h.device(2), h.F32, (1, 4, 4), 4)
    read = []
    for _ in range(2):
        h.set_async(b, t, values.ctypes.data, 0, 16)
        got = np.zeros(4, np.float32)
        h.tensor_get(t, got.ctypes.data, 0, 16)
        read.append([None if np.isnan(v) else float(v) for v in got])
    out["read"] = read
    out["after_failed_copy"] = [h.graph_compute(b, product.graph) for _ in range(2)]
    h.backend_free(b)

    b = h.dev_init(h.device(3), None)
    product = h.Product(h.device(3), h.F32, (1, 4, 4), 4)
    out["lost"] = [h.graph_compute(b, product.graph) for _ in range(3)]
    out["lost_alloc"] = h.buft_alloc_buffer(h.dev_buffer_type(h.device(3)), 64)
    out["lost_instance"] = h.dev_init(h.device(3), None)
    h.backend_free(b)
    out["stats"] = h.stats()["devices"]
    return out


if __name__ == "__main__":
    library, name, *arguments = sys.argv[1:]
    if name in ("model", "refuse"):  # they load the library themselves
        seen = getattr(answers, name)(library, *arguments)
    else:
        assert h.load(library.encode()), "the simulated GPU did not load"
        scenarios = (copies, overlaps, compute, memory, faults, answers.exact)
        seen = {scenario.__name__: scenario for scenario in scenarios}[name]()
    print(json.dumps(seen))
