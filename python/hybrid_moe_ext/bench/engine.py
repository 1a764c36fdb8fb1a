"""Times the engine under a load, with and without a prefill worker, next to stock llama-server on the same requests. Every
engine is a process; they take turns, each round with new ones, so that nobody finds what an earlier round computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import OptionError, PluginError
from ..info import describe_model
from ..options import ENV_PREFIX, Options
from . import engine_peer as peers
from .child import Child
from .engine_child import warm_up
from .engine_figures import Figures, Served, figures
from .engine_http import to_llama_server, to_our_server
from .engine_load import Arrival, Entry, arrivals, read_trace, share_prefixes, write_entries
from .engine_play import Send, play

AUTO, WORKER, CHUNKED, SERVE, PEER = "auto", "worker", "chunked", "serve", "llama-server"
# What is measured of ours: the engine as it decides itself, with a prefill worker, without one, and behind our HTTP server.
ENGINES = (AUTO, WORKER, CHUNKED, SERVE)
_SERVED_AS = "bench"
WORKER_FROM = 2048  # tokens, where the engine would decide


@dataclass(frozen=True)
class EngineRequest:
    model: str
    entries: Sequence[Entry]
    engines: Sequence[str]
    peer: Path | None
    rounds: int
    seed: int
    n_threads: int
    sizes: Mapping[str, Any]  # EngineOptions, all of them
    options: Options
    peer_arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Round:
    """One engine in one round."""

    engine: str
    i_round: int
    figures: Figures
    served: list[Served]
    counted: dict[str, Any] = field(default_factory=dict)  # by the engine: steps and seconds of its workers


def check(r: EngineRequest) -> None:
    """Before anything is loaded. Raises OptionError."""
    if not r.engines and not r.peer:
        raise OptionError(f"--engines is empty and there is no --peer: choose among {', '.join(ENGINES)}")
    for name in r.engines:
        if name not in ENGINES:
            raise OptionError(f"--engines: unknown engine {name!r}: choose among {', '.join(ENGINES)}")
    if r.rounds < 1:
        raise OptionError(f"--rounds {r.rounds}: give 1 or more")
    if r.peer is None:
        return
    peers.find_binary(r.peer)
    info = describe_model(r.model)
    is_fp8 = "experts" in info.parts and "F8_E4M3" in info.parts["experts"].types
    if info.format == "hf" or is_fp8:
        what = "FP8 experts" if is_fp8 else "a Hugging Face directory"
        raise OptionError(
            f"--peer: stock llama.cpp does not run {what}: leave out --peer, or give a GGUF of another type"
        )


def bench_engine(r: EngineRequest, save_trace: Path | None = None) -> Iterator[Round]:
    check(r)
    with TemporaryDirectory(prefix="hybrid-moe-bench-") as folder:
        trace = save_trace or Path(folder) / "trace.jsonl"
        load = resolve(r, Path(folder), trace)
        reuse = share_prefixes(load)
        for i in range(r.rounds):
            for name in (*r.engines, *([PEER] if r.peer else [])):
                served, counted = _round(r, name, load, trace, reuse)
                if all(s.error for s in served):
                    raise PluginError(f"{name} served none of the {len(served)} requests: {served[0].error}")
                yield Round(name, i, figures(served, r.sizes["ttft_s"], r.sizes["tpot_ms"]), served, counted)


def resolve(r: EngineRequest, folder: Path, trace: Path) -> list[Arrival]:
    """The load in token ids, also in the file `trace`: what all engines and rounds play."""
    source = folder / "entries.jsonl"
    write_entries(source, r.entries)
    with closing(_child(r, CHUNKED, reuse=False)) as child:
        child.ask(json.dumps(["resolve", str(source), str(trace), str(r.seed)]))
    return arrivals(read_trace(trace), (), lambda _: [], 2**31, 2**31, 0)


def engine_options(r: EngineRequest, name: str, reuse: bool) -> dict[str, Any]:
    """Those of EngineOptions: what all of ours share, and what makes this one."""
    given = dict(r.sizes) | {"n_threads": r.n_threads, "queue": max(r.sizes["queue"], len(r.entries))}
    if not reuse:
        given["n_kept"] = given["store_mib"] = 0
    if name == CHUNKED:
        given["prefill_from"] = given["n_ctx"]
    elif name == WORKER and not given["prefill_from"]:
        given["prefill_from"] = WORKER_FROM
    return given


def _child(r: EngineRequest, name: str, reuse: bool) -> Child:
    arguments: list[object] = [r.model, json.dumps(engine_options(r, name, reuse))]
    return Child(f"{__package__}.engine_child", arguments, r.options, f"the engine ({name})")


def _round(
    r: EngineRequest, name: str, load: list[Arrival], trace: Path, reuse: bool
) -> tuple[list[Served], dict[str, Any]]:
    if name not in (SERVE, PEER):
        with closing(_child(r, name, reuse)) as child:
            told = child.ask(json.dumps(["play", str(trace)]))
        return [Served(**s) for s in told["served"]], told["engine"]
    with ExitStack() as stack:
        sent_to: Send
        environment = peers.stock_environment()
        if name == PEER:
            assert r.peer is not None
            n_ctx, n_parallel = r.sizes["n_ctx"], r.sizes["n_parallel"]
            command = peers.llama_server_command(
                peers.find_binary(r.peer), r.model, n_ctx, n_parallel, r.n_threads, r.peer_arguments
            )
        else:
            command = peers.our_server_command(r.model, _SERVED_AS, engine_options(r, AUTO, reuse))
            environment |= {ENV_PREFIX + option.upper(): str(getattr(r.options, option)) for option in Options.names()}
        server = stack.enter_context(peers.server(name, command, environment))
        sent_to = to_llama_server(server.port, reuse) if name == PEER else to_our_server(server.port, _SERVED_AS)
        play(warm_up(load), sent_to)
        served = play(load, sent_to)
        if any(s.error for s in served):
            server.check_alive(peers.DYING_S)
        return served, {}


def ratios(rounds: Sequence[Round], engine: str, to: str, figure: str) -> float | None:
    """Median over the rounds of `engine`'s figure by `to`'s in the same round; None: one of them has none."""
    by_round: dict[int, dict[str, float | None]] = {}
    for one in rounds:
        by_round.setdefault(one.i_round, {})[one.engine] = getattr(one.figures, figure)
    found = [a / b for both in by_round.values() if (a := both.get(engine)) is not None and (b := both.get(to))]
    return median(found) if found else None
