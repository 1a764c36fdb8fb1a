"""Traces of streaming: read, cut to layers, drawn, also when the process was killed or the file is of something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_moe_ext import OptionError
from hybrid_moe_ext.bench.trace import Span, busy_share, passes_of, read_trace, window
from hybrid_moe_ext.cli import run as command_line


def write_trace(path: Path, cut: int = 0) -> Path:
    """Two layers on one device, the second one's experts partly ahead; `cut` characters are missing at the end."""
    lines = ["["]
    for pid, name in ((1, "GPU0"), (2, "CPU")):
        lines.append(
            json.dumps({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}) + ","
        )
    for pid, tid, name in ((1, 1, "upload"), (1, 2, "compute"), (2, 3, "experts")):
        lines.append(
            json.dumps({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}) + ","
        )

    def span(tid: int, name: str, begin_ms: float, ms: float, layer: str, **more: int) -> None:
        event = {
            "ph": "X",
            "name": name,
            "pid": 2 if tid == 3 else 1,
            "tid": tid,
            "ts": begin_ms * 1e3,
            "dur": ms * 1e3,
        }
        lines.append(json.dumps(event | {"args": {"layer": layer, "rows": 1, "bytes": 10} | more}) + ",")

    for i, layer in enumerate(("blk.0", "blk.1")):
        t = 100.0 * i
        span(1, "inputs", t, 10, layer)
        span(1, "expert", t + 10, 20, layer, expert=3)
        span(2, "expert", t + 30, 30, layer, expert=3)
        span(2, "result", t + 60, 10, layer)
        span(3, "share", t, 35, layer)
        span(1, "expert ahead", t + 40, 20, f"blk.{i + 1}", expert=5)
    lines.append(json.dumps({"ph": "i", "name": "end", "pid": 0, "tid": 0, "s": "g", "ts": 1e6}) + "]")
    text = "\n".join(lines)
    path.write_text(text[: len(text) - cut] if cut else text + "\n")
    return path


def test_a_trace_is_read_and_cut_to_its_last_layers(tmp_path):
    spans = read_trace(write_trace(tmp_path / "t.json"))
    assert [(name, round(b * 1e3), round(e * 1e3)) for name, b, e in passes_of(spans)] == [
        ("blk.0", 0, 70),
        ("blk.1", 100, 170),
    ]
    one = window(spans, 1)
    assert one.layers == ["blk.1"] and one.lanes() == [
        ("GPU0", "upload"),
        ("GPU0", "compute"),
        ("GPU0", "result"),
        ("CPU", "experts"),
    ]
    assert busy_share(one, "GPU0", "upload") == pytest.approx(50 / 70)
    assert busy_share(one, "GPU0", "compute") == pytest.approx(30 / 70)
    both = window(spans, 5)
    assert both.layers == ["blk.0", "blk.1"] and both.begin == 0 and both.end == pytest.approx(0.17)
    assert len(both.spans) == len(spans)


def test_devices_that_begin_late_are_of_the_same_pass():
    def inputs(device: int, begin: float, layer: str = "blk.0") -> Span:
        return Span(f"GPU{device}", "upload", "inputs", begin, begin + 1, layer, None, 64, 100)

    spans = [inputs(0, 0), inputs(1, 5), inputs(0, 10), inputs(1, 11), inputs(0, 20, "blk.1"), inputs(0, 30)]
    assert passes_of(spans) == [("blk.0", 0, 6), ("blk.0", 10, 12), ("blk.1", 20, 21), ("blk.0", 30, 31)]


@pytest.mark.parametrize("cut", range(1, 190, 7))
def test_a_killed_process_leaves_a_trace_that_is_read(cut, tmp_path):
    spans = read_trace(write_trace(tmp_path / "t.json", cut))
    assert len(spans) >= 10 and window(spans, 2).layers[0] == "blk.0"


def test_the_object_form_of_a_chrome_trace_is_read(tmp_path):
    events = json.loads(write_trace(tmp_path / "t.json").read_text())
    (tmp_path / "o.json").write_text(json.dumps({"traceEvents": events}))
    assert len(read_trace(tmp_path / "o.json")) == 12


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no trace"),
        ("[\n", "no spans"),
        ("[]", "no spans"),
        ("hello", "no trace"),
        ("{}", "no trace"),
        ('{"traceEvents": 3}', "no trace"),
        ("[1, 2]", "no trace"),
        ("[\nhello\n{}\n", "line 2"),
        (
            '[{"ph": "X", "name": "main", "pid": 1, "tid": 1, "ts": 0, "dur": 3, "args": {"file": "a.c"}}]',
            "another program",
        ),
    ],
)
def test_what_is_no_trace_of_ours_is_refused(text, message, tmp_path, capfd):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(OptionError, match=message):
        read_trace(tmp_path / "t.json")
    arguments = ["--from-trace", str(tmp_path / "t.json"), "--plot", str(tmp_path / "x.html")]
    assert command_line(["bench", "stream", *arguments]) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "x.html").exists()


def test_a_trace_is_drawn_without_measuring(tmp_path, capfd):
    trace, plot = write_trace(tmp_path / "t.json", cut=60), tmp_path / "x.html"
    assert command_line(["bench", "stream", "--from-trace", str(trace), "--plot", str(plot)]) == 0
    assert "2 layers" in capfd.readouterr().err
    assert "GPU0 expert 3, blk.1, 30.000 ms" in plot.read_text()


def test_a_png_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "x.png"
    assert (
        command_line(["bench", "stream", "--from-trace", str(write_trace(tmp_path / "t.json")), "--plot", str(plot)])
        == 0
    )
    assert plot.read_bytes().startswith(b"\x89PNG")


# Arithmetic
