"""Figures of the benchmark of streaming, and the bounds that they are held against. Arithmetic only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from .graph import Shape
from .stream_link import Link
from .stream_report import DeviceUse


@dataclass(frozen=True)
class DeviceFigures:
    """One device; times and counts per layer."""

    name: str
    link_gbps: float  # up, of pinned memory, measured by large copies
    busy_gbps: float  # experts, while they were being copied
    wall_gbps: float  # experts, over the whole run
    n_experts: float  # computed
    n_copied: float  # experts' worth of bytes that crossed the link
    n_wasted: float  # of them never computed: fetched ahead in vain
    n_rows: float
    upload_ms: float
    compute_ms: float
    starved_ms: float  # a layer ran, and the compute units waited for a copy
    slots: int
    ring_bytes: int
    batch_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class StreamResult:
    """One number of tokens. ms are medians per layer."""

    shape: Shape
    kind: str
    routing: str
    n_layers: int
    n_tokens: int
    attention_ms: float
    check: str  # what was compared before timing, with the distance
    where: str  # "devices" or "CPU"
    ms: float
    best_ms: float
    worst_ms: float
    expert_bytes: int  # of one expert on the link
    in_bytes: float  # activations to all devices, per layer
    out_bytes: float  # and back
    copy_ms: float  # bytes of the experts that were computed, and activations, over the measured links
    compute_ms: float  # devices' rows at their rates, spread ideally
    bound_ms: float
    ratio: float  # ms / bound_ms
    hidden: float  # share of the copies behind which something was computed or attention ran
    balance: float  # mean over devices of the larger of copying and computing, by the largest
    cpu_experts: float  # per layer, that the CPU took
    cpu_ms: float | None  # the same layers without streaming
    peers: dict[str, float | str]  # ms per layer of copy-then-compute, or why there is none
    peer_compute_ms: float | None  # of it, the device's own time
    threshold: int | None  # tokens from which on the plug-in's model streams; None: never, or nothing was measured
    plan: str
    rates: str
    devices: list[DeviceFigures] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def vs_cpu(self) -> float | None:
        return self.cpu_ms / self.ms if self.cpu_ms else None

    @property
    def vs_peer(self) -> dict[str, float]:
        """How many times faster than each peer."""
        return {name: ms / self.ms for name, ms in self.peers.items() if isinstance(ms, float)}


def copy_s(uses: list[DeviceUse], links: dict[str, Link], expert_bytes: int) -> float:
    """Ideal seconds of a run: each device receives and returns its activations, and experts are shared so that all links end
    together."""
    rates = {u.name: links[u.name].up_gbps * 1e9 for u in uses}
    activations = {u.name: u.in_bytes / rates[u.name] + u.out_bytes / (links[u.name].down_gbps * 1e9) for u in uses}
    experts = sum(u.n_experts for u in uses) * expert_bytes
    return (experts + sum(rates[name] * s for name, s in activations.items())) / sum(rates.values())


def compute_s(uses: list[DeviceUse]) -> float:
    """Ideal seconds of a run: all rows, at the rates that the devices showed, ending together."""
    rows_per_s = sum(u.n_rows / u.compute_s for u in uses if u.compute_s > 0)
    return sum(u.n_rows for u in uses) / rows_per_s if rows_per_s else 0.0


def bound_s(copy: float, compute: float, attention: float, ring: float) -> float:
    """Of one layer. While attention runs, copies go on as far as the ring holds (`ring`: seconds of copying)."""
    return max(copy + max(0.0, attention - ring), compute + attention)


def hidden_share(uses: list[DeviceUse]) -> float:
    upload = sum(u.upload_s for u in uses)
    return min(1.0, max(0.0, 1 - sum(u.starved_s for u in uses) / upload)) if upload else 0.0


def balance(uses: list[DeviceUse]) -> float:
    times = [max(u.upload_s, u.compute_s) for u in uses]
    return statistics.mean(times) / max(times) if times and max(times) > 0 else 1.0


def device_figures(
    u: DeviceUse, told: dict[str, Any], link: Link, expert_bytes: int, seconds: float, n_layers: int
) -> DeviceFigures:
    d = next(d for d in told["devices"] if d["name"] == u.name)
    return DeviceFigures(
        u.name, link.up_gbps,
        u.expert_bytes / u.upload_s / 1e9 if u.upload_s else 0.0,
        u.expert_bytes / seconds / 1e9,
        u.n_experts / n_layers, u.expert_bytes / expert_bytes / n_layers,
        u.wasted_bytes / expert_bytes / n_layers, u.n_rows / n_layers,
        u.upload_s * 1e3 / n_layers, u.compute_s * 1e3 / n_layers, u.starved_s * 1e3 / n_layers,
        d["slots"], d["slots"] * d["slot_bytes"], d["batch_bytes"], d["host_bytes"],
    )  # fmt: skip
