"""Child processes of test_engine_two_gpus.py: python two_gpus.py SIMGPU CASE. An engine on two simulated GPUs; prints JSON."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "simgpu"))

import host

import engine_solo
import models
import tiny_families
from hybrid_moe_ext import machine, streamed
from hybrid_moe_ext.engine import Engine, StepReport

N_LONG, N_TOKENS = 200, 8
SIZES = {"n_ctx": 600, "n_parallel": 3, "slp": "on", "piece_tokens": 16}


def engine(path: str | Path, exact: dict[str, Any], **more: Any) -> Engine:
    sizes = {"n_batch": 32, "n_threads": 1, "prefill_from": 64, "tpot_ms": 1e6, "ttft_s": 1e6}
    return Engine(str(path), **{**exact, **sizes, **SIZES, **more})


def facts(e: Engine) -> dict[str, Any]:
    return {
        "split": str(e.split_gpus),
        "is_on": e.split_gpus.is_on,
        "prefill_layers": e._models.prefill.placement.layer_devices,
        "decode_layers": e._models.decode.placement.layer_devices,
        "decode_threads": e.options.threads().decode,
    }


def streamed_to(before: streamed.Report) -> dict[str, Any]:
    """What happened since then: experts per device, and the CPU's."""
    s = streamed.between(before, streamed.report())
    return {"devices": {d.name: d.experts for d in s.devices}, "cpu": s.cpu_experts, "troubles": s.troubles}


def policy(**more: Any) -> dict[str, Any]:
    """Nothing decodes: both GPUs. While something does: the prefill GPU alone, without the CPU. Afterwards both again."""
    name = "deepseek-v3"
    prompts = [engine_solo.prompt(N_LONG, seed=i) for i in (1, 2, 3)]
    shorts = [engine_solo.prompt(9, seed=i) for i in (4, 5)]
    done: list[tuple[list[int], list[int]]] = []
    out: dict[str, Any] = {}

    may_go_on = threading.Event()
    may_go_on.set()

    def slow(report: StepReport) -> None:
        """So that what decodes is there before the long prompt beside it, and lasts longer."""
        if len(report.decoding) > 0:
            assert may_go_on.wait(engine_solo.DEADLOCK_S)
        if report.prefilling:
            time.sleep(0.1)

    with engine(*engine_solo.model(name), on_step=slow, **more) as e:

        def run(prompt: list[int]) -> dict[str, Any]:
            before, ops = streamed.report(), _ops()
            stream = e.submit(engine_solo.greedy(prompt, N_TOKENS))
            may_go_on.set()
            result = engine_solo.result(stream)
            done.append((prompt, result.tokens))
            after = streamed.report()
            return streamed_to(before) | {
                "via": result.finish.metrics.via,
                "ops": [n - m for n, m in zip(_ops(), ops, strict=True)],
                "running": e.metrics().running_now,
                "allowed": after["allowed"],
                "plan": after["plan"],
            }

        def wait_until_idle() -> None:
            while e.metrics().running_now:
                time.sleep(0.01)

        out |= facts(e)
        out["idle"] = run(prompts[0])
        wait_until_idle()
        may_go_on.clear()
        decoding = e.submit(engine_solo.greedy(shorts[0], 240))
        first = next(iter(decoding))
        out["beside"] = run(prompts[1])
        decoding.cancel()
        done.append((shorts[0], [first.token, *engine_solo.result(decoding).tokens]))
        wait_until_idle()
        out["after"] = run(prompts[2])
        wait_until_idle()
        out["short"] = run(shorts[1])
    return out | {"done": done, "allowed_at_the_end": streamed.report()["allowed"]}


def policy_without_cpu() -> dict[str, Any]:
    return policy(cpu_help="off")


def _ops() -> list[int]:
    """Per GPU, how many operations it has computed."""
    return [d["calls"]["ops"] for d in host.stats()["devices"]]


def degraded() -> dict[str, Any]:
    """The second GPU gives no memory (SIMGPU_FAIL_ALLOC)."""
    out: dict[str, Any] = {}
    with engine(*engine_solo.model("fp8")) as e:
        out |= facts(e)
        prompts = [engine_solo.prompt(n, seed=n, n_vocab=250) for n in (N_LONG, 9)]
        streams = [e.submit(engine_solo.greedy(p, N_TOKENS)) for p in prompts]
        return out | {"done": [(p, engine_solo.result(s).tokens) for p, s in zip(prompts, streams, strict=True)]}


def _anonymous_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def _private_kib(files: str) -> int:
    """Of pages of mappings of these files, those that are this process's own copies."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = files in line
        elif is_ours and line.startswith("Anonymous:"):
            total += int(line.split()[1])
    return total


def once() -> dict[str, Any]:
    """Experts of 72 MiB: memory with one model and with two, in files and in copies."""
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(tiny_families.tiny("qwen3-30b"), n_expert=64, n_ff_expert=256, n_ctx_train=512)
        path = tiny_families.write_model(Path(folder) / "wide.gguf", shape)
        out: dict[str, Any] = {"expert_kib": path.stat().st_size // 1024}
        for memory in ("mmap", "copy", "pinned"):
            out[memory] = _kept(path, memory)
        out["directory"] = {memory: _kept(models.fp8_directory(), memory) for memory in ("copy", "pinned")}
    return out


def _kept(path: Path, memory: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for split in ("off", "on"):
        with engine(path, engine_solo.EXACT, split_gpus=split, experts_memory=memory) as e:
            engine_solo.result(e.submit(engine_solo.greedy(engine_solo.prompt(N_LONG), N_TOKENS)))
            copies = machine.copies()
            seen[split] = {
                "models": len({id(e._models.prefill), id(e._models.decode)}),
                "tensors": copies.tensors,
                "copied": copies.copied,
                "anonymous_kib": _anonymous_kib(),
                "private_kib": _private_kib(str(path)),
                "mappings": Path("/proc/self/maps").read_text().count(str(path)),
            }
    return seen


CASES: dict[str, Callable[[], dict[str, Any]]] = {f.__name__: f for f in (policy, policy_without_cpu, degraded, once)}

if __name__ == "__main__":
    assert host.load(sys.argv[1].encode()), "the simulated GPU did not load"
    print(json.dumps(CASES[sys.argv[2]]()))
