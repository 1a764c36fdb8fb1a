"""The real engine on simulated stages, by the oracle: python tests/engine_schedule.py [--attention-us 350] [--experts-us 450].

A GPU that charges time for attention and a CPU stage that charges it for experts (tests/simgpu, SIMGPU_EXPERTS; neither computes
anything), the engine with one batch, with two, and as it chooses itself. Times are multiplied by --scale, so that the host's own
(wake-ups of 40 to 60 us, several per layer) are small beside them. No tests: run by hand, on a quiet machine; docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from engine_oracle import Stages, stages
from simgpu.build import build_in
from tiny_families import tiny, write_model

SIZES = (1, 2, 4, 6)
N_LAYERS, N_USED = 6, 8
N_TOKENS = 24  # per sequence
N_WARM = 3  # steps of a lane that are not counted
SHAPE = replace(tiny("qwen3-30b"), n_layer=N_LAYERS, n_expert=256, n_used=N_USED, n_ff_expert=32)
EXPERT_BYTES = 3 * SHAPE.n_ff_expert * SHAPE.n_embd * 4


def environment(launch_us: float, experts_us: float) -> dict[str, str]:
    """Nothing takes time but launches on the GPU and reading experts on the CPU."""
    gbps = N_USED * EXPERT_BYTES / (experts_us * 1e3)
    fast = {
        "TFLOPS": 1e6,
        "MEMORY_GBPS": 1e6,
        "PINNED_GBPS": 1e6,
        "PAGEABLE_GBPS": 1e6,
        "LATENCY_US": 0,
        "CPU_TFLOPS": 1e6,
    }
    sim = {"MODE": "timing", "EXPERTS": 1, "MEMORY_MIB": 8192, "LAUNCH_US": launch_us, "CPU_GBPS": gbps, **fast}
    return {name: v for name, v in os.environ.items() if not name.startswith(("SIMGPU_", "HYBRID_MOE_SLP"))} | {
        f"SIMGPU_{name}": str(value) for name, value in sim.items()
    }


# --- one process per setting


def rates(reports: list[tuple[float, Any]], n: int) -> float:
    """Tokens per second while all n sequences decode: per lane between two of its steps, and added up."""
    whole = [i for i, (_, r) in enumerate(reports) if r.chunks]
    steady = [(t, r) for t, r in reports[whole[-1] + 1 if whole else 0 :] if r.decoding]
    sum_of_lanes, n_seen = 0.0, 0
    lanes = sorted({r.lane for _, r in steady})
    most = {lane: max(len(r.decoding) for _, r in steady if r.lane == lane) for lane in lanes}
    end = min(max(t for t, r in steady if r.lane == lane and len(r.decoding) == most[lane]) for lane in lanes)
    for lane in lanes:
        times = [t for t, r in steady if r.lane == lane and len(r.decoding) == most[lane] and t <= end][N_WARM:]
        sum_of_lanes += most[lane] * (len(times) - 1) / (times[-1] - times[0])
        n_seen += most[lane]
    assert n_seen == n, f"{n_seen} of {n} sequences decoded at a time"
    return sum_of_lanes


def child(library: str, model: str, dual: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "simgpu"))
    import host

    assert host.load(library.encode()), "the simulated GPU did not load"
    from engine_solo import greedy
    from hybrid_moe_ext.engine import Engine

    reports: list[tuple[float, Any]] = []
    sizes = {"n_ctx": 1024, "n_parallel": max(SIZES), "n_kept": 0, "n_batch": 64, "prefill_from": 10**6, "n_threads": 1}
    began = time.monotonic()
    with Engine(
        model,
        dual_batch=dual,
        on_step=lambda r: reports.append((time.monotonic(), r)),
        tpot_ms=1e6,
        ttft_s=1e6,
        slp="auto",
        **sizes,
    ) as e:
        told: dict[str, Any] = {"started_s": time.monotonic() - began, "dual": str(e.dual_batch)}
        e.submit(greedy([5], 2)).result(100)
        host.reset_stats()
        e.submit(greedy([5], 2)).result(100)  # two steps
        books = host.stats()
        told["n_ops"] = books["devices"][0]["compute"]["n"] / 2
        told["experts_us"] = books["cpu"]["modelled_ns"] / books["cpu"]["n"] / 1e3
        for n in SIZES:
            reports.clear()
            for stream in [e.submit(greedy([5, 6, 7 + i], N_TOKENS)) for i in range(n)]:
                stream.result(100)
            told[str(n)] = rates(reports, n)
    print(json.dumps(told))


def run(under: list[str], library: Path, model: Path, dual: str, launch_us: float, experts_us: float) -> dict[str, Any]:
    done = subprocess.run(
        [*under, sys.executable, __file__, "--child", library, model, dual],
        env=environment(launch_us, experts_us),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# --- the table


def table(oracle: Stages, told: dict[str, dict[str, float]], scale: float) -> list[str]:
    """Tokens per second as without the scale, and the share of the oracle's that was reached."""
    alone = told["off"]["1"] * scale
    lines = [
        "| sequences | one batch (of the oracle's) | two batches | gain over one sequence | auto |",
        "|---|---|---|---|---|",
    ]
    for n in SIZES:
        one, two, auto = (told[dual][str(n)] * scale for dual in ("off", "on", "auto"))
        dual = f"{two:.1f} ({two / oracle.dual(n):.3f})" if n > 1 else f"{two:.1f}"
        lines.append(
            f"| {n} | {one:.1f} ({one / oracle.single(n):.3f}) | {dual} | {one / alone:.2f}x, {two / alone:.2f}x "
            f"| {auto:.1f} ({auto / oracle.best(n):.3f} of the best) |"
        )
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--attention-us", type=float, default=350.0, help="per layer")
    arguments.add_argument("--experts-us", type=float, default=450.0, help="per layer, for one sequence")
    arguments.add_argument("--n-expert", type=int, default=SHAPE.n_expert, help=f"of which a token chooses {N_USED}")
    arguments.add_argument("--scale", type=float, default=20.0, help="factor on all times")
    arguments.add_argument("--rounds", type=int, default=3, help="medians of so many; the settings take turns")
    arguments.add_argument("--under", default="", help="a command to run each process under, such as 'chrt -f 2'")
    arguments.add_argument("--library", type=Path, help="libggml-simgpu.so; built when it is left out")
    a = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = a.library or build_in(Path(folder))
        model = write_model(Path(folder) / "model.gguf", replace(SHAPE, n_expert=a.n_expert))
        start = partial(run, a.under.split(), library, model)
        launch_us = a.attention_us * a.scale * N_LAYERS / start("off", 1.0, 100.0)["n_ops"]
        rounds = [
            {d: start(d, launch_us, a.experts_us * a.scale) for d in ("off", "on", "auto")} for _ in range(a.rounds)
        ]
    told = {dual: {str(n): median(r[dual][str(n)] for r in rounds) for n in SIZES} for dual in rounds[0]}
    oracle = stages(a.attention_us, a.experts_us, N_LAYERS, a.n_expert, N_USED)
    us = f"attention {a.attention_us:.0f} us, experts {a.experts_us:.0f} us per layer, {a.n_expert} experts"
    print(f"{us}, {N_LAYERS} layers, times x{a.scale:.0f}", *table(oracle, told, a.scale), sep="\n")
    for r in rounds:
        print(
            f"{r['auto']['dual']}; {r['auto']['started_s']:.1f} s to start, with one batch {r['off']['started_s']:.1f} s"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
