"""Reads the trace that HYBRID_MOE_TRACE writes: spans of time in lanes, also when its process was killed in the middle.
Drawing them is trace_svg.py's and trace_png.py's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError

LANES = ("upload", "compute", "result", "experts")  # from top to bottom
CPU = "CPU"


@dataclass(frozen=True)
class Span:
    """Times in seconds on one clock."""

    process: str  # "CUDA0", "CPU"
    lane: str
    name: str  # "expert", "expert ahead", "inputs", "result", "share"
    begin: float
    end: float
    layer: str  # name of its weights
    expert: int | None
    n_rows: int
    n_bytes: int


@dataclass(frozen=True)
class Window:
    """Some layers in a row."""

    begin: float
    end: float
    layers: list[str]
    spans: list[Span]  # that touch it, with parts outside cut off

    def lanes(self) -> list[tuple[str, str]]:
        """(process, lane) that there is something in, devices first."""
        used = {(s.process, s.lane) for s in self.spans}
        return sorted(used, key=lambda key: (key[0] == CPU, key[0], LANES.index(key[1])))


def read_trace(path: Path) -> list[Span]:
    """By begin. Raises OptionError for what is no trace of the plug-in's."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise OptionError(
            f"{path} cannot be read ({error.strerror}): give a file that HYBRID_MOE_TRACE named"
        ) from error
    names: dict[tuple[int, int | None], str] = {}
    spans = []
    for event in _events(text, path):
        if event.get("ph") == "M":
            is_process = event.get("name") == "process_name"
            names[event["pid"], None if is_process else event["tid"]] = str(event.get("args", {}).get("name", ""))
        elif event.get("ph") == "X" and "layer" in event.get("args", {}):
            spans.append(_span(event, names))
    spans = [s for s in spans if s.lane in LANES]
    if not spans:
        raise OptionError(
            f"{path} has no spans of streamed layers: nothing was streamed while it was written, or it is another program's "
            "trace; give a file that HYBRID_MOE_TRACE named"
        )
    return sorted(spans, key=lambda s: s.begin)


def _events(text: str, path: Path) -> list[dict[str, Any]]:
    """Whole, or line by line: a killed process leaves no end, and perhaps half a line."""
    no_trace = f"{path} is no trace: it is not a JSON array of events, as HYBRID_MOE_TRACE writes it"
    if not text.lstrip().startswith(("[", "{")):
        raise OptionError(no_trace)
    try:
        whole = json.loads(text)
        events = whole.get("traceEvents") if isinstance(whole, dict) else whole
    except ValueError:
        lines = [line.strip().rstrip(",") for line in text.lstrip().removeprefix("[").splitlines()]
        lines = [line for line in lines if line]
        events = []
        for i, line in enumerate(lines):
            try:
                events.append(json.loads(line))
            except ValueError as error:
                if i < len(lines) - 1:
                    raise OptionError(f"{no_trace} (line {i + 2})") from error
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise OptionError(no_trace)
    return events


def _span(event: dict[str, Any], names: dict[tuple[int, int | None], str]) -> Span:
    args = event["args"]
    pid, tid, begin = event.get("pid", 0), event.get("tid", 0), float(event.get("ts", 0)) * 1e-6
    lane, name = names.get((pid, tid), ""), str(event.get("name", ""))
    return Span(
        names.get((pid, None), str(pid)), "result" if name == "result" else lane, name, begin,
        begin + float(event.get("dur", 0)) * 1e-6, str(args["layer"]), args.get("expert"),
        int(args.get("rows", 0)), int(args.get("bytes", 0)),
    )  # fmt: skip


def passes_of(spans: list[Span]) -> list[tuple[str, float, float]]:
    """Each time a layer ran: its name, from its inputs or first computation to its last result."""
    passes: list[tuple[str, float, float]] = []
    began: set[str] = (
        set()
    )  # devices that have their inputs of the last of them: with the next ones another pass begins
    for s in spans:
        if s.name == "expert ahead" or (s.lane == "upload" and s.name != "inputs"):
            continue
        is_again = s.name == "inputs" and s.process in began
        if passes and passes[-1][0] == s.layer and not is_again:
            passes[-1] = (s.layer, passes[-1][1], max(passes[-1][2], s.end))
        else:
            passes.append((s.layer, s.begin, s.end))
            began.clear()
        if s.name == "inputs":
            began.add(s.process)
    return passes


def window(spans: list[Span], n_layers: int) -> Window:
    """The last n_layers that ran to their end; fewer where there are fewer."""
    results = [s.end for s in spans if s.lane == "result"]
    whole = [p for p in passes_of(spans) if not results or p[2] <= max(results)]
    chosen = (whole or passes_of(spans))[-n_layers:]
    begin, end = chosen[0][1], max(p[2] for p in chosen)
    cut = [
        Span(s.process, s.lane, s.name, max(s.begin, begin), min(s.end, end), s.layer, s.expert, s.n_rows, s.n_bytes)
        for s in spans
        if s.end > begin and s.begin < end
    ]
    return Window(begin, end, [p[0] for p in chosen], cut)


def busy_share(window: Window, process: str, lane: str) -> float:
    """Of the window's time; spans of a lane do not overlap."""
    busy = sum(s.end - s.begin for s in window.spans if (s.process, s.lane) == (process, lane))
    return busy / (window.end - window.begin) if window.end > window.begin else 0.0
