"""`hybrid-moe bench stream`: request, tables and timeline around hybrid_moe_ext.bench.stream."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import rich.box
import rich.console
import rich.table

from .. import _native
from ..bench.stream import StreamRequest, bench_stream, shape_named
from ..bench.stream_ggml import chosen_devices, load_backend
from ..bench.stream_result import DeviceFigures, StreamResult
from ..bench.trace_plot import check_plot, check_writable, plot_trace
from ..errors import OptionError
from ..options import Options
from .terminal import note, write

TRACE = "HYBRID_MOE_TRACE"


@dataclass(frozen=True)
class Output:
    as_json: bool
    trace: Path | None
    plot: Path | None
    from_trace: Path | None
    backend: str | None
    plot_layers: int


def request(
    shape: str, scale: float, kind: str, tokens: str, n_layers: int, attention_ms: float, routing: str, memory_mib: int,
    rounds: int, n_threads: int, peers: str, with_cpu: bool, checked: bool, options: Options,
) -> StreamRequest:  # fmt: skip
    try:
        numbers = [int(n) for n in tokens.split(",")]
    except ValueError as error:
        raise OptionError(f"--tokens {tokens!r}: give whole numbers separated by commas") from error
    names = [name.strip() for name in peers.split(",") if name.strip() not in ("", "none")]
    return StreamRequest(
        shape_named(shape, scale), kind.upper(), numbers, n_layers, attention_ms, routing, memory_mib, rounds, n_threads, names,
        with_cpu, checked, options,
    )  # fmt: skip


def check(out: Output) -> None:
    """Before anything is loaded or measured."""
    if out.from_trace and not out.plot:
        raise OptionError(
            "--from-trace draws a trace that is there already: say where to, with --plot FILE.html or FILE.png"
        )
    if out.from_trace and out.trace:
        raise OptionError(
            "--from-trace and --trace exclude each other: nothing is measured when a trace is there already"
        )
    if out.plot:
        check_plot(out.plot)
    if out.trace:
        check_writable(out.trace, "--trace")


def draw(trace: Path, plot: Path, n_layers: int) -> None:
    part = plot_trace(trace, plot, n_layers)
    note(f"{plot}: {len(part.spans)} spans of {len(part.layers)} layers, {(part.end - part.begin) * 1e3:.1f} ms")


def stream(r: StreamRequest, out: Output) -> None:
    with _tracing(out) as trace:
        if out.backend:
            load_backend(out.backend)
        devices = chosen_devices(r.options.devices)
        status = _native.register(r.options)
        s = r.shape
        note(
            f"{s.n_embd},{s.n_ff},{s.n_expert},{s.n_used} {r.kind}, {r.n_layers} layers, {r.routing} routing, {r.n_threads} "
            f"threads, {status.isa}; {', '.join(f'{d.name} ({d.description})' for d in devices)}; medians of {r.rounds}"
        )
        results = []
        for result in bench_stream(r, devices):
            results.append(result)
            if not out.as_json:
                _print(result)
        if out.as_json:
            told = [asdict(x) | {"vs_cpu": x.vs_cpu, "vs_peer": x.vs_peer} for x in results]
            write(json.dumps({"isa": status.isa, "n_threads": r.n_threads, "results": told}) + "\n")
        if trace and out.plot:
            ctypes.CDLL(None).fflush(None)  # the plug-in's file is complete at the end of the process only
            draw(trace, out.plot, out.plot_layers)


@contextlib.contextmanager
def _tracing(out: Output) -> Iterator[Path | None]:
    """The plug-in opens the file that the environment names when it is loaded."""
    chosen = out.trace or (Path(os.environ[TRACE]) if os.environ.get(TRACE) else None)
    if chosen is None and out.plot is None:
        yield None
        return
    if _native.device_handle():
        raise OptionError("--trace and --plot come too late: this process has loaded the plug-in already")
    with TemporaryDirectory(prefix="hybrid-moe-bench-") as folder:
        path = chosen or Path(folder) / "trace.json"
        before = os.environ.get(TRACE)
        os.environ[TRACE] = str(path)
        try:
            yield path
        finally:
            os.environ.pop(TRACE)
            if before is not None:
                os.environ[TRACE] = before


def _print(x: StreamResult) -> None:
    console = rich.console.Console()
    table = rich.table.Table(
        box=rich.box.SIMPLE, title=f"{x.n_tokens} tokens, on {x.where}", show_header=False, padding=0
    )
    table.add_column(min_width=26)
    table.add_column()
    for name, value in _lines(x):
        table.add_row(name, value)
    console.print(table)
    if x.devices:
        console.print(_device_table(x))


def _lines(x: StreamResult) -> Iterator[tuple[str, str]]:
    yield "check", x.check
    yield "ms per layer", f"{x.ms:.2f} (of which attention {x.attention_ms:.2f}; {x.best_ms:.2f} to {x.worst_ms:.2f})"
    if x.devices:
        activations = f"activations {x.in_bytes / 1e6:.1f} MB in, {x.out_bytes / 1e6:.1f} MB back"
        mb = f"experts {x.expert_bytes / 1e6:.2f} MB each, {activations}"
        yield "least possible", f"{x.bound_ms:.2f}: copies {x.copy_ms:.2f}, computing {x.compute_ms:.2f}; {mb}"
        yield "ratio to the least", f"{x.ratio:.3f}"
        yield "copying hidden", f"{x.hidden:.0%}"
        if len(x.devices) > 1:
            yield "balance", f"{x.balance:.1%}"
        yield "experts on the CPU", f"{x.cpu_experts:.1f} per layer"
    if x.cpu_ms is not None:
        yield "CPU alone", f"{x.cpu_ms:.2f} ms, {x.cpu_ms / x.ms:.2f}x"
    for name, ms in x.peers.items():
        yield f"copy, then compute ({name})", ms if isinstance(ms, str) else f"{ms:.2f} ms, {ms / x.ms:.2f}x"
    if x.peer_compute_ms is not None:
        yield "  of it computing", f"{x.peer_compute_ms:.2f} ms"
    if x.rates:
        yield "rates", x.rates
        yield "streams from", "no number of tokens" if x.threshold is None else f"{x.threshold} tokens on (predicted)"
    yield "plan", x.plan
    for trouble in x.troubles:
        yield "trouble", trouble


def _device_table(x: StreamResult) -> rich.table.Table:
    """A column per device; times and counts per layer."""
    table = rich.table.Table(box=rich.box.SIMPLE, padding=0)
    table.add_column("", min_width=26)
    for d in x.devices:
        table.add_column(d.name, no_wrap=True, min_width=10)
    rows: dict[str, Callable[[DeviceFigures], str]] = {
        "link, GB/s": lambda d: f"{d.link_gbps:.2f}",
        "  while copying experts": lambda d: f"{d.busy_gbps:.2f}",
        "  over the whole run": lambda d: f"{d.wall_gbps:.2f}",
        "experts computed": lambda d: f"{d.n_experts:.1f}",
        "experts copied": lambda d: f"{d.n_copied:.1f}",
        "  in vain": lambda d: f"{d.n_wasted:.1f}",
        "copying, ms": lambda d: f"{d.upload_ms:.2f}",
        "computing, ms": lambda d: f"{d.compute_ms:.2f}",
        "waiting for copies, ms": lambda d: f"{d.starved_ms:.2f}",
        "ring, MiB": lambda d: f"{d.ring_bytes / 1048576:.0f} ({d.slots})",
        "batch, MiB": lambda d: f"{d.batch_bytes / 1048576:.0f}",
        "host memory, MiB": lambda d: f"{d.host_bytes / 1048576:.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, *(value(d) for d in x.devices))
    return table
