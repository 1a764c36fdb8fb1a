"""What a prompt costs in floating-point operations, from the model's own metadata. A multiply and an add count as two."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..patched.switches import DECOMPRESS, TILE, switched_on
from .source import Source

# Which layers of an architecture see a window only: 1 of so many sees everything, as its graph in llama.cpp has it.
_WINDOW_PERIOD = {"gpt-oss": 2}


@dataclass(frozen=True)
class Cost:
    """Of one prompt, in FLOP. `attention` is None for layers that this count does not know (state-space models)."""

    attention: float | None  # scores and values, causal: half of the square
    projections: float  # every other matrix but the experts
    experts: float  # routed ones
    note: str = ""

    @property
    def outside_experts(self) -> float:
        return (self.attention or 0.0) + self.projections


def prompt_cost(meta: dict[str, str], source: Source, n_tokens: int) -> Cost:
    arch = meta["general.architecture"]
    n_used = int(meta.get(f"{arch}.expert_used_count", "0"))
    attention, note = _attention(meta, arch, n_tokens)
    return Cost(
        attention=attention,
        projections=2.0 * source.dense_weights * n_tokens,
        experts=2.0 * source.expert_weights / source.n_expert * n_used * n_tokens,
        note=note,
    )


def _attention(meta: dict[str, str], arch: str, n_tokens: int) -> tuple[float | None, str]:
    if any(".ssm." in key or key.endswith(".full_attention_interval") for key in meta):
        return None, f"{arch} has layers without attention, whose work is not counted"
    n_layer = int(meta[f"{arch}.block_count"]) - int(meta.get(f"{arch}.nextn_predict_layers", "0"))
    heads = _per_layer(meta[f"{arch}.attention.head_count"], n_layer)
    width = int(meta[f"{arch}.embedding_length"]) // max(heads)
    # For MLA these are the lengths after absorption: the latent vector and the rotated part, as llama.cpp attends.
    length = sum(int(meta.get(f"{arch}.attention.{x}_length", width)) for x in ("key", "value"))
    switches = switched_on()
    if f"{arch}.attention.key_length_mla" in meta and DECOMPRESS in switches and n_tokens >= int(switches[DECOMPRESS]):
        tile = int(switches.get(TILE, n_tokens))
        return float(sum(heads) * _decompressed(meta, arch, n_tokens, tile)), ""
    window = int(meta.get(f"{arch}.attention.sliding_window", "0"))
    period = _WINDOW_PERIOD.get(arch, 0) if window else 0
    pairs = [_pairs(n_tokens, window if period and i % period != period - 1 else 0) for i in range(n_layer)]
    note = f"sliding windows of {arch} are counted as full attention" if window and not period else ""
    return float(sum(2 * h * length * p for h, p in zip(heads, pairs, strict=True))), note


def _decompressed(meta: dict[str, str], arch: str, n_tokens: int, tile: int) -> int:
    """MLA with keys and values of each head (patches/0002), per head: every tile decompresses all cells up to its own."""
    key, value = (int(meta[f"{arch}.attention.{x}_length_mla"]) for x in ("key", "value"))
    n_cells = sum(min(end, n_tokens) for end in range(tile, n_tokens + tile, tile))
    both = key - int(meta[f"{arch}.rope.dimension_count"]) + value  # what comes out of the latent
    return 2 * (key + value) * _pairs(n_tokens, 0) + 2 * int(meta[f"{arch}.attention.kv_lora_rank"]) * both * n_cells


def _per_layer(value: str, n_layer: int) -> list[int]:
    """A number for all layers, or llama.cpp's text of an array with one for each."""
    parsed = json.loads(value)
    return [int(n) for n in parsed[:n_layer]] if isinstance(parsed, list) else [int(parsed)] * n_layer


def _pairs(n: int, window: int) -> int:
    """Of a query and a key that it may see."""
    if not window or n <= window:
        return n * (n + 1) // 2
    return window * (window + 1) // 2 + (n - window) * window
