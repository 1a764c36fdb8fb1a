"""What the plug-in reports of streaming (hybrid_moe_stream_report), as differences between two moments, and the model that it
decides by: when the devices are predicted to be faster than the CPU."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

from .. import _native
from .graph import Shape

MIN_TOKENS = 64  # slp=auto keeps shorter batches on the CPU without asking (min_automatic_tokens of cpp/stream)
MOST_TOKENS = 1 << 20
FP8_ON_DEVICE = "codes cross the link"  # a device's "fp8": expanded there, not on the host


def report() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(_native.library().hybrid_moe_stream_report())
    return told


def wait_for_quiet(most_s: float = 30.0) -> None:
    """Until nothing is fetched ahead any more: a peer would share the link with it."""
    end, seen = time.monotonic() + most_s, -1
    while time.monotonic() < end:
        now = sum(d["expert_bytes"] for d in report()["devices"])
        if now == seen:
            return
        seen = now
        time.sleep(0.05)


@dataclass(frozen=True)
class DeviceUse:
    """One device between two reports."""

    name: str
    n_layers: int
    n_experts: int
    n_rows: int
    expert_bytes: int
    ahead_bytes: int
    wasted_bytes: int
    in_bytes: int
    out_bytes: int
    upload_s: float
    compute_s: float
    starved_s: float
    layer_s: float
    n_failures: int


def device_uses(before: dict[str, Any], after: dict[str, Any]) -> list[DeviceUse]:
    """Of the devices that computed something."""
    old = {d["name"]: d for d in before["devices"]}
    uses = []
    for d in after["devices"]:
        counts = {key: value - old.get(d["name"], {}).get(key, 0) for key, value in d.items() if isinstance(value, int)}
        uses.append(
            DeviceUse(
                d["name"], counts["layers"], counts["experts"], counts["rows"], counts["expert_bytes"], counts["ahead_bytes"],
                counts["wasted_bytes"], counts["in_bytes"], counts["out_bytes"], counts["upload_ns"] * 1e-9,
                counts["compute_ns"] * 1e-9, counts["starved_ns"] * 1e-9, counts["layer_ns"] * 1e-9, counts["failures"],
            )
        )  # fmt: skip
    return [u for u in uses if u.n_layers or u.n_failures]


@dataclass(frozen=True)
class Rates:
    """Seconds; measured by the plug-in when it first streams a kind of layer."""

    cpu_per_expert: float
    cpu_per_row: float
    copy_per_byte: list[float]
    compute_per_row: list[float]


def rates_of(told: dict[str, Any]) -> Rates | None:
    """None before anything was measured."""
    cpu = re.match(r"CPU ([\d.e+-]+) ms per expert, ([\d.e+-]+) us per row", told["rates"])
    devices = [d for d in told["devices"] if d["copy_s_per_byte"] > 0]
    if not cpu or not devices or float(cpu[2]) == 0:
        return None
    return Rates(
        float(cpu[1]) * 1e-3, float(cpu[2]) * 1e-6,
        [d["copy_s_per_byte"] for d in devices], [d["compute_s_per_row"] for d in devices],
    )  # fmt: skip


def threshold(rates: Rates, shape: Shape, expert_bytes: int, cpu_slowdown: float | None) -> int | None:
    """The smallest number of tokens, with even routing, that the plug-in's model gives to the devices or to devices and CPU
    together; None: none. `expert_bytes`: as they are stored. `cpu_slowdown`: of a CPU that also feeds devices; None: it does
    not help."""

    def streams(n_tokens: int) -> bool:
        return _streamed_s(rates, shape, expert_bytes, n_tokens, cpu_slowdown) < _cpu_s(rates, shape, n_tokens, 1.0)

    high = MIN_TOKENS
    while not streams(high):
        high *= 2
        if high > MOST_TOKENS:
            return None
    low = MIN_TOKENS if high == MIN_TOKENS else high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if streams(middle) else (middle, high)
    return high


def cpu_slowdown(n_threads: int, n_devices: int) -> float:
    """A thread less per device (helping_threads of cpp/stream/streams_pass.h)."""
    return n_threads / max(1, n_threads - n_devices)


def _active(shape: Shape, n_tokens: int) -> float:
    return shape.n_expert * (1 - (1 - shape.n_used / shape.n_expert) ** n_tokens)


def _cpu_s(rates: Rates, shape: Shape, n_tokens: int, share: float) -> float:
    return share * (_active(shape, n_tokens) * rates.cpu_per_expert + n_tokens * shape.n_used * rates.cpu_per_row)


def _streamed_s(rates: Rates, shape: Shape, expert_bytes: int, n_tokens: int, slowdown: float | None) -> float:
    """With the CPU's share where both end together, found by halving as the plug-in does."""
    n = max(1, round(_active(shape, n_tokens)))
    rows = n_tokens * shape.n_used / n
    activations = 2 * 4 * n_tokens * shape.n_embd * max(rates.copy_per_byte)
    alone = _devices_s(rates, n, rows, expert_bytes)
    if slowdown is None:
        return alone + activations
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        cpu = slowdown * _cpu_s(rates, shape, n_tokens, middle / n)
        low, high = (middle, high) if cpu <= _devices_s(rates, n - middle, rows, expert_bytes) else (low, middle - 1)
    both = max(slowdown * _cpu_s(rates, shape, n_tokens, low / n), _devices_s(rates, n - low, rows, expert_bytes))
    return (min(alone, both) if low < n else alone) + activations


def _devices_s(rates: Rates, n_experts: int, rows: float, expert_bytes: int) -> float:
    """Every device's two stages, copying and computing, overlap."""
    copy_free, compute_free = [0.0] * len(rates.copy_per_byte), [0.0] * len(rates.copy_per_byte)
    for _ in range(n_experts):
        ends = []
        for d, per_byte in enumerate(rates.copy_per_byte):
            there = copy_free[d] + expert_bytes * per_byte
            ends.append((max(there, compute_free[d]) + rows * rates.compute_per_row[d], there, d))
        end, there, d = min(ends)
        copy_free[d], compute_free[d] = there, end
    return max(compute_free)
