"""The benchmark of streaming on simulated GPUs: it checks before it times, its sums are right, its timelines show what
ran, and it refuses nonsense. Processes of their own: options of streaming and of the simulated GPU hold for a process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_moe_ext import PluginError, register
from hybrid_moe_ext.bench import stream, stream_result, trace_png
from hybrid_moe_ext.bench.graph import Shape
from hybrid_moe_ext.bench.stream import SHAPES, shape_named
from hybrid_moe_ext.bench.stream_chain import random_batch
from hybrid_moe_ext.bench.stream_experts import StreamExperts
from hybrid_moe_ext.bench.stream_ggml import gpu_devices
from hybrid_moe_ext.bench.stream_link import Link
from hybrid_moe_ext.bench.stream_peer import neighbours
from hybrid_moe_ext.bench.stream_report import DeviceUse, Rates, threshold
from hybrid_moe_ext.bench.trace import busy_share, read_trace, window
from hybrid_moe_ext.cli import run as command_line
from hybrid_moe_ext.options import Options

COMMAND = [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()", "bench", "stream"]
N_TOKENS, N_LAYERS, N_EXPERT, N_USED = 96, 2, 16, 4
SMALL = ("--shape", f"256,256,{N_EXPERT},{N_USED}", "--tokens", N_TOKENS, "--layers", N_LAYERS, "--rounds", 1, "-t", 1,
         "--memory-mib", 2, "--slp", "on", "--cpu-help", "off")  # fmt: skip


def call(simgpu: Path, folder: Path, *arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    environment |= {f"SIMGPU_{name}": str(value) for name, value in variables.items()}
    environment["XDG_CACHE_HOME"] = str(folder)
    command = [*COMMAND, "--backend", simgpu, *SMALL, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment)


def measured(simgpu: Path, folder: Path, *arguments: object, **variables: object) -> dict[str, Any]:
    done = call(simgpu, folder, *arguments, "--json", **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"][0]


@pytest.fixture(scope="module")
def whole(simgpu, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """A run with everything: two devices that really compute, both peers, the CPU, a trace and its drawing."""
    folder = tmp_path_factory.mktemp("whole")
    files = ("--trace", folder / "trace.json", "--plot", folder / "plot.html", "--plot-layers", N_LAYERS)
    return measured(simgpu, folder, *files, DEVICES=2), folder


def test_it_checks_streams_and_counts(whole):
    x, _ = whole
    assert x["where"] == "devices" and x["troubles"] == []
    for engine in ("streaming", "copy-then-compute (pinned)", "copy-then-compute (pageable)"):
        assert engine in x["check"]
    assert {d["name"] for d in x["devices"]} == {"SimGPU0", "SimGPU1"}
    used = np.mean(
        [
            len(np.unique(ids))
            for ids in random_batch(Shape(256, 256, N_EXPERT, N_USED), N_LAYERS, N_TOKENS, "uniform").ids
        ]
    )
    assert sum(d["n_rows"] for d in x["devices"]) == N_TOKENS * N_USED
    assert sum(d["n_experts"] for d in x["devices"]) == pytest.approx(used)
    # Each is copied once, but for what is there already at the beginning and for what is fetched ahead at the end.
    n_copied = sum(d["n_copied"] - d["n_wasted"] for d in x["devices"])
    assert abs(n_copied - used) * (N_LAYERS + 1) <= N_EXPERT
    assert x["expert_bytes"] == 3 * 256 * 256 * 34 // 32
    assert x["in_bytes"] == x["out_bytes"] == 2 * N_TOKENS * 256 * 4  # to both devices and from both
    assert x["cpu_experts"] == 0


def test_its_ratios_are_of_its_own_figures(whole):
    x, _ = whole
    assert x["best_ms"] <= x["ms"] <= x["worst_ms"]
    assert x["ratio"] == pytest.approx(x["ms"] / x["bound_ms"]) and x["bound_ms"] >= max(x["copy_ms"], x["compute_ms"])
    assert 0 <= x["hidden"] <= 1 and 0 < x["balance"] <= 1
    assert set(x["vs_peer"]) == {"pinned", "pageable"} and x["vs_peer"]["pinned"] == pytest.approx(
        x["peers"]["pinned"] / x["ms"]
    )
    assert x["vs_cpu"] == pytest.approx(x["cpu_ms"] / x["ms"]) and x["peer_compute_ms"] > 0
    for d in x["devices"]:
        assert d["wall_gbps"] <= d["busy_gbps"] * 1.001 or d["upload_ms"] > x["ms"]
        assert d["ring_bytes"] > 0 and d["batch_bytes"] > 0 and d["host_bytes"] > 0 and d["slots"] >= 2


def test_the_trace_is_drawn(whole):
    _, folder = whole
    part = window(read_trace(folder / "trace.json"), N_LAYERS)
    assert len(part.layers) == N_LAYERS and len(set(part.layers)) == N_LAYERS
    lanes = {(f"SimGPU{i}", lane) for i in range(2) for lane in ("upload", "compute", "result")}
    assert set(part.lanes()) == lanes
    assert all(0 < busy_share(part, *lane) <= 1.001 for lane in lanes)
    html = (folder / "plot.html").read_text()
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    n_spans = len(svg.findall("rect"))
    assert n_spans == len(part.spans) > 2 * N_LAYERS
    assert {text.text.rsplit(" ", 1)[0] for text in svg.findall("text") if "SimGPU" in text.text} == {
        f"{p} {lane}" for p, lane in lanes
    }
    for outside in ("http:", "https:", "<script", "src="):
        assert outside not in html


def test_what_is_not_computed_is_not_timed(simgpu, tmp_path):
    done = call(simgpu, tmp_path, "--peers", "none", "--no-cpu", MODE="copies")
    assert done.returncode == 2
    assert "the layer of streaming is wrong" in done.stderr


def test_one_wrong_expert_is_noticed(monkeypatch):
    """Of the engines' outputs one token differs, none of those that are compared with float64."""
    shape = Shape(64, 64, 8, 2)
    request = stream.StreamRequest(shape, "Q8_0", [64], 1, 0, "uniform", 1, 1, 1, [], False, True, Options())
    batch = random_batch(shape, 1, 64, "uniform")
    y = np.ones((64, 64), np.float32)
    monkeypatch.setattr(stream, "_layer_0", lambda experts, batch, tokens: np.ones((len(tokens), 64)))
    ours = y.copy()
    assert "peer" in stream._check(request, None, batch, {"streaming": lambda: ours, "peer": lambda: y})
    ours[17] *= 1.5
    with pytest.raises(PluginError, match="a token differs from peer"):
        stream._check(request, None, batch, {"streaming": lambda: ours, "peer": lambda: y})
    y[:] = np.nan
    with pytest.raises(PluginError, match="the layer of peer is wrong"):
        stream._check(request, None, batch, {"streaming": lambda: np.ones_like(y), "peer": lambda: y})


