"""`hybrid-moe fits`: the tables around hybrid_moe_ext.fits, and the section of it that `hybrid-moe info` shows."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from typing import Any

import rich.box
import rich.console
import rich.table

from .._native import ggml_function
from ..errors import HybridMoeError
from ..fits import DeviceUse, Fits, fits
from ..fits.accounting import gpus_here
from ..placement import most_tokens
from .terminal import write

GIB = 1 << 30
COLUMNS = ("n_ubatch", "weights", "KV", "compute", "ours", "ring", "slots", "link tok/s", "tok/s")


@dataclass(frozen=True)
class Request:
    """As given on the command line; `options` are keywords of `fits`."""

    model: str
    vram: list[float]
    links: list[float]
    context: int | None
    prompt: int | None
    as_json: bool
    options: dict[str, Any]


def run(r: Request) -> None:
    answer = fits(r.model, r.vram, r.links, r.context, r.prompt, **r.options)
    if r.as_json:
        write(json.dumps(answer.as_dict()) + "\n")
        return
    console = rich.console.Console(highlight=False)
    for line in _question(answer):
        console.print(line, soft_wrap=True, markup=False)
    console.print(_table(answer))
    for line in summary(answer):
        console.print(line, soft_wrap=True, markup=False)


def summary(a: Fits) -> list[str]:
    """The answer in words, for `fits` and `info`."""
    if a.best is None or a.fastest is None:
        lines = [
            f"n_ubatch:     none: not even {a.rows[0].n_ubatch} fits",
            f"limited by:   {a.limited_by}",
            *_advice(a),
        ]
    else:
        times = "once" if a.n_passes == 1 else f"{a.n_passes} times"
        lines = [
            f"n_ubatch:     {a.best.n_ubatch} at most, at {a.fastest.n_ubatch} the prompt is fastest",
            *_above_default(a.best.n_ubatch),
            f"limited by:   {a.limited_by}",
            f"one pass:     {a.link_bytes / 1e9:.3g} GB of experts in {a.pass_s:.3g} s, so at most "
            f"{a.best.ceiling_tps:.0f} tokens/s of prefill",
            f"TTFT:         {a.ttft_link_s:.3g} s at least for {a.n_prompt} tokens (experts streamed {times}); {a.ttft_s:.3g} s "
            f"with compute at {a.tflops:g} TFLOP/s: the {'link' if a.slowest == 'link' else 'GPU'} is what it waits for",
        ]
    return [*lines, *_attention(a), *(f"note:         {note}" for note in a.notes)]


def _above_default(n_ubatch: int) -> list[str]:
    if n_ubatch <= most_tokens():
        return []
    return [f"              Llama takes up to {most_tokens()} by itself; more needs n_ubatch= (or -ub)"]


def _attention(a: Fits) -> list[str]:
    attention = "not counted" if a.cost.attention is None else f"{a.cost.attention / 1e15:.3g} PFLOP"
    lines = [
        f"attention:    {attention}, with the projections' {a.cost.projections / 1e15:.3g}: {a.serial_s:.3g} s on one GPU at "
        f"a time; experts {a.cost.experts / 1e15:.3g} PFLOP"
    ]
    if len(a.gpus) > 1:
        lines.append(f"split mode:   {a.split_mode}: {a.split_reason}")
        for mode, refusal in a.split_modes.items():
            if refusal:
                lines.append(f"              {mode} is refused: {refusal}")
        if a.tensor_s is not None:
            lines.append(
                f"              tensor is possible: {a.tensor_s:.3g} s, with {a.tensor_sum_bytes / 1e9:.3g} GB of sums over "
                "each link; llama.cpp cannot account for its memory"
            )
    return lines


def info_section(model: str) -> dict[str, Any] | None:
    """What `info` adds on a machine with a GPU: `lines` for people and `answer`; None without one."""
    try:
        if not _may_have_gpu() or not gpus_here():
            return None
        answer = fits(model)
    except HybridMoeError as error:
        return {"lines": [f"streaming:    {error}"], "answer": None}
    gpus = ", ".join(f"{gpu.name} with {gpu.n_bytes / GIB:.1f} GiB free" for gpu in answer.gpus)
    links = f"assuming {answer.links[0]:g} GB/s to a GPU; `hybrid-moe fits --link` changes it"
    return {"lines": [f"streaming:    {gpus}, {links}", *summary(answer)], "answer": answer.as_dict()}


def _may_have_gpu() -> bool:
    """Whether a GPU's back end is in this process, or one is named that the accounting process would load."""
    if os.environ.get("GGML_BACKEND_PATH"):
        return True
    by_type = ggml_function("ggml_backend_dev_by_type", ctypes.c_void_p, [ctypes.c_int])
    return any(by_type(kind) for kind in (1, 2))  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU


def _question(a: Fits) -> list[str]:
    gpus = ", ".join(
        f"{g.name} {g.n_bytes / GIB:.1f} GiB, {link:g} GB/s" for g, link in zip(a.gpus, a.links, strict=True)
    )
    fp8 = {"codes": ", FP8 crosses the link as it is", "bf16": ", FP8 crosses the link as BF16", None: ""}[a.fp8_link]
    return [
        f"model:        {a.model} ({a.architecture}), experts {', '.join(a.expert_types)}{fp8}",
        f"GPUs:         {gpus}, split mode {a.split_mode}",
        f"context:      {a.n_ctx} of {a.n_ctx_train} tokens",
    ]


def _table(a: Fits) -> rich.table.Table:
    """GiB; a line per n_ubatch and GPU."""
    several = len(a.gpus) > 1
    table = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 1, 0, 0), title="GiB")
    for name in (COLUMNS[0], *(["GPU"] if several else []), *COLUMNS[1:]):
        table.add_column(name, justify="right", no_wrap=True)
    for row in a.rows:
        speeds = (f"{row.ceiling_tps:.0f}", f"{row.tps:.0f}") if row.fits else ("does not", "fit")
        for i, device in enumerate(row.devices):
            first, last = (str(row.n_ubatch), speeds) if i == 0 else ("", ("", ""))
            gpu = [device.name] if several else []
            table.add_row(first, *gpu, *_sizes(device), *last, style="" if row.fits else "dim")
    return table


def _sizes(device: DeviceUse) -> list[str]:
    n_bytes = (device.weights, device.kv_cache, device.compute, device.stream, device.ring)
    return [*(f"{n / GIB:.1f}" for n in n_bytes), str(device.slots)]


def _advice(a: Fits) -> list[str]:
    device = min(a.rows[0].devices, key=lambda d: d.ring)
    missing = max(0, -device.ring) + 2 * a.slot_bytes
    return [
        f"missing:      {missing / GIB:.3g} GiB on {device.name}: a smaller --context, --kv-type q8_0, --dense-type q8_0 "
        "or a smaller --reserve save some"
    ]
