"""The engine on two GPUs: who computes what where, what is held once, and contexts that do not agree. On simulated GPUs, in
processes of their own; agreement in this one, on the CPU."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest

import engine_solo
import engine_two_gpus
import models
import tiny_families
from hybrid_moe_ext import Llama, seam
from hybrid_moe_ext.engine import Engine
from hybrid_moe_ext.engine.agreement import agree, compare_models
from hybrid_moe_ext.engine.context import Context, Memory
from hybrid_moe_ext.engine.split import choose_split
from hybrid_moe_ext.errors import EngineError, OptionError
from hybrid_moe_ext.gpus import Gpu


def _run(library: Path, cache: Path, case: str, **settings: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HYBRID_MOE_", "SIMGPU_"))}
    environment |= {name: os.environ[name] for name in ("HYBRID_MOE_LIBRARY", "HYBRID_MOE_ISA") if name in os.environ}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "two_gpus.py", library, case],
        env=environment | {"XDG_CACHE_HOME": str(cache), "SIMGPU_DEVICES": "2"} | settings,
        capture_output=True,
        text=True,
        timeout=engine_solo.DEADLOCK_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"log": done.stderr}


@pytest.mark.parametrize("case", ["policy", "policy_without_cpu"])
def test_decode_has_priority(simgpu: Path, tmp_path: Path, case: str) -> None:
    seen = _run(simgpu, tmp_path, case)
    assert seen["is_on"] and seen["prefill_layers"] == ["SimGPU0"] and seen["decode_layers"] == ["SimGPU1"]
    phases = [seen[name] for name in ("idle", "beside", "after", "short")]
    assert [p["via"] for p in phases] == ["prefill", "prefill", "prefill", "decode"]
    assert not any(p["troubles"] for p in phases)
    beside = seen["beside"]
    assert beside["running"] == 1, "what decodes beside the prompt ended too early for this test to say anything"
    assert set(beside["devices"]) == {"SimGPU0"} and beside["cpu"] == 0 and beside["allowed"] == "SimGPU0"
    assert "the CPU is left to decode" in beside["plan"]
    for phase in ("idle", "after"):
        assert seen[phase]["allowed"] == "SimGPU0,SimGPU1"
        if case == "policy_without_cpu":
            assert set(seen[phase]["devices"]) == {"SimGPU0", "SimGPU1"}
    if case == "policy":
        assert seen["idle"]["cpu"] + seen["after"]["cpu"] > 0, (
            "the CPU could not have helped, so nothing shows that it may not"
        )
    ops = seen["short"]["ops"]
    assert ops[0] == 0 and ops[1] > 0, "decode is the second GPU's"
    assert seen["allowed_at_the_end"] == "SimGPU0,SimGPU1"
    for prompt, tokens in seen["done"]:
        engine_solo.assert_solo("deepseek-v3", prompt, tokens)


def test_one_model_when_the_second_does_not_load(simgpu: Path, tmp_path: Path) -> None:
    seen = _run(simgpu, tmp_path, "degraded", SIMGPU_FAIL_ALLOC=",1+")
    assert not seen["is_on"] and seen["decode_layers"] == ["SimGPU0"]
    assert seen["split"].startswith("one model serves prefill and decode: the second one has no room on SimGPU1")
    assert seen["log"].count(seen["split"]) == 1
    for prompt, tokens in seen["done"]:
        engine_solo.assert_solo("fp8", prompt, tokens)


def test_experts_are_held_once(simgpu: Path, tmp_path: Path) -> None:
    seen = _run(simgpu, tmp_path, "once")
    for kept in (*(seen[memory] for memory in ("mmap", "copy", "pinned")), *seen["directory"].values()):
        one, two = kept["off"], kept["on"]
        assert one["models"] == 1 and two["models"] == 2 and two["mappings"] > one["mappings"]
        assert two["private_kib"] == 0, "pages of the file were copied"
    for memory in ("copy", "pinned"):
        for kept in (seen[memory], seen["directory"][memory]):
            assert kept["on"]["tensors"] == kept["off"]["tensors"] > 0, "a tensor was copied for each model"
    for memory in ("mmap", "copy", "pinned"):
        more_kib = seen[memory]["on"]["anonymous_kib"] - seen[memory]["off"]["anonymous_kib"]
        assert more_kib < seen["expert_kib"] / 3, "the second model has experts of its own"


def test_the_benchmark_by_hand_works(simgpu: Path, tmp_path: Path) -> None:
    """On a small model; what it times is not looked at. The last layer computes no tokens of a prompt that is only kept."""
    seen = engine_two_gpus.run(
        str(simgpu), "two", engine_two_gpus.Size(n_tokens=4096, n_layer=3, n_expert=16), str(tmp_path)
    )
    assert seen["via"] == "prefill" and seen["handed_over"] >= 4095 and seen["split"].startswith("prefill on SimGPU0")
    assert seen["devices"] == {"SimGPU0": 2 * 16} and seen["cpu_experts"] == 0
    assert seen["stage_us"]["gpu"] > 0 and seen["stage_us"]["cpu"] > 0
    assert engine_two_gpus.summary(seen)["n_beside"] > 0


# --- whether there are two


def _gpu(name: str, gib: float) -> Gpu:
    class Fixed(Gpu):
        def memory(self) -> tuple[int, int]:
            return int(gib * 2**30), int(gib * 2**30)

    return Fixed(name, "", 0)


def test_two_models_where_two_gpus_have_room() -> None:
    two = [_gpu("CUDA0", 32), _gpu("CUDA1", 32)]
    assert choose_split("auto", two, 2**30, "").decode == "CUDA1"
    assert choose_split("on", two, 2**30, "").prefill == "CUDA0"
    three = [_gpu("CUDA0", 8), _gpu("CUDA1", 32), _gpu("CUDA2", 32)]
    split = choose_split("auto", three, 20 * 2**30, "")
    assert (split.prefill, split.decode) == ("CUDA1", "CUDA2")
    assert "CUDA1" in str(split) and "experts in host memory once" in str(split)


@pytest.mark.parametrize(
    ("gpus", "gib", "obstacle", "why"),
    [
        ([_gpu("CUDA0", 32)], 1, "", "no two GPUs"),
        ([_gpu("CUDA0", 32), _gpu("Vulkan0", 32)], 1, "", "no two GPUs of one back end"),
        (
            [_gpu("CUDA0", 32), _gpu("CUDA1", 8)],
            20,
            "",
            "20.0 GiB, .* fit on CUDA0 of CUDA0, CUDA1 alone",
        ),
        ([_gpu("CUDA0", 8), _gpu("CUDA1", 8)], 20, "", "fit on none of CUDA0, CUDA1"),
        ([_gpu("CUDA0", 32), _gpu("CUDA1", 32)], None, "", "no experts are streamed"),
        ([_gpu("CUDA0", 32), _gpu("CUDA1", 32)], 1, "main_gpu is given", "main_gpu is given"),
    ],
)
def test_one_model_otherwise(gpus: list[Gpu], gib: float | None, obstacle: str, why: str) -> None:
    n_bytes = None if gib is None else int(gib * 2**30)
    split = choose_split("auto", gpus, n_bytes, obstacle)
    assert not split.is_on and re.search(why, str(split))
    with pytest.raises(OptionError, match=why):
        choose_split("on", gpus, n_bytes, obstacle)


def test_without_gpus() -> None:
    with engine_solo.engine("demo") as e:
        assert str(e.split_gpus) == "one model serves prefill and decode: there are no two GPUs"
    with pytest.raises(OptionError, match="there are no two GPUs; leave it out"):
        engine_solo.engine("demo", split_gpus="on")
    with pytest.raises(OptionError, match="split_gpus='both' is not possible: choose one of auto, on, off"):
        engine_solo.engine("demo", split_gpus="both")


def test_layer_devices_need_streaming() -> None:
    path, exact = engine_solo.model("fp8")
    with pytest.raises(OptionError, match="layer_devices='CUDA7': there is no GPU device 'CUDA7'"):
        Llama(path, layer_devices="CUDA7", **exact)


# --- contexts that do not agree


def _contexts(name: str, other: str | None = None, **changed: Any) -> tuple[Llama, Llama, Any]:
    """A model's own context and a second one with changed parameters, of another model if one is named."""
    llms = [
        Llama(path, n_ctx=64, n_threads=1, n_threads_batch=1, **exact)
        for path, exact in map(engine_solo.model, (name, other or name))
    ]
    params = C.llama_context_params.from_buffer_copy(llms[1].context_params)
    params.n_seq_max = 2
    params.kv_unified = True
    for field, value in changed.items():
        setattr(params, field, value)
    return llms[0], llms[1], seam.create_stock(llms[1].model, params)