def test_a_modelled_device_with_attention_and_experts_that_nobody_wants(simgpu, tmp_path):
    x = measured(
        simgpu, tmp_path, "--unchecked", "--routing", "skewed", "--attention-ms", 5, "--peers", "pinned", "--no-cpu",
        "--type", "FP8", MODE="timing", PINNED_GBPS=0.2, PAGEABLE_GBPS=0.2,
    )  # fmt: skip
    d = x["devices"][0]
    assert x["check"] == "not checked" and x["cpu_ms"] is None and isinstance(x["peers"]["pinned"], float)
    assert x["expert_bytes"] == 3 * 256 * 256 * 2  # FP8 travels as BF16
    assert x["attention_ms"] >= 5 and x["ms"] > x["attention_ms"]
    assert d["n_experts"] == N_EXPERT / 2
    assert d["link_gbps"] == pytest.approx(0.2, rel=0.3)
    # Nobody's experts stay where they are, except those that are fetched ahead for a round that does not come.
    assert d["n_copied"] <= N_EXPERT / 2 * (N_LAYERS + 2) / (N_LAYERS + 1) + 1e-9
    assert x["bound_ms"] >= x["attention_ms"] + x["compute_ms"]


def test_a_small_device_leaves_no_room_for_the_peer(simgpu, tmp_path):
    """One layer that follows itself, one expert per token; the ring takes what the device has."""
    x = measured(simgpu, tmp_path, "--shape", "256,1024,64,1", "--layers", 1, "--no-cpu", MEMORY_MIB=40)
    assert x["where"] == "devices" and "no memory" in x["peers"]["pinned"] and x["vs_peer"] == {}
    assert x["devices"][0]["ring_bytes"] + x["devices"][0]["batch_bytes"] <= 40 << 20


