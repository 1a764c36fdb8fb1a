"""`hybrid-moe bench layer`: the table around hybrid_moe_ext.bench."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich.box
import rich.console
import rich.table

from .. import _native
from ..bench import Result, bench_layer, measure_limits
from ..errors import OptionError
from ..options import Options
from .terminal import note, write

COLUMNS = ("type", "rows", "engine", "ms", "GB/s", "of read", "GFLOP/s", "of peak", "vs ggml")


def run(shape: str, kinds: str, rows: str, n_threads: int, rounds: int, as_json: bool, options: Options) -> None:
    status = _native.register(options)
    limits = measure_limits(n_threads)
    note(
        f"{shape}, {n_threads} threads, {status.isa}, {status.team}: read {limits.read_gbps:.1f} GB/s, "
        f"multiply-add {limits.fma_gflops:.0f} GFLOP/s, medians of {rounds}"
    )
    results = list(bench_layer(shape, _names(kinds), _numbers(rows), n_threads, limits, rounds))
    if as_json:
        write(json.dumps({"limits": asdict(limits), "isa": status.isa, "results": [asdict(r) for r in results]}) + "\n")
    else:
        rich.console.Console().print(_table(results))


def _names(text: str) -> list[str]:
    return [name.strip().upper() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--rows {text!r}: give whole numbers separated by commas") from error
    if not numbers or min(numbers) < 1:
        raise OptionError(f"--rows {text!r}: row counts begin at 1")
    return numbers


def _table(results: list[Result]) -> rich.table.Table:
    """A row per engine; the speed-up of ours over stock ggml's better layout stands in our row."""
    stock: dict[tuple[str, int], float] = {}
    for r in results:
        if r.engine.startswith("ggml"):
            stock[r.kind, r.n_tokens] = min(r.ms, stock.get((r.kind, r.n_tokens), r.ms))
    table = rich.table.Table(*COLUMNS, box=rich.box.SIMPLE)
    for r in results:
        peer = stock.get((r.kind, r.n_tokens)) if not r.engine.startswith("ggml") else None
        shares = (f"{r.gbps:.1f}", f"{r.read_share:.0%}", f"{r.gflops:.0f}", f"{r.fma_share:.0%}")
        ratio = f"{peer / r.ms:.2f}x" if peer else ""
        table.add_row(r.kind, str(r.n_tokens), r.engine, f"{r.ms:.2f}", *shares, ratio)
    return table
