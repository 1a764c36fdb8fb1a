"""Decode beside a long prompt on a simulated machine with the paper's stage times. By hand:

    python tests/engine_two_gpus.py build/simgpu/libggml-simgpu.so [--tokens 32768] [--modes two,one,small,loop]

Per decoded token and layer about 350 us on the GPU and 450 us of experts on the CPU; a layer's experts need 220 ms to cross a
link. The model has DeepSeek's structure and a hundredth of its bytes, and so have the machine's rates. Nothing is computed
(SIMGPU_MODE=timing); threads, queues, locks, copies between contexts and Python are the real ones, so a busy machine shows in
the figures. docs/benchmarks.md says what came out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "simgpu")]

# The rates of PCIe 5.0 x16 and of the paper's CPU, over 100: an expert has 442 KB here and 44 MB there.
MACHINE = {
    "SIMGPU_MODE": "timing",
    "SIMGPU_MEMORY_MIB": "32768",
    "SIMGPU_PINNED_GBPS": "0.51",
    "SIMGPU_PINNED_SHARED": "1",
    # What hands keys and values over: 12 GB/s for 1152 bytes per token and layer; ours are 192.
    "SIMGPU_PAGEABLE_GBPS": "2",
    "SIMGPU_TFLOPS": "10",
    "SIMGPU_LAUNCH_US": "8.5",
    "SIMGPU_CPU_GBPS": "7.9",
    "SIMGPU_CPU_TFLOPS": "0.03",
}
MODES = {
    "two": ("two GPUs", 2, {}),
    "one": ("one GPU", 1, {}),
    "small": ("one GPU, passes of 4096", 1, {"prefill_batch": 4096}),
    "loop": ("two GPUs, one loop", 2, {"prefill_from": 1 << 20, "tpot_ms": 1e6, "n_batch": 2048}),
}


@dataclass(frozen=True)
class Size:
    """Of the long prompt and of the model's part with experts."""

    n_tokens: int = 32768
    n_layer: int = 10
    n_expert: int = 256

    @property
    def n_ctx(self) -> int:
        return self.n_tokens + 8192


@dataclass
class Steps:
    """When steps of the decode worker ended that had a token of the request at hand, and how many prompts were computed then."""

    ends: list[float] = field(default_factory=list)
    beside: list[bool] = field(default_factory=list)
    installed: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, report: Any) -> None:
        with self.changed:
            if report.decoding:
                self.ends.append(time.monotonic())
                self.beside.append(bool(report.prefilling or report.chunks))
            self.installed += report.installed
            self.changed.notify_all()

    def wait_for(self, n: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: len(self.ends) >= n)

    def intervals(self, begin: int, end: int) -> list[float]:
        """Milliseconds between the ends of steps."""
        return [1e3 * (b - a) for a, b in zip(self.ends[begin:end], self.ends[begin + 1 : end], strict=False)]


def write_model(path: Path, size: Size) -> None:
    from hybrid_moe_ext.fits.header import write_header
    from hybrid_moe_ext.fits.shapes import SHAPES, Mla
    from hybrid_moe_ext.fits.tensors import tensors_of

    shape = replace(
        SHAPES["deepseek-v3"], n_layer=size.n_layer + 1, n_layer_dense=1, n_embd=256, n_head=8, head_dim=96, n_rot=32, n_ff=512,
        n_ff_expert=144, n_ff_shared=144, n_expert=size.n_expert, n_vocab=64, n_ctx_train=size.n_ctx, expert_type="F32",
        mla=Mla(q_lora=64, kv_lora=64, nope=32, rope=32, v_dim=32),
    )  # fmt: skip
    write_header(path, shape, tensors_of(shape, "F32", "f32"))


