"""What streaming did between two moments, from the plug-in's report (cpp/stream/report.cpp)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ._native import library

Report = dict[str, Any]  # as the plug-in writes it, counted since the process started


@dataclass(frozen=True)
class DeviceShare:
    """What one device did."""

    name: str
    experts: int  # computed there
    expert_bytes: int  # that went to it, those fetched ahead in vain too
    gbps: float  # of its link while experts were on it
    hidden: float  # share of that time, 0 to 1, in which it did not wait for experts
    failures: int  # layers that it did not finish

    def __str__(self) -> str:
        return f"{self.name} ({self.gbps:.3g} GB/s, {100 * self.hidden:.0f} % of copy time hidden)"


@dataclass(frozen=True)
class Streamed:
    """Layers are counted once per pass, those with too few tokens for streaming not at all."""

    layers: int
    layers_on_cpu: int  # that might have been streamed
    cpu_experts: int  # the CPU's part of the experts of streamed layers
    devices: tuple[DeviceShare, ...]  # those that computed something
    plan: str  # how the last of these layers was decided, in words
    troubles: tuple[str, ...]  # since the process started, one sentence per kind

    @property
    def cpu_share(self) -> float:
        """Of the experts of streamed layers, 0 to 1."""
        n = self.cpu_experts + sum(device.experts for device in self.devices)
        return self.cpu_experts / n if n else 0.0

    def __str__(self) -> str:
        n = self.layers + self.layers_on_cpu
        if not n:
            return "on the CPU (too few tokens to stream)"
        if not self.layers:
            return f"on the CPU ({self.plan})" if self.plan else "on the CPU"
        to = ", ".join(map(str, self.devices)) or "devices"
        help_ = f"; the CPU computed {100 * self.cpu_share:.0f} % of the experts" if self.cpu_experts else ""
        return f"streamed to {to}, {self.layers} of {n} layers{help_}"


def report() -> Report:
    """Now."""
    told: Report = json.loads(library().hybrid_moe_stream_report().decode("utf-8", "replace"))
    return told


def between(before: Report, after: Report) -> Streamed:
    earlier = {device["name"]: device for device in before["devices"]}
    shares = [_share(device, earlier.get(device["name"], {})) for device in after["devices"]]
    return Streamed(
        layers=after["layers"] - before["layers"],
        layers_on_cpu=after["layers_on_cpu"] - before["layers_on_cpu"],
        cpu_experts=after["cpu_experts"] - before["cpu_experts"],
        devices=tuple(share for share in shares if share.experts or share.failures),
        plan=after["plan"],
        troubles=tuple(after["troubles"]),
    )


def _share(device: Report, earlier: Report) -> DeviceShare:
    def grown(name: str) -> int:
        return int(device[name]) - int(earlier.get(name, 0))

    copy_ns, n_bytes = grown("upload_ns"), grown("expert_bytes")
    return DeviceShare(
        name=device["name"],
        experts=grown("experts"),
        expert_bytes=n_bytes,
        gbps=n_bytes / copy_ns if copy_ns else 0.0,
        hidden=min(1.0, max(0.0, 1 - grown("starved_ns") / copy_ns)) if copy_ns else 1.0,
        failures=grown("failures"),
    )
