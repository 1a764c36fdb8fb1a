"""A window of a trace as an HTML file of its own: one SVG, no scripts, nothing to fetch."""

from __future__ import annotations

import html
from pathlib import Path

from .trace import Span, Window, busy_share

WIDTH, LANE, GAP, LEFT, TOP = 1400, 26, 8, 150, 34
COLOURS = ("#3b6fb6", "#d9822b", "#4d9a4d", "#a34fa3", "#8a6d3b", "#c04a4a")  # per layer, in turn
STYLE = "body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}text{font:12px system-ui,sans-serif;fill:#444}"


def colours_of(window: Window) -> dict[str, str]:
    layers = list(dict.fromkeys([*window.layers, *(s.layer for s in window.spans)]))
    return {layer: COLOURS[i % len(COLOURS)] for i, layer in enumerate(layers)}


def is_pale(span: Span) -> bool:
    """Ahead of its layer; neither activations nor results are experts."""
    return span.name in ("expert ahead", "inputs")


def describe(span: Span) -> str:
    what = span.name if span.expert is None else f"{span.name} {span.expert}"
    parts = [f"{span.process} {what}", span.layer, f"{(span.end - span.begin) * 1e3:.3f} ms"]
    if span.n_rows:
        parts.append(f"{span.n_rows} {'experts' if span.name == 'share' else 'rows'}")
    if span.n_bytes and span.name != "inputs":
        parts.append(f"{span.n_bytes / 1e6:.2f} MB")
    return ", ".join(parts)


def tick_ms(span_ms: float) -> float:
    """A round distance that gives 5 to 12 ticks."""
    tick = 10.0**-3
    while True:
        for factor in (1, 2, 5):
            if span_ms / (tick * factor) <= 12:
                return tick * factor
        tick *= 10


def html_of(window: Window, title: str) -> str:
    colours, lanes = colours_of(window), window.lanes()
    seconds = max(window.end - window.begin, 1e-9)
    scale = (WIDTH - LEFT - 10) / seconds
    rows = {lane: TOP + i * (LANE + GAP) for i, lane in enumerate(lanes)}
    bottom = TOP + len(lanes) * (LANE + GAP)
    out = [f'<svg viewBox="0 0 {WIDTH} {bottom + 24}" width="{WIDTH}" role="img" aria-label="{html.escape(title)}">']
    tick = tick_ms(seconds * 1e3) * 1e-3
    for i in range(int(seconds / tick) + 1):
        x = LEFT + i * tick * scale
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{i * tick * 1e3:g} ms</text>')
    for (process, lane), y in rows.items():
        share = busy_share(window, process, lane)
        out.append(f'<text x="0" y="{y + LANE - 8}">{html.escape(process)} {lane} {share:.0%}</text>')
    for s in window.spans:
        x, width = LEFT + (s.begin - window.begin) * scale, max((s.end - s.begin) * scale, 0.3)
        opacity = 0.5 if is_pale(s) else 1
        out.append(
            f'<rect x="{x:.2f}" y="{rows[s.process, s.lane]}" width="{width:.2f}" height="{LANE}" fill="{colours[s.layer]}" '
            f'fill-opacity="{opacity}" stroke="#fff" stroke-width=".3">'
            f"<title>{html.escape(describe(s))}</title></rect>"
        )
    out.append("</svg>")
    legend = "".join(
        f'<span style="color:{colour}">&#9632;</span> {html.escape(layer)} &nbsp; ' for layer, colour in colours.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
        f"<h3>{html.escape(title)}</h3><p>{legend}</p><p>Pale: activations, and experts that arrive before their layer begins. "
        "Percentages: share of the time that a lane was busy. Point at a bar for what it is.</p>"
        + "\n".join(out)
        + "</html>\n"
    )


def write_html(window: Window, title: str, path: Path) -> None:
    path.write_text(html_of(window, title), "utf-8")
