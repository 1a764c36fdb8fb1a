"""The commands of `hybrid-moe` and their flags. What they do is in generate.py and info.py."""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import CheckpointError, OptionError
from ..fits import DEFAULT_LINK, DEFAULT_TFLOPS, SHAPES
from ..fits.tensors import EXPERT_TYPES
from ..host_env import host_env as describe_host_env
from ..info import PARTS, ModelInfo, describe_model
from ..machine import default_threads
from ..options import Options
from . import bench as run_bench
from . import bench_stream as run_stream
from .convert import FP8_NOTE
from .convert import run as run_convert
from .fits import Request as FitsRequest
from .fits import info_section
from .fits import run as run_fits
from .generate import Request, Result
from .generate import run as generate
from .gpus import gpu_facts, gpu_lines
from .serve import register as register_serve
from .terminal import note, set_log, write

DEMO_MODEL = "tiny-deepseek-v3-fp8"
DEMO_PROMPT = "The licenses for most software are designed to"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Runs Mixture-of-Experts models: GGUF files and Hugging Face directories, FP8 included, as they are.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(f"hybrid-moe-ext {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")
        raise typer.Exit(2)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds a flag per field of Options; the command gets them as one dict, `options`."""
    described = Options.describe()

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        options = {name: given.pop(name) for name, *_ in described}
        command(**given, options=options)

    parameters = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    for name, variable, choices, help_text in described:
        flag = typer.Option("--" + name.replace("_", "-"), metavar="|".join(choices), help=f"{help_text} [{variable}]")
        annotation = Annotated[str | None, flag]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in keywords}
    del wrapper.__wrapped__  # typer would look through to the command's own signature
    return wrapper


register_serve(app, with_options)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file or a Hugging Face directory.")]
Count = Annotated[int, typer.Option("-n", min=1, help="Tokens to generate at most.")]
Temp = Annotated[float, typer.Option("--temp", min=0.0, help="Temperature; 0 always takes the likeliest token.")]
Context = Annotated[
    int | None, typer.Option("-c", "--ctx", min=1, help="Context length; 4096 by default, or what the model has.")
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", min=1, max=512, help="Threads; physical cores by default.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log.")]


@app.command()
@with_options
def demo(
    options: dict[str, str | None],
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What to continue.")] = DEMO_PROMPT,
    n: Count = 64,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run the bundled model: a tiny DeepSeek-V3 in FP8, trained on licence texts."""
    model = demo_model()
    if not as_json:
        note(f"model: {model}")
    request = Request(
        model=str(model), prompt=read_prompt(prompt), n=n, temp=0.0, seed=None, chat=False, n_ctx=None,
        n_threads=threads or default_threads(), options=options, verbose=verbose,
    )  # fmt: skip
    answer(request, as_json, with_prompt=True)