def measure(library: str, mode: str, size: Size) -> dict[str, Any]:
    """In a process of its own."""
    import host

    assert host.load(library.encode()), "the simulated GPU did not load"
    from hybrid_moe_ext import _native, streamed
    from hybrid_moe_ext.engine import Engine, Request, Sampling

    charge = ctypes.cast(ctypes.CDLL(library).simgpu_cpu_expert, ctypes.c_void_p)
    steps = Steps()

    def request(n: int, max_tokens: int, seed: int = 0) -> Request:
        tokens = [3 + (i * 31 + seed * 7 + i // 60) % 60 for i in range(n)]
        return Request(tokens, max_tokens=max_tokens, sampling=Sampling(temperature=0, ignore_eos=True))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, size)
        options = {
            "n_ctx": size.n_ctx, "n_parallel": 2, "n_kept": 0, "store_mib": 0, "dual_batch": "off", "experts_memory": "pinned",
            "prefill_batch": 16384, "n_threads": 2, "tpot_ms": 1e6, "ttft_s": 1e6, "slp": "auto",
        }  # fmt: skip
        with Engine(str(path), on_step=steps, **{**options, **MODES[mode][2]}) as engine:
            _native.library().hybrid_moe_pretend_cpu(charge)
            engine.submit(request(4096, 4, seed=1)).result(600)  # experts are copied, rates measured
            decoding = engine.submit(request(16, 4000))
            warm = len(steps.ends) + 20
            steps.wait_for(warm + 150)
            host.reset_stats()
            began = len(steps.ends)
            steps.wait_for(began + 100)
            alone = steps.intervals(warm, len(steps.ends))
            stage_us = _stage_us(host.stats(), (len(steps.ends) - began) * size.n_layer)
            before, first = streamed.report(), len(steps.ends)
            host.reset_stats()
            submitted = time.monotonic()
            long = engine.submit(request(size.n_tokens, 1, seed=2))
            result = long.result(900)
            took, last = time.monotonic() - submitted, len(steps.ends)
            s = streamed.between(before, streamed.report())
            beside = steps.intervals(first, last)
            decoding.cancel()
            return {
                "alone_ms": alone,
                "beside_ms": beside,
                "prefill_s": took,
                "via": result.finish.metrics.via,
                "stage_us": stage_us,
                "handed_over": steps.installed,
                "devices": {d.name: d.experts for d in s.devices},
                "cpu_experts": s.cpu_experts,
                "split": str(engine.split_gpus),
            }


def _stage_us(books: dict[str, Any], n: int) -> dict[str, float]:
    """Modelled, per token and layer, of which there were n."""
    gpu = sum(d["compute"]["modelled_ns"] for d in books["devices"])
    return {"gpu": gpu / n / 1e3, "cpu": books["cpu"]["modelled_ns"] / n / 1e3}


def summary(seen: dict[str, Any]) -> dict[str, float]:
    alone, beside = seen["alone_ms"], seen["beside_ms"]
    mean = statistics.fmean
    return {
        "alone_ms": mean(alone),
        "beside_ms": mean(beside),
        "ratio": mean(beside) / mean(alone),
        "median_ratio": statistics.median(beside) / statistics.median(alone),
        "worst_ms": max(beside),
        "n_beside": len(beside),
    }


def run(library: str, mode: str, size: Size, cache: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SIMGPU_", "HYBRID_MOE_"))}
    environment |= {name: os.environ[name] for name in ("HYBRID_MOE_LIBRARY",) if name in os.environ}
    environment |= MACHINE | {"SIMGPU_DEVICES": str(MODES[mode][1]), "XDG_CACHE_HOME": cache}
    command = [sys.executable, __file__, library, "--child", mode, *_flags(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _flags(size: Size) -> list[str]:
    return ["--tokens", str(size.n_tokens), "--layers", str(size.n_layer), "--experts", str(size.n_expert)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", help="the simulated GPU")
    parser.add_argument("--tokens", type=int, default=Size.n_tokens, help="of the long prompt")
    parser.add_argument("--layers", type=int, default=Size.n_layer, help="with experts")
    parser.add_argument("--experts", type=int, default=Size.n_expert, help="per layer")
    parser.add_argument("--modes", default=",".join(MODES), help="which of " + ", ".join(MODES))
    parser.add_argument("--json", action="store_true", help="everything")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    size = Size(given.tokens, given.layers, given.experts)
    if given.child:
        print(json.dumps(measure(given.library, given.child, size)))
        return
    seen = {}
    with tempfile.TemporaryDirectory() as cache:
        for mode in given.modes.split(","):
            seen[mode] = run(given.library, mode, size, cache)
            one, s = seen[mode], summary(seen[mode])
            print(
                f"{MODES[mode][0]:20} TPOT alone {s['alone_ms']:7.2f} ms, beside {s['beside_ms']:8.2f} ms ({s['ratio']:.2f}x, "
                f"median {s['median_ratio']:.2f}x, worst step {s['worst_ms']:.0f} ms, {s['n_beside']:.0f} tokens); "
                f"prompt {one['prefill_s']:.1f} s, experts {one['devices']}, CPU {one['cpu_experts']}; "
                f"stages {one['stage_us']['gpu']:.0f} + {one['stage_us']['cpu']:.0f} us",
                flush=True,
            )
    if given.json:
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
