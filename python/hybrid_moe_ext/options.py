"""The options of this package, once: fields, allowed values, environment names and help. Parses nothing else."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import OptionError

ENV_PREFIX = "HYBRID_MOE_"


def _option(default: str, choices: tuple[str, ...], help: str, accepts: Callable[[str], bool] | None = None) -> Any:
    """`accepts`: what else than the choices is possible; the last choice then says it in words."""
    return field(default=default, metadata={"choices": choices, "help": help, "accepts": accepts})


def _is_between(low: float, high: float) -> Callable[[str], bool]:
    def accepts(text: str) -> bool:
        try:
            return low <= float(text) <= high
        except ValueError:
            return False

    return accepts


@dataclass(frozen=True)
class Options:
    """What can be chosen. Each field is also an environment variable: HYBRID_MOE_ + its name in capitals."""

    dense_type: str = _option(
        "bf16", ("bf16", "q8_0", "f32"), "type that a checkpoint's attention and shared weights are loaded as"
    )
    isa: str = _option(
        "auto",
        ("auto", "scalar", "avx2", "avx512", "avx512_vbmi", "avx512_bf16", "avx512_gfni"),
        "instruction set of the kernels; auto: the best that runs here",
    )
    team: str = _option(
        "auto", ("auto", "openmp", "pool"), "what runs the threads; auto: the host's OpenMP when it has one"
    )
    experts_memory: str = _option(
        "mmap",
        ("mmap", "copy", "pinned"),
        "experts are computed from their files (mmap), from a copy in memory, by rows on NUMA nodes, or from memory "
        "that GPU devices copy from at full speed",
    )
    pinned_gib: str = _option(
        "auto", ("auto", "GIB"), "memory that may be pinned for experts; auto or 0: no limit", _is_between(0, 1e6)
    )
    pin: str = _option(
        "auto",
        ("auto", "on", "off"),
        "the pool's threads stay on a CPU each; auto: on their NUMA node, if there are several",
    )

    slp: str = _option(
        "auto",
        ("auto", "on", "off"),
        "long prompts stream experts to GPU devices; auto: where that is measured to be faster, on: from 32 tokens on",
    )
    devices: str = _option(
        "auto",
        ("auto", "none", "NAME,..."),
        "GPU devices that experts are streamed to, such as CUDA0,CUDA1; auto: all",
        lambda text: bool(text.strip(", ")) and all(name.strip() not in ("auto", "none") for name in text.split(",")),
    )
    layer_devices: str = _option(
        "auto",
        ("auto", "NAME,..."),
        "GPU devices that layers without their experts lie on; auto: those that experts are streamed to",
        lambda text: bool(text.strip(", ")) and all(name.strip() not in ("auto", "none") for name in text.split(",")),
    )
    cpu_help: str = _option(
        "auto", ("auto", "off"), "the CPU computes a part of a streamed layer's experts where that ends it sooner"
    )
    vram_share: str = _option(
        "auto",
        ("auto", "0.01 to 1"),
        "share of a device's free memory that streaming takes while it runs; auto: 0.8",
        _is_between(0.01, 1),
    )
    ring_mib: str = _option(
        "auto",
        ("auto", "MIB"),
        "largest ring of experts on a device, two at least; auto or 0: no limit",
        _is_between(0, 1e9),
    )
    copy_threads: str = _option(
        "auto",
        ("auto", "1 to 64"),
        "threads per device that copy or expand what the device cannot read itself; auto: a quarter of the cores, 4 at most",
        _is_between(1, 64),
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices, accepts = getattr(self, f.name), f.metadata["choices"], f.metadata["accepts"]
            if not (value in choices[:-1] or accepts(value) if accepts else value in choices):
                raise OptionError(
                    f"{origin(f.name, value)}={value!r} is not possible: choose one of {', '.join(choices)}"
                )

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @classmethod
    def describe(cls) -> list[tuple[str, str, tuple[str, ...], str]]:
        """(name, environment name, choices, help) per option."""
        return [(f.name, ENV_PREFIX + f.name.upper(), f.metadata["choices"], f.metadata["help"]) for f in fields(cls)]

    @classmethod
    def resolve(cls, environ: Mapping[str, str] | None = None, **given: str | None) -> Options:
        """Given values, else the environment's, else the defaults. Raises OptionError for unknown names and values."""
        environ = os.environ if environ is None else environ
        _check_environment(environ)
        chosen = {}
        for name, env, _, _ in cls.describe():
            value = given.pop(name, None)
            if value is None:
                value = environ.get(env) or None
            if value is not None:
                chosen[name] = value
        if given:
            raise unknown_option(next(iter(given)), cls.names())
        return cls(**chosen)


def origin(name: str, value: str) -> str:
    """How an error calls an option: by its variable when the value stands there."""
    variable = ENV_PREFIX + name.upper()
    return variable if os.environ.get(variable) == value else name


# Variables that are no options of a model: a host newer than tried, another build of the plug-in, which llama.cpp this process
# loads (patched/choice.py), counters at exit, a trace.
_OTHER_VARIABLES = (
    "HYBRID_MOE_UNTESTED_HOST",
    "HYBRID_MOE_LIBRARY",
    "HYBRID_MOE_LLAMA",
    "HYBRID_MOE_STATS",
    "HYBRID_MOE_TRACE",
    "HYBRID_MOE_AVX512_RUNNER",
)


def _check_environment(environ: Mapping[str, str]) -> None:
    known = [env for _, env, _, _ in Options.describe()] + list(_OTHER_VARIABLES)
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise unknown_option(name, known, "environment variable")


def unknown_option(name: str, known: Iterable[str], kind: str = "option") -> OptionError:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return OptionError(f"unknown {kind} {name!r}: {hint}")
