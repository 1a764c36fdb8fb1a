"""What Prometheus reads at /metrics: times per request, batch sizes per step, and the engine's and the streaming's own counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import streamed
from ..engine import Engine, EngineMetrics, Finish, StepReport
from .requests import Requests

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5, 30)
_BATCH = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_COUNTED = {f.name for f in fields(EngineMetrics)} - {"finished", "cells"}


class Metrics:
    """`on_step` is for the engine; made before it, since the engine wants that when it starts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Requests()

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"hybrid_moe_{name}", help, buckets=buckets, registry=self.registry)

        self._ttft = histogram("ttft_seconds", "From a request to its first token.", _SECONDS)
        self._tpot = histogram("tpot_seconds", "From a token to the next.", _TOKEN_SECONDS)
        self._queue = histogram("queue_seconds", "Until a request was admitted.", _SECONDS)
        self._total = histogram("request_seconds", "Whole requests.", _SECONDS)
        self._decoding = histogram("batch_sequences", "Sequences that got a token, per step.", _BATCH)

    def watch(self, engine: Engine) -> None:
        self.registry.register(_EngineCounts(engine))

    def on_step(self, report: StepReport) -> None:
        self.requests.on_step(report)
        if report.decoding:
            self._decoding.observe(len(report.decoding))

    def finished(self, finish: Finish) -> None:
        m = finish.metrics
        for histogram, seconds in ((self._ttft, m.ttft_s), (self._queue, m.queue_s), (self._total, m.total_s)):
            if seconds is not None:
                histogram.observe(seconds)
        for ms in m.tpot_ms:
            self._tpot.observe(ms / 1e3)


class _EngineCounts(Collector):
    """Read when asked. Fields named ..._now are gauges, the others counters."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        return iter(())  # of what is read when asked

    def collect(self) -> Iterator[Metric]:
        m = self._engine.metrics()
        for name in sorted(_COUNTED):
            kind = GaugeMetricFamily if name.endswith("_now") else CounterMetricFamily
            yield kind(f"hybrid_moe_{name}", f"EngineMetrics.{name}, see docs/engine.md.", value=getattr(m, name))
        yield GaugeMetricFamily("hybrid_moe_cells", "Tokens that the decode context can hold.", value=m.cells)
        finished = CounterMetricFamily("hybrid_moe_finished", "Requests by how they ended.", labels=["reason"])
        for reason, n in m.finished.items():
            finished.add_metric([reason], n)
        yield finished
        yield from _streaming()


def _streaming() -> Iterator[Metric]:
    """Experts that went to GPUs: counters per device, from which rate() has GB/s and the share of copying that was hidden."""
    names = {
        "expert_bytes": ("stream_expert_bytes", 1.0, "Bytes of experts that went to the device."),
        "upload_ns": ("stream_copy_seconds", 1e-9, "Time in which experts were on the link."),
        "starved_ns": ("stream_starved_seconds", 1e-9, "Part of it in which the device waited: the rest was hidden."),
    }
    devices = streamed.report()["devices"]
    for key, (name, unit, help) in names.items():
        family = CounterMetricFamily(f"hybrid_moe_{name}", help, labels=["device"])
        for device in devices:
            family.add_metric([device["name"]], int(device[key]) * unit)
        yield family
