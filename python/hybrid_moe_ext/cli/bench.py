"""`hybrid-moe bench`: the tables around hybrid_moe_ext.bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import rich.box
import rich.console
import rich.table

from .. import _native
from ..bench import Limits, Result, bench_kernels, bench_layer, bench_model, measure_limits
from ..bench.layer import check_choice
from ..errors import OptionError
from ..options import Options
from .terminal import note, write

COLUMNS = ("type", "rows", "engine", "ms", "GB/s", "read", "GFLOP/s", "peak", "vs ggml", "vs torch")
MOST_ROWS = 65536  # of them stock ggml's intermediate results fill gigabytes


@dataclass(frozen=True)
class Request:
    """What a benchmark is asked for, as given on the command line."""

    shapes: str
    kinds: str
    rows: str
    rounds: int
    n_threads: int
    as_json: bool
    options: Options


def layer(r: Request) -> None:
    kinds, rows = _kinds(r), _numbers(r.rows)
    check_choice([r.shapes], kinds)
    _run(r, lambda limits: bench_layer(r.shapes, kinds, rows, r.n_threads, limits, r.rounds))


def kernels(r: Request) -> None:
    shapes, kinds, rows = _names(r.shapes, "--shapes"), _kinds(r), _numbers(r.rows)
    check_choice(shapes, kinds)
    _run(r, lambda limits: bench_kernels(shapes, kinds, rows, r.n_threads, limits, r.rounds))


def model(r: Request, folder: Path | None) -> None:
    """`shapes` and `rows` are not asked for: there is one model."""
    kinds = _kinds(r)
    note(f"Qwen3-30B-A3B's shape, 4 of its 48 layers; {r.n_threads} threads, medians of {r.rounds}")
    results = list(bench_model(kinds, r.n_threads, r.rounds, r.options, folder))
    if r.as_json:
        write(json.dumps({"n_threads": r.n_threads, "results": [asdict(x) for x in results]}) + "\n")
        return
    table = rich.table.Table("type", "test", "engine", "ms", "tokens/s", "vs llama.cpp", box=rich.box.SIMPLE)
    stock = {(x.kind, x.test): x.seconds for x in results if x.engine == "llama.cpp"}
    for x in results:
        peer = stock.get((x.kind, x.test)) if x.engine == "hybrid-moe" else None
        ratio = f"{peer / x.seconds:.2f}x" if peer else ""
        table.add_row(x.kind, x.test, x.engine, f"{x.seconds * 1e3:.0f}", f"{x.tokens_per_s:.1f}", ratio)
    rich.console.Console().print(table)


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


def _names(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError(f"{option} {text!r}: give names separated by commas")
    return names


def _kinds(r: Request) -> list[str]:
    return [name.upper() for name in _names(r.kinds, "--types")]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--rows {text!r}: give whole numbers separated by commas") from error
    if min(numbers) < 1 or max(numbers) > MOST_ROWS:
        raise OptionError(f"--rows {text!r}: row counts go from 1 to {MOST_ROWS}")
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