def test_few_tokens_stay_on_the_cpu(simgpu, tmp_path):
    done = call(simgpu, tmp_path, "--tokens", 8, "--peers", "none")
    assert done.returncode == 0, done.stderr
    assert "8 tokens, on CPU" in done.stdout and "CPU alone" in done.stdout and "link" not in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backend", "/nowhere/libggml-x.so"], "--backend /nowhere/libggml-x.so"),
        (["--devices", "SimGPU7"], "there are SimGPU0"),
        (["--devices", "none"], "choose among SimGPU0"),
        (["--type", "Q4_K", "--shape", "256,32,4,2"], "blocks of 256"),
    ],
)
def test_refusals_that_need_the_device(simgpu, tmp_path, arguments, message):
    done = call(simgpu, tmp_path, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "huge"], "deepseek"),
        (["--shape", "256,256,4"], "n_embd,n_ff,n_expert,n_used"),
        (["--shape", "256,256,4,5"], "at most n_expert"),
        (["--tokens", "0"], "from 1"),
        (["--tokens", ""], "--tokens"),
        (["--tokens", "many"], "whole numbers"),
        (["--tokens", "99999999"], "65536"),
        (["--type", "Q9"], "Q8_0"),
        (["--routing", "odd"], "skewed"),
        (["--peers", "stock"], "pageable"),
        (["--plot", "x.pdf"], ".png or .html"),
        (["--plot", "/nowhere/x.html"], "cannot be written"),
        (["--trace", "/nowhere/x.json"], "cannot be written"),
        (["--from-trace", "x.json"], "--plot"),
        (["--layers", "0"], "--layers"),
        (["--attention-ms", "-1"], "--attention-ms"),
        (["--attention-ms", "nan"], "--attention-ms"),
        (["--scale", "nan"], "--scale"),
        (["--scale", "inf"], "--scale"),
        (["--shape", "256,256,99999999,4"], "65536"),
    ],
)
def test_refusals_before_anything_is_measured(arguments, message, monkeypatch, capfd):
    monkeypatch.setattr("hybrid_moe_ext.cli.bench_stream.stream", lambda *_: pytest.fail("measured"))
    assert command_line(["bench", "stream", *arguments]) == 2
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_host_without_a_gpu_is_told_so(capfd):
    if gpu_devices():
        pytest.skip("this host has a GPU device")
    assert command_line(["bench", "stream", "--tokens", "8"]) == 2
    assert "no GPU device to stream to" in capfd.readouterr().err


