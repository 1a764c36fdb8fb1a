"""The layers of the last prefill in time: which device copied and computed experts when, and which layers the CPU computed. From
what the plug-in keeps in memory (cpp/stream/recorder.h), for the page."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

from .._native import counters, library
from ..engine import Embedder, Engine

_BARS = 1200  # per lane at most about so many, whatever the model: what no screen could tell apart becomes one
_PAUSE_NS = 250_000_000  # between two batches of one prompt
_FOREVER = 2**62
_LANES = ("layers", "upload", "compute", "result", "experts")  # from top to bottom

Span = dict[str, Any]  # as the plug-in writes it


@dataclass
class Bar:
    """Milliseconds since the first layer began."""

    layer: str
    what: str
    begin_ms: float
    end_ms: float
    n: int = 1  # spans in it
    rows: int = 0
    bytes: int = 0


class Timeline:
    """Recording begins here; it is the process's. `embedder`: whose batches are no prefill."""

    def __init__(self, engine: Engine, embedder: Embedder | None = None):
        self._engine = engine
        self._embedder = embedder
        # No step that only decodes has more rows: those would push the prefill out.
        self._min_tokens = engine.options.n_parallel + 1
        self._before = _computed()
        self._began_ns = time.monotonic_ns()  # the clock of spans; an earlier engine of this process has some too
        library().hybrid_moe_record(self._min_tokens)

    def read(self) -> dict[str, Any]:
        """`lanes` is empty and `why` says so when there is nothing. Takes some milliseconds: for a thread."""
        layers = _last_prefill(self._prefill_layers())
        if not layers:
            return {"tokens": 0, "milliseconds": 0.0, "passes": [], "lanes": [], "why": self._why()}
        begin, end = layers[0]["begin_ns"], max(s["end_ns"] for s in layers)
        others = json.loads(library().hybrid_moe_recorded(0, begin, end))
        streamed = [s for s in layers if any(_is_of(s, other) for other in others)]
        on_cpu = [{**s, "process": "CPU", "lane": "layers"} for s in layers if s not in streamed]
        passes = [_told(p, begin) for p in _passes(layers)]
        spans = [*on_cpu, *others]
        return {
            "tokens": sum(p["tokens"] for p in passes),
            "milliseconds": (end - begin) / 1e6,
            "passes": passes,
            "lanes": [_lane(process, lane, of, begin, end) for (process, lane), of in _by_lane(spans).items()],
            "why": None,
        }

    def _prefill_layers(self) -> list[Span]:
        spans: list[Span] = json.loads(library().hybrid_moe_recorded(1, self._began_ns, _FOREVER))
        other = self._embedder.thread_id if self._embedder else None
        return sorted((s for s in spans if s["thread"] != other), key=lambda s: s["begin_ns"])

    def _why(self) -> str:
        if not self._engine.metrics().prompt_tokens:
            return "No prompt has been computed yet."
        if _computed() == self._before:
            return "The plug-in computes no experts of this model: llama.cpp does, and tells no times."
        return f"No batch of {self._min_tokens} or more tokens of a prompt has been computed yet; smaller ones are not recorded."


def _computed() -> int:
    return counters().n_matmuls


def _block(span: Span) -> int:
    found = re.match(r"blk\.(\d+)\.", span["layer"])
    return int(found[1]) if found else -1


def _title(span: Span) -> str:
    return f"layer {_block(span)}" if _block(span) >= 0 else str(span["layer"])


def _passes(layers: list[Span]) -> list[list[Span]]:
    """Batches: each time the layers begin again."""
    passes: list[list[Span]] = []
    for span in layers:
        last = passes[-1][-1] if passes else None
        if (
            last is None
            or _block(span) < _block(last)
            or span["rows"] != last["rows"]
            or span["layer"] == last["layer"]
        ):
            passes.append([])
        passes[-1].append(span)
    return passes


def _last_prefill(layers: list[Span]) -> list[Span]:
    """The last batch, and those before it on its thread without a pause longer than the batches take."""
    if not layers:
        return []
    passes = _passes([s for s in layers if s["thread"] == layers[-1]["thread"]])
    chosen = passes[-1]
    for earlier in reversed(passes[:-1]):
        took = earlier[-1]["end_ns"] - earlier[0]["begin_ns"]
        if chosen[0]["begin_ns"] - earlier[-1]["end_ns"] > max(_PAUSE_NS, took):
            break
        chosen = earlier + chosen
    return chosen


def _is_of(layer: Span, other: Span) -> bool:
    """A device, or the CPU's share, worked on it meanwhile."""
    is_same = _block(other) == _block(layer) and other["lane"] in ("compute", "experts")
    return is_same and other["begin_ns"] < layer["end_ns"] and layer["begin_ns"] < other["end_ns"]


def _by_lane(spans: list[Span]) -> dict[tuple[str, str], list[Span]]:
    """Devices first."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        lane = "result" if span["name"] == "result" else span["lane"]
        found.setdefault((span["process"], lane), []).append(span)
    return dict(sorted(found.items(), key=lambda one: (one[0][0] == "CPU", one[0][0], _LANES.index(one[0][1]))))


def _lane(process: str, lane: str, spans: list[Span], begin: int, end: int) -> dict[str, Any]:
    spans = sorted(spans, key=lambda s: s["begin_ns"])
    busy = sum(min(s["end_ns"], end) - max(s["begin_ns"], begin) for s in spans)
    bars: list[Bar] = []
    least_ms = (end - begin) / 1e6 / _BARS
    for s in spans:
        bar = Bar(
            _title(s), s["name"], max(0.0, (s["begin_ns"] - begin) / 1e6), (min(s["end_ns"], end) - begin) / 1e6,
            1, s["rows"], s["bytes"],
        )  # fmt: skip
        last = bars[-1] if bars else None
        is_one = last is not None and (last.layer, last.what) == (bar.layer, bar.what) and lane != "layers"
        if last is not None and is_one and bar.begin_ms - last.end_ms < least_ms:
            last.end_ms, last.n = max(last.end_ms, bar.end_ms), last.n + 1
            last.rows, last.bytes = last.rows + bar.rows, last.bytes + bar.bytes
        else:
            bars.append(bar)
    return {
        "device": process, "lane": lane, "busy": round(busy / max(1, end - begin), 4), "bars": [vars(bar) for bar in bars]
    }  # fmt: skip


def _told(layers: list[Span], begin: int) -> dict[str, Any]:
    return {
        "tokens": layers[0]["rows"],
        "begin_ms": (layers[0]["begin_ns"] - begin) / 1e6,
        "end_ms": (layers[-1]["end_ns"] - begin) / 1e6,
        "layers": len({_block(s) for s in layers}),
    }
