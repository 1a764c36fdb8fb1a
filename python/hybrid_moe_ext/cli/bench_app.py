"""The benchmarks' commands and their flags. What they do is in bench.py, bench_stream.py and bench_engine.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.engine import EngineRequest
from ..machine import default_threads
from ..options import Options
from . import bench as run_bench
from . import bench_engine as run_engine
from . import bench_stream as run_stream
from .flags import Json, Model, Threads, Verbose, with_engine_options, with_options
from .terminal import set_log

bench = typer.Typer(help="Benchmarks: validate, then time, next to stock ggml in the same run.", rich_markup_mode=None)


BenchTypes = Annotated[
    str, typer.Option(help="Weight types: FP8, BF16, F16, F32, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4, NVFP4.")
]
BenchRows = Annotated[str, typer.Option(help="Numbers of token rows.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed runs per engine; the median is shown.")]


@bench.command()
@with_options
def layer(
    options: dict[str, str | None],
    shape: Annotated[str, typer.Option(help="deepseek, qwen3-30b or gpt-oss: a layer of that model.")] = "qwen3-30b",
    types: BenchTypes = "FP8,BF16,Q8_0",
    rows: BenchRows = "1,4,16,128,512",
    rounds: Rounds = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """One MoE layer: ms, GB/s and GFLOP/s with their shares of what this machine can do, and ratios to its peers."""
    set_log(False)
    n_threads = threads or default_threads()
    run_bench.layer(run_bench.Request(shape, types, rows, rounds, n_threads, as_json, Options.resolve(None, **options)))


@bench.command()
@with_options
def kernels(
    options: dict[str, str | None],
    shapes: Annotated[
        str, typer.Option(help="Expert matrices of these models' layers.")
    ] = "deepseek,qwen3-30b,gpt-oss",
    types: BenchTypes = "FP8,BF16,Q8_0",
    rows: BenchRows = "1,4,16,128,512,2048",
    rounds: Rounds = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The product by one expert matrix that no cache holds, the same figures."""
    set_log(False)
    n_threads = threads or default_threads()
    run_bench.kernels(
        run_bench.Request(shapes, types, rows, rounds, n_threads, as_json, Options.resolve(None, **options))
    )


@bench.command("model")
@with_options
def bench_model(
    options: dict[str, str | None],
    types: BenchTypes = "Q8_0,FP8",
    folder: Annotated[
        Path | None, typer.Option(help="Keep the generated models here (2.6 GB in Q8_0) and use them again.")
    ] = None,
    rounds: Rounds = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """A model of Qwen3-30B-A3B's shape with 4 layers: a prompt of 512 tokens, and 64 single ones, with and without us."""
    set_log(False)
    request = run_bench.Request(
        "", types, "", rounds, threads or default_threads(), as_json, Options.resolve(None, **options)
    )
    run_bench.model(request, folder)


@bench.command("stream")
@with_options
def bench_streaming(
    options: dict[str, str | None],
    shape: Annotated[
        str,
        typer.Option(
            help="deepseek, qwen3-235b, qwen3-30b, gpt-oss-120b, glm-4.5: a layer of that model; or n_embd,n_ff,n_expert,n_used."
        ),
    ] = "qwen3-30b",
    scale: Annotated[
        float, typer.Option(min=1.0, help="Divides n_embd: weights, activations and work shrink alike.")
    ] = 1.0,
    weights: Annotated[str, typer.Option("--type", help="Weight type.")] = "Q8_0",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens in a pass.")] = "1024,4096,16384",
    layers: Annotated[int, typer.Option(min=1, max=256, help="Layers in a row.")] = 6,
    attention_ms: Annotated[float, typer.Option(min=0.0, help="Pause before each layer, in place of attention.")] = 0.0,
    routing: Annotated[str, typer.Option(help="uniform; or skewed: half of the experts are never wanted.")] = "uniform",
    memory_mib: Annotated[
        int, typer.Option(min=1, help="Memory of the experts; addresses beyond are the same memory again.")
    ] = 2048,
    peers: Annotated[
        str, typer.Option(help="Copy-then-compute loops to time: pinned, pageable (memory they copy from), or none.")
    ] = "pinned,pageable",
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="Time the CPU alone too.")] = True,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="For simulated devices, which compute nothing.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write what happened when to this file (Chrome trace).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the last layers' timeline to a .html or .png.")] = None,
    plot_layers: Annotated[int, typer.Option(min=1, max=100, help="Layers in the timeline.")] = 2,
    from_trace: Annotated[
        Path | None, typer.Option(help="Draw this trace, of whatever run, and measure nothing.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="A ggml back end to load first, libggml-*.so: llama-cpp-python loads its own only."),
    ] = None,
    rounds: Rounds = 5,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """MoE layers whose experts are streamed to GPU devices: time and its lower bound, overlap, GB/s, balance, peers."""
    out = run_stream.Output(as_json, trace, plot, from_trace, backend, plot_layers)
    run_stream.check(out)
    if from_trace and plot:
        return run_stream.draw(from_trace, plot, plot_layers)
    set_log(verbose)
    request = run_stream.request(
        shape, scale, weights, tokens, layers, attention_ms, routing, memory_mib, rounds, threads or default_threads(), peers,
        cpu, not unchecked, Options.resolve(None, **options),
    )  # fmt: skip
    run_stream.stream(request, out)


@bench.command("engine")
@with_options
@with_engine_options(without=("n_threads",))
def bench_serving(
    model: Model,
    options: dict[str, str | None],
    sizes: dict[str, Any],
    requests: Annotated[int, typer.Option("-n", "--requests", help="How many come.")] = 16,
    rate: Annotated[float, typer.Option(help="How many per second, on average; inf: all at once.")] = 1.0,
    mix: Annotated[
        str,
        typer.Option(
            help="What comes: PROMPT:OUTPUT@WEIGHT,... in tokens, each a number or FROM-TO. Most are short here, one in ten long."
        ),
    ] = "32-256:32-96@9,2048-3072:32@1",
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and prompts.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help='Play this file instead: lines {"at_s", "max_tokens", "prompt_tokens" or "prompt"}.'),
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write what is played to this file, in token ids, for --trace.")
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            help="Which of ours: auto (as it decides), worker, chunked (with and without a prefill worker), serve (over HTTP)."
        ),
    ] = "auto,worker,chunked",
    peer: Annotated[
        Path | None, typer.Option(help="llama.cpp's llama-server, to be timed beside them on the same requests.")
    ] = None,
    peer_args: Annotated[str, typer.Option(help="More arguments for it.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 3,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Requests that arrive over time: TTFT, TPOT, stalls, throughput, goodput, next to llama-server."""
    load = run_engine.entries(run_engine.Load(trace, requests, rate, mix, seed))
    set_log(verbose)
    request = EngineRequest(
        model, load, run_engine.words(engines, "--engines"), peer, rounds, seed, threads or default_threads(), sizes,
        Options.resolve(None, **options), shlex.split(peer_args),
    )  # fmt: skip
    run_engine.engine(request, save_trace, as_json)