def test_a_png_without_matplotlib_says_how_to_get_it(monkeypatch, capfd, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command_line(["bench", "stream", "--plot", str(tmp_path / "x.png")]) == 2
    assert trace_png.INSTALL in capfd.readouterr().err


# Traces


def use(name: str, **more: float) -> DeviceUse:
    numbers = {field.name: 0 for field in dataclasses.fields(DeviceUse) if field.name != "name"}
    return DeviceUse(name, **(numbers | more))  # type: ignore[arg-type]


def test_bounds():
    links = {"A": Link("A", 4.0, 2.0, 1, 1, True), "B": Link("B", 1.0, 1.0, 1, 1, True)}
    alone = stream_result.copy_s([use("A", n_experts=10, in_bytes=1e9, out_bytes=1e9)], links, 400_000_000)
    assert alone == pytest.approx(1.0 + 0.25 + 0.5)
    # 5 GB of experts over 4 + 1 GB/s; A also needs 0.75 s for activations, B 2 s: 4 (t - 0.75) + 1 (t - 2) = 5.
    both = [use("A", n_experts=8, in_bytes=1e9, out_bytes=1e9), use("B", n_experts=2, in_bytes=1e9, out_bytes=1e9)]
    assert stream_result.copy_s(both, links, 500_000_000) == pytest.approx(2.0)
    assert stream_result.compute_s(
        [use("A", n_rows=300, compute_s=1.0), use("B", n_rows=100, compute_s=1.0)]
    ) == pytest.approx(1.0)
    assert stream_result.compute_s(
        [use("A", n_rows=300, compute_s=1.0), use("B", n_rows=100, compute_s=2.0)]
    ) == pytest.approx(400 / 350)
    assert stream_result.bound_s(10, 3, 2, ring=5) == 10
    assert stream_result.bound_s(10, 3, 2, ring=0.5) == pytest.approx(11.5)
    assert stream_result.bound_s(10, 9, 4, ring=5) == 13
    assert stream_result.hidden_share([use("A", upload_s=4, starved_s=1)]) == pytest.approx(0.75)
    assert stream_result.hidden_share([use("A", upload_s=1, starved_s=3)]) == 0
    assert stream_result.balance(
        [use("A", upload_s=4, compute_s=1), use("B", upload_s=1, compute_s=2)]
    ) == pytest.approx(0.75)


def test_the_threshold_is_where_the_devices_become_faster():
    shape = Shape(1000, 1000, 64, 8)
    # The CPU: 1 ms per row; devices: the 64 experts take 640 ms on the link, and computing is nothing.
    rates = Rates(0.0, 1e-3, [1e-8], [1e-9])
    n = threshold(rates, shape, 1_000_000, None)
    assert n is not None and n * 8e-3 == pytest.approx(0.64, rel=0.05)
    two = threshold(Rates(0.0, 1e-3, [1e-8, 1e-8], [1e-9, 1e-9]), shape, 1_000_000, None)
    assert two == 64  # half of the time, and below 64 tokens nobody is asked
    # Together both are faster before the devices alone are: half of the experts each, when each would take 640 ms.
    helped = threshold(rates, shape, 1_000_000, 1.0)
    assert helped == 64
    slow = Rates(0.0, 1e-4, [1e-7], [1e-9])  # 6.4 s of copies; the CPU: 0.8 ms per token
    alone, helped = (threshold(slow, Shape(100, 1000, 64, 8), 1_000_000, s) for s in (None, 2.0))
    assert helped is not None and alone is not None and 64 < helped < alone
    assert threshold(Rates(0.0, 1e-9, [1e-8], [1e-6]), shape, 1_000_000, None) is None


def test_neighbours_are_copied_together_and_unused_experts_are_not():
    assert neighbours(np.array([[3, 4], [5, 9], [0, 4]], np.int32)) == [(0, 0), (3, 5), (9, 9)]
    assert neighbours(np.array([[7]], np.int32)) == [(7, 7)]


def test_skewed_routing():
    batch = random_batch(Shape(64, 64, 32, 4), 1, 64, "skewed")
    ids = batch.ids[0]
    assert ids.max() < 16 and (ids == 0).any(1).sum() == 32
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_scale_keeps_what_a_layer_is():
    scaled, full = shape_named("deepseek", 28), SHAPES["deepseek"]
    assert scaled == Shape(256, full.n_ff, full.n_expert, full.n_used)
    assert shape_named("100,200,8,2", 1) == Shape(100, 200, 8, 2)


@pytest.mark.parametrize("kind", ["Q8_0", "FP8", "Q4_K"])
def test_experts_have_addresses_of_their_own_in_little_memory(kind):
    register()
    shape = Shape(256, 512, 32, 4)
    experts = StreamExperts(shape, kind, n_layers=3, memory_bytes=1 << 20)
    try:
        assert experts.n_bytes < 2 << 20 < 3 * 32 * 3 * 256 * 512 // 2
        values = experts.values(2, "down", 31)
        assert values.shape == (256, 512) and np.isfinite(values).all() and values.std() > 0
        if kind != "FP8":
            addresses = [experts.address(i, name) for i in range(3) for name in shape.weights()]
            assert sorted(set(addresses)) == addresses
    finally:
        experts.close()
