"""`hybrid-moe serve MODEL`: the flags, which are the fields of the engine's and the server's options, and the start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from .._native import load_named_backend
from ..engine import Engine, EngineOptions
from ..errors import HybridMoeError, OptionError, PluginError
from ..server import ServerOptions, require_packages
from .flags import LISTS, flag_of, with_flags
from .terminal import last_errors, note, progress_bar, set_log


def register(app: typer.Typer, with_options: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    app.command()(with_options(_with_fields(serve)))


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file or a Hugging Face directory.")],
    options: dict[str, str | None],
    sizes: dict[str, Any],
    limits: dict[str, Any],
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")] = 8080,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Its first line is the key that clients must send.")
    ] = None,
    n_gpu_layers: Annotated[
        int | None, typer.Option("-ngl", "--n-gpu-layers", min=-1, help="Layers on GPUs; as `run` has it.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log.")] = False,
) -> None:
    """Serve OpenAI's API: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health, /metrics; a page at /."""
    require_packages()
    from ..server.app import create_app
    from ..server.metrics import Metrics
    from ..server.run import Server, bind

    name = limits.pop("name") or Path(os.path.abspath(model)).name.removesuffix(".gguf")
    key = _read_key(api_key_file) if api_key_file else ""
    server_options = ServerOptions(name=name, api_key=key, **limits)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # while the model loads
    bound = bind(host, port)
    metrics = Metrics()
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if n_gpu_layers is not None:
        given["n_gpu_layers"] = n_gpu_layers
    set_log(verbose)
    with _load(model, on_step=metrics.on_step, verbose=verbose, **sizes, **given) as engine:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{bound.getsockname()[1]}"
        ready = f"serving {name} at {address}/v1, {engine.n_ctx} tokens of context; Ctrl-C or SIGTERM ends it"
        gpus = f"\n{engine.split_gpus}" if engine.llama.placement.devices else ""
        lines = f"{ready}{gpus}\n{engine.dual_batch}"
        Server(create_app(engine, server_options, metrics), server_options, lambda: note(lines)).run_on(bound)


def _load(model: str, **options: Any) -> Engine:
    if other := load_named_backend():
        raise PluginError(f"GGML_BACKEND_PATH={other} cannot be loaded ({last_errors()}): unset it or correct it")
    with progress_bar("loading") as progress:
        try:
            return Engine(model, progress=progress, **options)
        except HybridMoeError as error:
            reasons = last_errors()
            raise type(error)(f"{error} ({reasons})" if reasons else str(error)) from error
        except (ValueError, RuntimeError, MemoryError) as error:
            raise HybridMoeError(
                f"{model}: llama.cpp cannot load it ({error}): try a smaller --n-ctx {last_errors()}"
            ) from error


def _read_key(path: Path) -> str:
    try:
        key = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file {path} cannot be read: {error}") from error
    if not key:
        raise OptionError(f"--api-key-file {path} has no key in its first line: write one there")
    return key


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Adds a flag per field of EngineOptions (the command's `sizes`) and of ServerOptions (its `limits`)."""
    engine = fields(EngineOptions)
    server = [f for f in fields(ServerOptions) if f.name != "api_key"]  # `ps` would show it

    def wrapper(**given: Any) -> None:
        sizes = {f.name: given.pop(f.name) for f in engine}
        limits = {f.name: given.pop(LISTS.get(f.name, f.name)) for f in server}
        limits |= {name: tuple(limits[name] or ()) for name in LISTS}
        command(**given, sizes=sizes, limits=limits)

    return with_flags(wrapper, command, ("sizes", "limits"), [flag_of(f) for f in (*engine, *server)])
