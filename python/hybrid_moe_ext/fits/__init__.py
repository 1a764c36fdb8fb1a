"""What fits on which GPUs: n_ubatch, ring of expert slots, prefill ceiling, by llama.cpp's own accounting. Nothing is loaded.

answer = fits("deepseek-v3", vram=[32], links=[51], context=32768)      # or a GGUF, or a Hugging Face directory
print(answer.best.n_ubatch, answer.best.ceiling_tps, answer.limited_by)
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .accounting import Gpu
from .answer import DeviceUse, Fits, Row
from .ask import DEFAULT_LINK, DEFAULT_TFLOPS, ask
from .cost import Cost
from .shapes import SHAPES

__all__ = ["DEFAULT_LINK", "DEFAULT_TFLOPS", "SHAPES", "Cost", "DeviceUse", "Fits", "Gpu", "Row", "fits"]


def fits(
    model: str | os.PathLike[str],
    vram: Sequence[float] = (),
    links: Sequence[float] = (DEFAULT_LINK,),
    context: int | None = None,
    prompt: int | None = None,
    *,
    expert_type: str | None = None,
    dense_type: str | None = None,
    kv_type: str = "f16",
    fp8_link: str = "auto",
    split_mode: str = "auto",
    tflops: float = DEFAULT_TFLOPS,
    reserve_mib: float = 1024,
) -> Fits:
    """`model`: a GGUF, a Hugging Face directory, or one of SHAPES (of which `expert_type` says the type).
    `dense_type`: what a directory's or a shape's other weights are loaded as: "bf16" by default, "q8_0" or "f32".

    `vram`: GiB per GPU that is assumed; empty: the GPUs of this machine, with what is free on them. `links`: GB/s per GPU, or
    one for all. `context` and `prompt`: tokens; 32768 by default, or what the model has, and the whole context.
    `fp8_link`: FP8 experts cross the link as "codes" (CUDA) or as "bf16" (other back ends). `split_mode`: "none" or "layer".
    `tflops`: what a GPU computes at, for the times that include computing. `reserve_mib`: left free on each GPU.

    Raises OptionError and CheckpointError.
    """
    return ask(
        os.fspath(model), list(vram), list(links), context, prompt, expert_type, dense_type, kv_type, fp8_link,
        split_mode, tflops, reserve_mib,
    )  # fmt: skip