@app.command()
@with_options
def run(
    options: dict[str, str | None],
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What to continue; - reads it from stdin.")],
    n: Count = 128,
    temp: Temp = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**32 - 2, help="For --temp above 0.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    ctx: Context = None,
    ubatch: Annotated[
        int | None,
        typer.Option("-ub", "--ubatch", min=1, help="Tokens per pass; with a GPU as many as fit, otherwise 512."),
    ] = None,
    n_gpu_layers: Annotated[
        int | None,
        typer.Option(
            "-ngl", "--n-gpu-layers", min=-1, help="Layers on GPUs; -1, all, where experts are streamed, otherwise 0."
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue a prompt: the text to stdout as it comes, then speeds and where the experts ran to stderr."""
    if not math.isfinite(temp):
        raise OptionError(f"--temp {temp} is not possible: give a number, 0 or greater")
    request = Request(
        model=model, prompt=read_prompt(prompt), n=n, temp=temp, seed=seed, chat=chat, n_ctx=ctx,
        n_threads=threads or default_threads(), options=options, verbose=verbose, n_ubatch=ubatch, n_gpu_layers=n_gpu_layers,
    )  # fmt: skip
    answer(request, as_json)


bench = typer.Typer(help="Benchmarks: validate, then time, next to stock ggml in the same run.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


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


@app.command()
def info(model: Model, as_json: Json = False) -> None:
    """Architecture, layers, experts, types and sizes per part, and what would run where. Reads headers only."""
    options = Options.resolve()  # a misspelt variable is an error here too
    described = describe_model(model)
    fits = info_section(model) if described.n_expert else None
    gpus = gpu_facts(described, options)
    if as_json:
        write(json.dumps(described.as_dict() | gpus | ({"fits": fits["answer"]} if fits else {})) + "\n")
        return
    write("\n".join([*info_lines(described), *gpu_lines(described, gpus), *(fits["lines"] if fits else ())]) + "\n")


@app.command()
def fits(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"A GGUF, a Hugging Face directory, or one of {', '.join(SHAPES)}.")
    ],
    vram: Annotated[
        list[float] | None, typer.Option("--vram", help="GiB of an assumed GPU; once per GPU. Without: this machine's.")
    ] = None,
    link: Annotated[
        list[float] | None, typer.Option("--link", help=f"GB/s to a GPU, once for all or per GPU. [{DEFAULT_LINK:g}]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("-c", "--context", min=1, help="Context length; 32768 by default, or what the model has."),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option("--prompt", min=1, help="Prompt that times are told for; the whole context by default."),
    ] = None,
    expert_type: Annotated[
        str | None, typer.Option("--type", help=f"Experts of a named shape: {', '.join(EXPERT_TYPES)}; as released.")
    ] = None,
    dense_type: Annotated[
        str | None,
        typer.Option("--dense-type", help="Other weights of a shape or directory: bf16 (default), q8_0 or f32."),
    ] = None,
    kv_type: Annotated[str, typer.Option("--kv-type", help="KV cache: f16, bf16, q8_0 or f32.")] = "f16",
    fp8_link: Annotated[
        str, typer.Option("--fp8-link", help="FP8 experts cross the link as codes (CUDA), as bf16 (others), or auto.")
    ] = "auto",
    split_mode: Annotated[str, typer.Option("--split-mode", help="none, layer, or auto: the faster.")] = "auto",
    tflops: Annotated[float, typer.Option("--tflops", help="What a GPU computes at.")] = DEFAULT_TFLOPS,
    reserve: Annotated[float, typer.Option("--reserve", help="MiB to leave free on each GPU.")] = 1024,
    as_json: Json = False,
) -> None:
    """The largest n_ubatch that fits, the ring that remains, and the prefill that follows, by llama.cpp's own accounting."""
    Options.resolve()
    options = {
        "expert_type": expert_type, "dense_type": dense_type, "kv_type": kv_type, "fp8_link": fp8_link,
        "split_mode": split_mode, "tflops": tflops, "reserve_mib": reserve,
    }  # fmt: skip
    run_fits(FitsRequest(model, vram or [], link or [DEFAULT_LINK], context, prompt, as_json, options))


@app.command()
def convert(
    directory: Annotated[str, typer.Argument(metavar="HFDIR", help="A Hugging Face directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    dense_type: Annotated[
        str | None, typer.Option("--dense-type", metavar="bf16|q8_0|f32", help="Type of everything but the experts.")
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option(
            "--split-max-size", metavar="N", help="Bytes per file, such as 50G: writes OUT-00001-of-0000N.gguf."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a Hugging Face directory as GGUF, FP8 experts unchanged. Hugging Face directories also run as they are."""
    run_convert(directory, out, Options.resolve(dense_type=dense_type).dense_type, split_max_size, force)


@app.command()
def host_env(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A GGUF: says what is right for its experts.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """What to set so that llama-server and other stock hosts run experts here: eval "$(hybrid-moe host-env)"."""
    Options.resolve()
    told = describe_host_env(threads or default_threads(), model)
    write(json.dumps(asdict(told)) + "\n" if as_json else "\n".join(told.shell_lines()) + "\n")


def answer(request: Request, as_json: bool, with_prompt: bool = False) -> Result:
    """`with_prompt`: the prompt is printed in front of its continuation, once that begins."""
    set_log(request.verbose)
    pending = [request.prompt] if with_prompt else []

    def show(text: str) -> None:
        write("".join(pending) + text)
        pending.clear()

    result = generate(request, show=(lambda text: None) if as_json else show)
    if as_json:
        write(json.dumps(result.as_dict()) + "\n")
    else:
        write("\n")
        for line in result.statistics():
            note(line)
    return result


def read_prompt(prompt: str) -> str:
    """`-` is stdin; one newline at its end, which echo and editors add, is dropped."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"the prompt on stdin is not UTF-8 ({error})") from error


def demo_model() -> Path:
    """Inside the installed package, or in the source tree next to it."""
    package = Path(__file__).parent.parent
    for folder in (package / "models", package.parent.parent / "models"):
        if (folder / DEMO_MODEL / "config.json").is_file():
            return folder / DEMO_MODEL
    raise CheckpointError(f"the bundled model {DEMO_MODEL} is missing: this installation is incomplete, repeat it")


def info_lines(model: ModelInfo) -> list[str]:
    lines = [
        f"model:        {model.path} ({'Hugging Face directory' if model.format == 'hf' else 'GGUF'})",
        f"architecture: {model.architecture}, {model.n_layer} layers, trained for {model.n_ctx_train} tokens",
        f"experts:      {model.n_expert_used} of {model.n_expert} per token"
        if model.n_expert
        else "experts:      none, this is not a Mixture-of-Experts model",
    ]
    if model.fp8_scales:
        lines.append(f"FP8 scales:   {model.fp8_scales}")
    lines.append(f"size:         {size(model.n_bytes)}")
    for name in PARTS:
        if name in model.parts:
            part = model.parts[name]
            largest_first = sorted(part.types.items(), key=lambda item: -item[1])
            types = ", ".join(f"{type_} {size(n)}" for type_, n in largest_first)
            lines.append(f"  {name:<11} {size(part.n_bytes):>9}  on {part.runs_on:<9}  {types}")
    if model.n_skipped:
        lines.append(f"not run:      {model.n_skipped} tensors (multi-token prediction)")
    if model.is_fp8_gguf:
        lines.append(f"note:         {FP8_NOTE}")
    if model.host_expert_types:
        kept = ", ".join(model.host_expert_types)
        lines.append(f"note:         experts of type {kept} stay with the host: there are no kernels for them yet")
    return lines


def size(n_bytes: int) -> str:
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
