"""A window of a trace as a picture, by matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path

from ..errors import OptionError
from .trace import Window, busy_share
from .trace_svg import colours_of, is_pale

INSTALL = "pip install 'hybrid-moe-ext[bench]'"


def check_installed() -> None:
    """Before minutes of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"a .png needs matplotlib, which is not installed: {INSTALL}, or choose a .html, which needs nothing"
        ) from error


def write_png(window: Window, title: str, path: Path) -> None:
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes, colours = window.lanes(), colours_of(window)
    figure = Figure(figsize=(14, 1.6 + 0.45 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for i, (process, lane) in enumerate(lanes):
        spans = [s for s in window.spans if (s.process, s.lane) == (process, lane)]
        axes.broken_barh(
            [((s.begin - window.begin) * 1e3, (s.end - s.begin) * 1e3) for s in spans], (-i - 0.4, 0.8),
            facecolors=[(colours[s.layer], 0.5 if is_pale(s) else 1.0) for s in spans], edgecolor="white", linewidth=0.2,
        )  # fmt: skip
    axes.set_yticks(
        [-i for i in range(len(lanes))], [f"{p} {lane} {busy_share(window, p, lane):.0%}" for p, lane in lanes]
    )
    axes.set_xlim(0, (window.end - window.begin) * 1e3)
    axes.set_xlabel("ms; pale: activations, and experts that arrive before their layer begins")
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(
        handles=[Patch(color=colour, label=layer) for layer, colour in colours.items()],
        loc="outside lower center", ncols=4, fontsize=8, frameon=False,
    )  # fmt: skip
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