def _agree(name: str, other: str | None = None, damage: Any = None, **changed: Any) -> tuple[int, int]:
    one, two, ctx = _contexts(name, other, **changed)
    memory = Memory.of(one.model, one.context_params)
    prefill, decode = Context(one.ctx, memory), Context(ctx, memory)
    try:
        if damage is not None:
            decode.set_state = damage(decode.set_state)  # type: ignore[method-assign]
        return agree(prefill, decode, 1, 1)
    finally:
        prefill.free_batch()
        decode.free_batch()
        C.llama_free(ctx)
        two.close()
        one.close()


@pytest.mark.parametrize("name", ["demo", "qwen3-30b", "mamba"])
def test_two_models_of_one_file_agree(name: str) -> None:
    per_seq, per_token = _agree(name)
    assert per_seq > 0 and (per_token > 0) == (name != "mamba")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"type_k": 1, "type_v": 1}, r"mismatched key types \(F16 and F32\): give type_k and type_v"),
        ({"flash_attn_type": 1}, "flash attention is on in one and off in the other: give flash_attn"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(EngineError, match=what):
        _agree("qwen3-30b", **changed)


def test_other_models_are_named() -> None:
    with pytest.raises(EngineError, match=r"general\.architecture is 'qwen3moe' in one and 'gpt-oss' in the other"):
        _agree("qwen3-30b", "gpt-oss-120b")
    path = models.FOLDER / "engine-thin.gguf"
    tiny_families.write_model(path, replace(tiny_families.tiny("qwen3-30b"), n_ff_expert=32))
    with pytest.raises(EngineError, match=r"qwen3moe.expert_feed_forward_length is '64' in one and '32' in the other"):
        other = Llama(str(path), n_ctx=64, **engine_solo.EXACT)
        one = Llama(engine_solo.model("qwen3-30b")[0], n_ctx=64, **engine_solo.EXACT)
        compare_models(one.model, other.model)


def test_values_that_do_not_arrive_are_an_error() -> None:
    """The state is read without a complaint, but part of the values is lost on the way."""

    def damage(set_state: Any) -> Any:
        def lossy(seq: int, state: Any) -> None:
            state = state.copy()
            state[-200:] = 0  # of the last layer's values: a few columns of two tokens
            set_state(seq, state)

        return lossy

    with pytest.raises(EngineError, match="from the same keys and values they compute different logits"):
        _agree("qwen3-30b", damage=damage, flash_attn_type=0)


def test_the_engine_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is served."""
    kept = Context.set_state
    monkeypatch.setattr(Context, "set_state", lambda self, seq, data: kept(self, seq, data[: len(data) // 2]))
    path, exact = engine_solo.model("demo")
    with pytest.raises(EngineError, match="do not agree"):
        Engine(path, n_ctx=256, n_threads=1, prefill_from=64, **exact)
