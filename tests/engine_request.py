"""A small request of the engine benchmark, for its tests. No tests."""

from __future__ import annotations

from pathlib import Path

from hybrid_moe_ext.bench.engine import EngineRequest
from hybrid_moe_ext.bench.engine_load import Entry
from hybrid_moe_ext.engine import EngineOptions
from hybrid_moe_ext.options import Options

ENTRIES = [Entry(0.0, 12, 6), Entry(0.0, "This program", 5), Entry(0.05, 200, 4), Entry(0.1, (5, 6, 7), 7)]


def request(model: Path, engines: list[str], entries: list[Entry], **more: object) -> EngineRequest:
    small = {"n_ctx": 512, "n_parallel": 3, "n_batch": 48, "ttft_s": 1e6, "tpot_ms": 1e6, "prefill_from": 64}
    sizes = {f: getattr(EngineOptions(), f) for f in EngineOptions.names()} | small
    given = {"peer": None, "rounds": 1, "seed": 0, "n_threads": 1, "sizes": sizes, "options": Options()} | more
    return EngineRequest(str(model), entries, engines, **given)
