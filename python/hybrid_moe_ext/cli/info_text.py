"""What `hybrid-moe info` prints of a model."""

from __future__ import annotations

from ..info import PARTS, ModelInfo
from .convert import FP8_NOTE


def info_lines(model: ModelInfo) -> list[str]:
    lines = [
        f"model:        {model.path} ({'Hugging Face directory' if model.format == 'hf' else 'GGUF'})",
        f"architecture: {model.architecture}, {model.n_layer} layers, trained for {model.n_ctx_train} tokens",
        f"experts:      {model.n_expert_used} of {model.n_expert} per token"
        if model.n_expert
        else "experts:      none, this is not a Mixture-of-Experts model",
    ]
    if model.fp8_scales:
        lines.append(f"FP8 scales:   {model.fp8_scales}")
    lines.append(f"size:         {size(model.n_bytes)}")
    for name in PARTS:
        if name in model.parts:
            part = model.parts[name]
            largest_first = sorted(part.types.items(), key=lambda item: -item[1])
            types = ", ".join(f"{type_} {size(n)}" for type_, n in largest_first)
            lines.append(f"  {name:<11} {size(part.n_bytes):>9}  on {part.runs_on:<9}  {types}")
    if model.n_skipped:
        lines.append(f"not run:      {model.n_skipped} tensors (multi-token prediction)")
    if model.is_fp8_gguf:
        lines.append(f"note:         {FP8_NOTE}")
    if model.host_expert_types:
        kept = ", ".join(model.host_expert_types)
        lines.append(
            f"note:         experts of type {kept} stay with the host's kernels; long prompts are streamed where there is a GPU"
        )
    return lines


def size(n_bytes: int) -> str:
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
