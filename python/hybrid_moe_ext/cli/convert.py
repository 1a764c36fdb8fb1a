"""`hybrid-moe convert`: the progress bar and the report around hybrid_moe_ext.convert."""

from __future__ import annotations

import time
from pathlib import Path

from ..checkpoint.trailer import VERSION_KEY
from ..convert import convert, parse_size
from ..info import read_gguf_header
from .signals import termination_as_interrupt
from .terminal import note, progress_bar, write

FP8_NOTE = (
    "experts are FP8: this file runs only where hybrid-moe-ext is loaded; another llama.cpp opens it and crashes before"
    " the first token (a tool that rewrites GGUF files drops the scales)"
)


def run(directory: str, out: Path, dense_type: str, split_max_size: str | None, force: bool) -> None:
    limit = None if split_max_size is None else parse_size(split_max_size)
    started = time.perf_counter()
    with progress_bar("converting") as progress, termination_as_interrupt():
        paths = convert(directory, out, dense_type, limit, force, progress)
    seconds = time.perf_counter() - started
    for path in paths:
        write(f"{path}\n")
    n_bytes = sum(path.stat().st_size for path in paths)
    note(f"{n_bytes / 1e9:.2f} GB in {seconds:.1f} s, {n_bytes / 1e9 / seconds:.2f} GB/s")
    if VERSION_KEY in read_gguf_header(paths[0]).fields:
        note(FP8_NOTE)
