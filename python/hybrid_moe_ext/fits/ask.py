"""One question: options checked, model described, llama.cpp asked for each split mode, the better answer kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import CheckpointError, OptionError
from ..info import ACCEPTED_TYPES
from ..patched import set_switches, switched_on
from . import search as find
from .accounting import Account, Accounting, Gpu, Refused
from .answer import Fits, Row
from .cost import Cost, prompt_cost
from .source import DENSE_TYPE, FP8, Source, open_source

DEFAULT_LINK = 51.0  # GB/s that PCIe 5.0 x16 really carries
DEFAULT_TFLOPS = 100.0
DEFAULT_CONTEXT = 32768
GIB, MIB = 1 << 30, 1 << 20
MOST_GPUS = 16
CHOICES = {
    "kv_type": ("f16", "bf16", "q8_0", "f32"),
    "fp8_link": ("auto", "codes", "bf16"),
    "split_mode": ("auto", "none", "layer"),
}


@dataclass(frozen=True)
class _Question:
    source: Source
    links: tuple[float, ...]
    context: int | None
    prompt: int | None
    dense_type: str
    kv_type: str
    fp8_link: str
    tflops: float
    reserve: int


def ask(
    model: str, vram: list[float], links: list[float], context: int | None, prompt: int | None, expert_type: str | None,
    dense_type: str | None, kv_type: str, fp8_link: str, split_mode: str, tflops: float, reserve_mib: float,
) -> Fits:  # fmt: skip
    for name, value in {"kv_type": kv_type, "fp8_link": fp8_link, "split_mode": split_mode}.items():
        if value not in CHOICES[name]:
            raise OptionError(f"{name}={value!r} is not possible: choose one of {', '.join(CHOICES[name])}")
    for name, values in {"vram": vram, "link": links, "tflops": [tflops]}.items():
        for x in values:
            if not (math.isfinite(x) and x > 0):
                raise OptionError(f"{name} {x:g} is not possible: give a number greater than 0")
    if not (math.isfinite(reserve_mib) and reserve_mib >= 0):
        raise OptionError(f"reserve {reserve_mib:g} is not possible: give MiB, 0 or more")
    if len(vram) > MOST_GPUS:
        raise OptionError(f"vram is given {len(vram)} times: up to {MOST_GPUS} GPUs can be assumed")
    for name, count in {"context": context, "prompt": prompt}.items():
        if count is not None and count < 1:
            raise OptionError(f"{name} {count} is not possible: give tokens, 1 or more")
    set_switches()  # for the accounting process, which loads the same llama.cpp, and for what attention costs
    with open_source(model, expert_type, dense_type) as source, Accounting(model, _bytes(vram)) as accounting:
        gpus = tuple(accounting.gpus)
        if not gpus:
            raise OptionError("this machine has no GPU that llama.cpp sees: say which is meant with --vram GIB")
        question = _Question(
            source, _links(links, gpus), context, prompt, dense_type or DENSE_TYPE, kv_type, _fp8_link(fp8_link, source, gpus),
            tflops, int(reserve_mib * MIB),
        )  # fmt: skip
        if len(gpus) == 1:
            return _answer(question, accounting, gpus, "none", "one GPU")
        answer = _of_several(question, accounting, gpus, split_mode)
        return _with_split_modes(answer, _try_split_modes(question, accounting, gpus))


def _of_several(q: _Question, accounting: Accounting, gpus: tuple[Gpu, ...], mode: str) -> Fits:
    """Layers are spread unless that costs speed: it takes the least memory of the fullest GPU."""
    if mode != "auto":
        return _answer(q, accounting, gpus, mode, "as asked for")
    layer = _answer(q, accounting, gpus, "layer", "it leaves the fullest GPU the most room, and `none` is not faster")
    none = _answer(q, accounting, gpus, "none", "all layers fit on the first GPU, so the others hold a longer ring")
    if none.fastest is None or (layer.fastest and none.fastest.tps <= 1.01 * layer.fastest.tps):
        return layer
    return none


def _try_split_modes(q: _Question, accounting: Accounting, gpus: tuple[Gpu, ...]) -> dict[str, str]:
    """Whether rows can be split is the back end's affair: an assumed GPU says nothing about it."""
    found = {}
    for mode in ("none", "layer", "row", "tensor"):
        if mode == "row" and any(gpu.backend == "assumed" for gpu in gpus):
            continue
        try:
            accounting.load(q.source.kind, q.source.path, q.dense_type, mode, list(gpus))
            found[mode] = ""
        except Refused as refusal:
            found[mode] = str(refusal)
    return found


def _with_split_modes(a: Fits, modes: dict[str, str]) -> Fits:
    if modes["tensor"]:
        return replace(a, split_modes=modes)
    return replace(a, split_modes=modes, tensor_s=a.serial_s / len(a.gpus) + a.tensor_sum_bytes / min(a.links) / 1e9)


def _bytes(vram: list[float]) -> list[int]:
    return [int(gib * GIB) for gib in vram]


def _links(links: list[float], gpus: tuple[Gpu, ...]) -> tuple[float, ...]:
    if len(links) not in (1, len(gpus)):
        raise OptionError(f"link is given {len(links)} times for {len(gpus)} GPUs: give one for all, or one for each")
    return tuple(links * len(gpus) if len(links) == 1 else links)


