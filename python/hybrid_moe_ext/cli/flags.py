"""Flags that several commands have, and those that come from Options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from ..engine import EngineOptions
from ..options import Options


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


def with_engine_options(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a flag per field of EngineOptions; the command gets all of them as one dict, `sizes`."""
    flags = [f for f in fields(EngineOptions) if f.name not in without]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            sizes = {f.name: f.default for f in fields(EngineOptions)} | {f.name: given.pop(f.name) for f in flags}
            command(**given, sizes=sizes)

        parameters = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "sizes"]
        for f in flags:
            kind: Any = {"int": int, "float": float, "str": str}[str(f.type)]
            names = ("-c", "--ctx") if f.name == "n_ctx" else ()
            metavar = "|".join(f.metadata.get("choices", ())) or None
            option = typer.Option(*names, "--" + f.name.replace("_", "-"), metavar=metavar, help=f.metadata["help"])
            annotation = Annotated[kind, option]
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=annotation)
            )
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        del wrapper.__wrapped__
        return wrapper

    return wrap


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
