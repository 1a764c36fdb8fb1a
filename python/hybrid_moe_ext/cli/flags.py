"""Flags that several commands have, and those that come from Options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from ..engine import EngineOptions
from ..options import Options

# Flags that may be given several times, in the singular.
LISTS = {"allow_hosts": "allow_host", "cors_origins": "cors_origin"}
_SHORT = {"n_ctx": ("-c", "--ctx"), "n_threads": ("-t", "--threads")}  # as the other commands call them


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds a flag per field of Options; the command gets them as one dict, `options`."""
    described = Options.describe()

    def wrapper(**given: Any) -> None:
        options = {name: given.pop(name) for name, *_ in described}
        command(**given, options=options)

    added = []
    for name, variable, choices, help_text in described:
        flag = typer.Option("--" + name.replace("_", "-"), metavar="|".join(choices), help=f"{help_text} [{variable}]")
        added.append(_keyword(name, None, Annotated[str | None, flag]))
    return with_flags(wrapper, command, ("options",), added)


def with_engine_options(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a flag per field of EngineOptions; the command gets all of them as one dict, `sizes`."""
    flags = [f for f in fields(EngineOptions) if f.name not in without]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def wrapper(**given: Any) -> None:
            sizes = {f.name: f.default for f in fields(EngineOptions)} | {f.name: given.pop(f.name) for f in flags}
            command(**given, sizes=sizes)

        return with_flags(wrapper, command, ("sizes",), [flag_of(f) for f in flags])

    return wrap


def with_flags(
    wrapper: Callable[..., None], command: Callable[..., None], taken: tuple[str, ...], added: list[inspect.Parameter]
) -> Callable[..., None]:
    """`wrapper` as typer is to see it: with the command's parameters but for `taken`, and with `added`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in taken]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *added)]
    wrapper.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in keywords}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def flag_of(f: Field[Any]) -> inspect.Parameter:
    """Of a field with its help, and perhaps choices, in its metadata."""
    name = LISTS.get(f.name, f.name)
    kind: Any = list[str] | None if f.name in LISTS else {"int": int, "float": float}.get(str(f.type), str)
    option = typer.Option(
        *_SHORT.get(f.name, ()),
        "--" + name.replace("_", "-"),
        metavar="|".join(f.metadata.get("choices", ())) or None,
        help=f.metadata["help"],
    )
    return _keyword(name, None if f.name in LISTS else f.default, Annotated[kind, option])


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