def _fp8_link(wanted: str, source: Source, gpus: tuple[Gpu, ...]) -> str:
    """Only CUDA has a kernel that expands FP8; elsewhere the CPU does, before the copy."""
    if FP8 not in source.expert_types:
        return ""
    if wanted != "auto":
        return wanted
    return "codes" if all(gpu.backend in ("CUDA", "assumed") for gpu in gpus) else "bf16"


def _answer(q: _Question, accounting: Accounting, gpus: tuple[Gpu, ...], mode: str, reason: str) -> Fits:
    try:
        loaded = accounting.load(q.source.kind, q.source.path, q.dense_type, mode, list(gpus))
    except Refused as refusal:
        raise CheckpointError(f"{q.source.name}: llama.cpp cannot load this model: {refusal}") from refusal
    meta, n_ctx_train = loaded["meta"], loaded["n_ctx_train"]
    n_ctx, n_prompt = _lengths(q, n_ctx_train)
    arch = meta["general.architecture"]
    setting = find.Setting(
        source=q.source, gpus=gpus, links=q.links, fp8_link=q.fp8_link or None, n_ctx=n_ctx,
        n_embd=int(meta[f"{arch}.embedding_length"]), n_prompt=n_prompt, tflops=q.tflops, reserve=q.reserve,
        cost=prompt_cost(meta, q.source, n_prompt),
    )  # fmt: skip

    def measure(n_ubatch: int) -> Account:
        try:
            return accounting.measure(n_ubatch, n_ctx, q.kv_type)
        except Refused as refusal:
            raise CheckpointError(
                f"{q.source.name}: llama.cpp makes no context of {n_ctx} tokens and n_ubatch {n_ubatch}: {refusal}"
            ) from refusal

    rows = find.search(setting, measure)
    best = next((row for row in reversed(rows) if row.fits), None)
    fastest = _fastest([row for row in rows if row.fits])
    passes = find.n_passes(setting, fastest.n_ubatch) if fastest else 0
    return Fits(
        model=q.source.name, architecture=arch, expert_types=q.source.expert_types, gpus=gpus, split_mode=mode,
        split_reason=reason, links=q.links, fp8_link=setting.fp8_link, n_ctx=n_ctx,
        n_ctx_train=n_ctx_train, n_prompt=n_prompt, tflops=q.tflops, link_bytes=setting.link_bytes,
        slot_bytes=setting.slot_bytes, pass_s=setting.pass_s, rows=tuple(rows), best=best,
        fastest=fastest, limited_by=find.limit(setting, rows), slowest=_slowest(setting, fastest), n_passes=passes,
        ttft_link_s=passes * setting.pass_s, ttft_s=n_prompt / fastest.tps if fastest else 0.0, cost=setting.cost,
        serial_s=setting.cost.outside_experts / q.tflops / 1e12, tensor_s=None, split_modes={},
        tensor_sum_bytes=find.tensor_sum_bytes(setting, int(meta[f"{arch}.block_count"])),
        notes=_notes(q.source, gpus, setting.cost),
    )  # fmt: skip


def _lengths(q: _Question, n_ctx_train: int) -> tuple[int, int]:
    n_ctx = min(DEFAULT_CONTEXT, n_ctx_train) if q.context is None else q.context
    if n_ctx > n_ctx_train:
        raise OptionError(
            f"context {n_ctx} is more than the {n_ctx_train} tokens {q.source.name} was trained for: ask for less"
        )
    n_prompt = n_ctx if q.prompt is None else q.prompt
    if n_prompt > n_ctx:
        raise OptionError(f"prompt {n_prompt} does not fit in a context of {n_ctx} tokens: give a larger --context")
    return n_ctx, n_prompt


def _fastest(rows: list[Row]) -> Row | None:
    """Of those within 1 % of the best the one with the fewest passes: what the links do not carry, others can use."""
    best = max((row.tps for row in rows), default=0.0)
    return next((row for row in reversed(rows) if row.tps >= 0.99 * best), None)


def _slowest(setting: find.Setting, row: Row | None) -> str:
    if row is None:
        return ""
    copy, _, _ = find.layer_seconds(setting, row.n_ubatch)
    copies = find.n_passes(setting, row.n_ubatch) * setting.source.n_layer_moe * copy
    return "link" if find.prompt_seconds(setting, row.n_ubatch, row.devices) <= 1.001 * copies else "compute"


def _notes(source: Source, gpus: tuple[Gpu, ...], cost: Cost) -> tuple[str, ...]:
    notes = [cost.note] if cost.note else []
    if switches := switched_on():
        values = ", ".join(f"{name}={value}" for name, value in switches.items())
        notes.append(
            f"this llama.cpp is patched, with {values}: an unpatched one takes more memory (docs/whole-prompt.md)"
        )
    if any(gpu.backend == "assumed" for gpu in gpus):
        notes.append(
            "assumed GPUs are taken to run every operation of the model; a back end's own scratch memory is not counted, "
            "the reserve is for that"
        )
    others = [t for t in source.expert_types if t != FP8 and t not in ACCEPTED_TYPES]
    if others:
        notes.append(
            f"experts of type {', '.join(others)} have no kernel of ours: long prompts of them are streamed, all else runs on "
            "llama.cpp's own kernels; for assumed GPUs, compute is what llama.cpp needs to run all of it itself"
        )
    return tuple(notes)
