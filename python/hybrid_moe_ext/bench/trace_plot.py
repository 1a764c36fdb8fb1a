"""Draws some layers of a trace to a .png or .html."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import OptionError
from .trace import Window, read_trace, window
from .trace_png import check_installed, write_png
from .trace_svg import write_html

WRITERS: dict[str, Callable[[Window, str, Path], None]] = {".png": write_png, ".html": write_html}


def check_plot(path: Path) -> None:
    """That it can be written, before anything is measured for it. Raises OptionError."""
    if path.suffix.lower() not in WRITERS:
        raise OptionError(f"--plot {path}: the name ends in .png or .html, which says what is written")
    if path.suffix.lower() == ".png":
        check_installed()
    check_writable(path, "--plot")


def check_writable(path: Path, option: str) -> None:
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise OptionError(f"{option} {path} cannot be written ({error.strerror}): choose another file") from error
    if is_new:
        path.unlink()


def plot_trace(trace: Path, out: Path, n_layers: int = 2) -> Window:
    check_plot(out)
    part = window(read_trace(trace), n_layers)
    title = f"{', '.join(dict.fromkeys(part.layers))}: {(part.end - part.begin) * 1e3:.1f} ms ({trace.name})"
    try:
        WRITERS[out.suffix.lower()](part, title, out)
    except OSError as error:
        raise OptionError(f"--plot {out} cannot be written ({error.strerror}): choose another file") from error
    return part
