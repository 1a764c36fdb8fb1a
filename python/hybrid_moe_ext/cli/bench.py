"""`hybrid-moe bench layer` and `kernels`: the table around hybrid_moe_ext.bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import rich.box
import rich.console
import rich.table

from .. import _native
from ..bench import Limits, Result, bench_kernels, bench_layer, measure_limits
from ..errors import OptionError
from ..options import Options
from .terminal import note, write

COLUMNS = ("type", "rows", "engine", "ms", "GB/s", "read", "GFLOP/s", "peak", "vs ggml", "vs torch")


@dataclass(frozen=True)
class Request:
    """What both benchmarks are asked for, as given on the command line."""

    shapes: str
    kinds: str
    rows: str
    rounds: int
    n_threads: int
    as_json: bool
    options: Options


def layer(r: Request) -> None:
    _run(r, lambda limits: bench_layer(r.shapes, _names(r.kinds), _numbers(r.rows), r.n_threads, limits, r.rounds))


def kernels(r: Request) -> None:
    shapes = [name.strip() for name in r.shapes.split(",") if name.strip()]
    _run(r, lambda limits: bench_kernels(shapes, _names(r.kinds), _numbers(r.rows), r.n_threads, limits, r.rounds))


def _run(r: Request, start: Callable[[Limits], Iterable[Result]]) -> None:
    status = _native.register(r.options)
    limits = measure_limits(r.n_threads)
    note(
        f"{r.shapes}, {r.n_threads} threads, {status.isa}, {status.team}: read {limits.read_gbps:.1f} GB/s, "
        f"multiply-add {limits.fma_gflops:.0f} GFLOP/s, medians of {r.rounds}"
    )
    results = list(start(limits))
    if r.as_json:
        write(json.dumps({"limits": asdict(limits), "isa": status.isa, "results": [asdict(x) for x in results]}) + "\n")
        return
    for shape in dict.fromkeys(x.shape for x in results):
        rich.console.Console().print(_table(shape, [x for x in results if x.shape == shape]))


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


def _table(shape: str, results: list[Result]) -> rich.table.Table:
    """A row per engine, with its shares of this machine's read bandwidth and multiply-add peak; ours has its speed-up over
    stock ggml's better layout and over torch."""
    table = rich.table.Table(box=rich.box.SIMPLE, title=shape, padding=0)
    for name in COLUMNS:  # 80 columns hold them, also in a pipe
        table.add_column(name, no_wrap=True, min_width={"engine": 13, "ms": 7, "type": 6}.get(name, 5))
    for r in results:
        shares = (f"{r.gbps:.1f}", f"{r.read_share:.0%}", f"{r.gflops:.0f}", f"{r.fma_share:.0%}")
        ratios = [_ratio(r, results, peer) if r.engine == "hybrid-moe" else "" for peer in ("ggml", "torch")]
        table.add_row(r.kind, str(r.n_tokens), r.engine, f"{r.ms:.2f}", *shares, *ratios)
    return table


def _ratio(ours: Result, results: list[Result], peer: str) -> str:
    same = [r for r in results if (r.kind, r.n_tokens) == (ours.kind, ours.n_tokens) and r.engine.startswith(peer)]
    return f"{min(r.ms for r in same) / ours.ms:.2f}x" if same else ""
