"""Times a whole model with and without the plug-in: a prompt in one pass, and single tokens. Each host is a process, both
live through the run and take turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..errors import OptionError, PluginError
from ..options import Options
from .child import Child
from .layer import OURS, STOCK
from .model_file import ModelShape, model_file

N_PROMPT, N_GENERATED = 512, 64
# NMSE of a prompt's last logits. Both round, and a rounding may send a token to another expert: 1e-4 (Q8_0), 8e-6 (BF16).
TOLERANCE = 0.05


@dataclass(frozen=True)
class ModelResult:
    kind: str
    engine: str  # "hybrid-moe": llama.cpp with the plug-in; "llama.cpp": without
    test: str  # "pp512", "tg64"
    seconds: float  # median
    tokens_per_s: float


def bench_model(
    kinds: list[str],
    n_threads: int,
    rounds: int,
    options: Options,
    folder: Path | None = None,
    shape: ModelShape | None = None,
) -> Iterator[ModelResult]:
    """Yields results as they come. Models are kept in `folder`, or in a temporary one while they are used."""
    for kind in kinds:
        if kind not in OURS:
            raise OptionError(f"unknown type {kind!r}: choose among {', '.join(OURS)}")
    for kind in kinds:
        with TemporaryDirectory(prefix="hybrid-moe-bench-") as temporary:
            path = model_file(folder or Path(temporary), kind, shape or ModelShape())
            yield from _bench_file(path, kind, n_threads, rounds, options, Path(temporary))


def _bench_file(
    path: Path, kind: str, n_threads: int, rounds: int, options: Options, folder: Path
) -> Iterator[ModelResult]:
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for engine, which in (("hybrid-moe", "plugin"), ("llama.cpp", "stock")):
            if which == "plugin" or kind in STOCK:  # stock has no FP8
                arguments = [path, which, n_threads, N_PROMPT, N_GENERATED]
                module = f"{__package__}.model_child"
                children[engine] = Child(module, arguments, options, f"the host ({which})")
                stack.callback(children[engine].close)
        _check(kind, children, folder)
        seconds: dict[tuple[str, str], list[float]] = {}
        for i in range(rounds + 1):
            for test in ("pp", "tg"):
                for engine, child in children.items():
                    took = child.ask(test)["seconds"]
                    if i > 0:  # the first round warms up
                        seconds.setdefault((engine, test), []).append(took)
    for (engine, test), times in seconds.items():
        n = N_PROMPT if test == "pp" else N_GENERATED
        median = statistics.median(times)
        yield ModelResult(kind, engine, f"{test}{n}", median, n / median)


def _check(kind: str, children: dict[str, Child], folder: Path) -> None:
    """The plug-in runs the layers, stock does not know it, and they agree."""
    logits = {}
    for engine, child in children.items():
        told = child.ask(f"check {folder / engine}.npy")
        if (told["layers"] > 0) != (engine == "hybrid-moe"):
            raise PluginError(f"{kind}: {engine} ran {told['layers']} layers on the plug-in, which is the wrong host")
        logits[engine] = np.load(folder / f"{engine}.npy").astype(np.float64)
        if not np.isfinite(logits[engine]).all():
            raise PluginError(f"{kind}: {engine} gives logits that are not finite, no use timing it")
    if len(logits) == 2:
        ours, stock = logits["hybrid-moe"], logits["llama.cpp"]
        nmse = float(((ours - stock) ** 2).sum() / (stock**2).sum())
        if not nmse <= TOLERANCE:
            raise PluginError(f"{kind}: logits differ from llama.cpp's own by an NMSE of {nmse:.1e}, no use timing it")
