"""The commands of `hybrid-moe` and their flags. What they do is in generate.py and info.py."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import CheckpointError, OptionError
from ..fits import DEFAULT_LINK, DEFAULT_TFLOPS, SHAPES
from ..fits.tensors import EXPERT_TYPES
from ..host_env import host_env as describe_host_env
from ..info import describe_model
from ..machine import default_threads
from ..options import Options
from .bench_app import bench
from .build_llama import register as register_build_llama
from .convert import run as run_convert
from .fits import Request as FitsRequest
from .fits import info_section
from .fits import run as run_fits
from .flags import Context, Count, Json, Model, Temp, Threads, Verbose, with_options
from .generate import Request, Result
from .generate import run as generate
from .gpus import gpu_facts, gpu_lines
from .info_text import info_lines
from .llama_text import llama_facts, llama_lines
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


register_serve(app, with_options)


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


app.add_typer(bench, name="bench")
register_build_llama(app)


@app.command()
def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A GGUF file or a Hugging Face directory; without: llama.cpp."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Architecture, experts, types and sizes per part, what would run where, and on which llama.cpp. Reads headers only."""
    options = Options.resolve()  # a misspelt variable is an error here too
    llama = llama_facts()
    if model is None:
        write((json.dumps(llama) if as_json else "\n".join(llama_lines(llama))) + "\n")
        return
    described = describe_model(model)
    fits = info_section(model) if described.n_expert else None
    gpus = gpu_facts(described, options)
    if as_json:
        write(json.dumps(described.as_dict() | gpus | llama | ({"fits": fits["answer"]} if fits else {})) + "\n")
        return
    write(
        "\n".join(
            [*info_lines(described), *gpu_lines(described, gpus), *llama_lines(llama), *(fits["lines"] if fits else ())]
        )
        + "\n"
    )


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
