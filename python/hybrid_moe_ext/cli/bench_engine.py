"""`hybrid-moe bench engine`: the load, the table and the JSON around hybrid_moe_ext.bench.engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import rich.box
import rich.console
import rich.table

from .. import _native
from ..bench.engine import PEER, EngineRequest, Round, bench_engine, check, ratios
from ..bench.engine_figures import Figures, medians
from ..bench.engine_load import Entry, kinds, poisson, read_trace
from ..bench.trace_plot import check_writable
from ..errors import OptionError
from .terminal import note, write


@dataclass(frozen=True)
class Load:
    """As given on the command line."""

    trace: Path | None
    n: int
    rate: float
    mix: str
    seed: int


def entries(load: Load) -> list[Entry]:
    if load.trace:
        return read_trace(load.trace)
    return poisson(load.n, load.rate, kinds(load.mix), load.seed)


def engine(r: EngineRequest, save_trace: Path | None, as_json: bool) -> None:
    check(r)
    if save_trace:
        check_writable(save_trace, "--save-trace")
    status = _native.register(r.options)
    note(
        f"{r.model}: {len(r.entries)} requests in {r.entries[-1].at_s:.1f} s, {r.sizes['n_parallel']} at a time, context "
        f"{r.sizes['n_ctx']}, {r.n_threads} threads, {status.isa}; {r.rounds} round{'s' if r.rounds > 1 else ''}, medians"
    )
    rounds: list[Round] = []
    for one in bench_engine(r, save_trace):
        rounds.append(one)
        failed = [s.error for s in one.served if s.error]
        note(_line(one) + (f"; {len(failed)} failed: {failed[0]}" if failed else ""))
    names = list(dict.fromkeys(one.engine for one in rounds))
    if as_json:
        write(json.dumps(_told(r, rounds, names, status.isa)) + "\n")
        return
    table(rounds, names)


def _line(one: Round) -> str:
    f = one.figures
    return (
        f"round {one.i_round + 1}, {one.engine}: {f.seconds:.1f} s, {f.total_tps:.1f} tokens/s, stall {_ms(f.stall_ms)}"
    )


def _told(r: EngineRequest, rounds: Sequence[Round], names: Sequence[str], isa: str) -> dict[str, object]:
    per_engine = {name: asdict(medians([x.figures for x in rounds if x.engine == name])) for name in names}
    by_peer = {
        name: {figure: ratios(rounds, name, PEER, figure) for figure in Figures.names()}
        for name in names
        if PEER in names and name != PEER
    }
    return {
        "model": r.model, "isa": isa, "n_threads": r.n_threads, "options": dict(r.sizes), "medians": per_engine,
        "by_llama_server": by_peer, "rounds": [asdict(one) for one in rounds],
    }  # fmt: skip


# Row, figure, how it is shown.
_ROWS = (
    ("TTFT p50, s", "ttft_s_p50", "{:.2f}"),
    ("     p95", "ttft_s_p95", "{:.2f}"),
    ("     p99", "ttft_s_p99", "{:.2f}"),
    ("TPOT p50, ms", "tpot_ms_p50", "{:.1f}"),
    ("     p95", "tpot_ms_p95", "{:.1f}"),
    ("     p99", "tpot_ms_p99", "{:.1f}"),
    ("longest stall, ms", "stall_ms", "{:.0f}"),
    ("  by its stream's median", "stall_by_tpot", "{:.1f}"),
    ("queue p50, s", "queue_s_p50", "{:.2f}"),
    ("     p95", "queue_s_p95", "{:.2f}"),
    ("prompt tokens/s", "prompt_tps", "{:.1f}"),
    ("generated tokens/s", "generated_tps", "{:.1f}"),
    ("both", "total_tps", "{:.1f}"),
    ("within service levels", "goodput", "{:.0%}"),
    ("  of these per second", "goodput_tps", "{:.2f}"),
    ("whole time, s", "seconds", "{:.1f}"),
    ("sent late by, ms", "late_ms", "{:.1f}"),
    ("reused tokens", "n_reused", "{:.0f}"),
    ("failed", "n_failed", "{:.0f}"),
)
_WITHOUT_RATIO = ("goodput", "late_ms", "n_failed", "n_reused", "queue_s_p50", "queue_s_p95", "stall_by_tpot")


def table(rounds: Sequence[Round], names: Sequence[str]) -> None:
    """Medians over rounds, and the medians of the ratios to llama-server's in the same round."""
    shown = rich.table.Table(box=rich.box.SIMPLE, padding=0)
    shown.add_column("", min_width=26)
    for name in names:
        shown.add_column(name, no_wrap=True, min_width=15)
    of = {name: medians([x.figures for x in rounds if x.engine == name]) for name in names}
    for title, figure, form in _ROWS:
        cells = []
        for name in names:
            value = getattr(of[name], figure)
            ratio = None if name == PEER or figure in _WITHOUT_RATIO else ratios(rounds, name, PEER, figure)
            text = "-" if value is None else form.format(value)
            cells.append(text + (f" ({ratio:.2f}x)" if ratio is not None and math.isfinite(ratio) else ""))
        shown.add_row(title, *cells)
    rich.console.Console().print(shown)


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} ms"


def words(text: str, option: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if len(set(found)) < len(found):
        raise OptionError(f"{option} {text!r}: name each once")
    return found
