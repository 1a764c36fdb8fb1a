"""Finds the largest n_ubatch that fits beside two expert slots, and what follows from it for speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .accounting import Account, Gpu
from .answer import DeviceUse, Row
from .cost import Cost
from .source import Source

SLOTS = 2  # one is computed from while the other fills
FIRST, STEP = 512, 256  # llama.cpp's default n_ubatch; rows between tried sizes
F32 = 4


@dataclass(frozen=True)
class Setting:
    """What does not change while n_ubatch is searched. `cost` is that of `n_prompt` tokens."""

    source: Source
    gpus: tuple[Gpu, ...]
    links: tuple[float, ...]
    fp8_link: str | None
    n_ctx: int
    n_embd: int
    n_prompt: int
    tflops: float
    reserve: int
    cost: Cost

    @property
    def link_bytes(self) -> int:
        return 2 * self.source.expert_weights if self.fp8_link == "bf16" else self.source.expert_bytes

    @property
    def slot_bytes(self) -> int:
        s = self.source
        return 2 * s.largest_expert_weights if self.fp8_link == "bf16" else s.largest_expert_bytes

    @property
    def pass_s(self) -> float:
        return self.link_bytes / (sum(self.links) * 1e9)


def search(setting: Setting, measure: Callable[[int], Account]) -> list[Row]:
    """Doubles n_ubatch up to the context, then halves the gap. Last, the least that needs no more passes than the largest: what
    it does not take is left to the ring. In rising order."""
    rows: dict[int, Row] = {}

    def attempt(n: int) -> bool:
        rows[n] = judge(setting, n, measure(n))
        return rows[n].fits

    low, high = 0, min(FIRST, setting.n_ctx)
    while high > low and attempt(high):
        low, high = high, min(2 * high, setting.n_ctx)
    while low and high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        if middle <= low:
            break
        if attempt(middle):
            low = middle
        else:
            high = middle
    if low:
        passes = n_passes(setting, low)
        least = -(-setting.n_prompt // (passes * STEP)) * STEP
        if least < low and least not in rows:
            attempt(least)
    return [rows[n] for n in sorted(rows)]


def judge(s: Setting, n_ubatch: int, account: Account) -> Row:
    devices = tuple(_device(s, n_ubatch, gpu, account) for gpu in s.gpus)
    return Row(
        n_ubatch=n_ubatch,
        fits=all(d.slots >= SLOTS for d in devices),
        devices=devices,
        host_compute=account.host.compute,
        ceiling_tps=n_ubatch / s.pass_s,
        tps=s.n_prompt / prompt_seconds(s, n_ubatch, devices),
    )


def _device(s: Setting, n_ubatch: int, gpu: Gpu, account: Account) -> DeviceUse:
    use = account.devices[gpu.name]
    expanded = 2 * 2 * s.source.largest_expert_weights if s.fp8_link == "codes" else 0
    stream = 2 * n_ubatch * s.n_embd * F32 + expanded
    usable = gpu.n_bytes - s.reserve
    ring = usable - use.total - stream
    slots = max(0, ring) // s.slot_bytes
    return DeviceUse(gpu.name, usable, use.model, use.context, use.compute, stream, ring, slots)


def n_passes(s: Setting, n_ubatch: int) -> int:
    return -(-s.n_prompt // n_ubatch)


def prompt_seconds(s: Setting, n_ubatch: int, devices: tuple[DeviceUse, ...]) -> float:
    """At best. A layer's experts arrive while it computes, and while attention does as far as the rings hold them."""
    copy, experts, outside = layer_seconds(s, n_ubatch)
    ahead = sum(min(max(0, d.ring), gbps * 1e9 * outside) for d, gbps in zip(devices, s.links, strict=True))
    hidden = ahead / (sum(s.links) * 1e9)
    layer = max(copy, outside + experts, max(copy, experts) + outside - hidden)
    return n_passes(s, n_ubatch) * s.source.n_layer_moe * layer


def layer_seconds(s: Setting, n_ubatch: int) -> tuple[float, float, float]:
    """Of one layer in one pass: its copies, its experts' products (on all devices), and everything else (on one)."""
    passes = n_passes(s, n_ubatch)
    layers = passes * s.source.n_layer_moe
    returned = s.n_prompt / passes * s.n_embd * F32 / (s.links[0] * 1e9)
    copy = s.pass_s / s.source.n_layer_moe + returned
    rate = s.tflops * 1e12
    return copy, s.cost.experts / layers / rate / len(s.gpus), s.cost.outside_experts / layers / rate


def tensor_sum_bytes(s: Setting, n_layer: int) -> int:
    """Each half of a layer ends with a sum over the GPUs: all tokens' values go down from each and the others' up to it."""
    return 2 * n_layer * s.n_prompt * s.n_embd * F32 * (len(s.gpus) - 1)


def limit(s: Setting, rows: list[Row]) -> str:
    """What keeps n_ubatch from being larger."""
    if rows[-1].fits:
        return "the context: one pass holds all of it"
    worst = min(
        next(row for row in rows if not row.fits).devices, key=lambda d: d.slots * s.slot_bytes + min(0, d.ring)
    )
    if not rows[0].fits and worst.ring + s.reserve >= SLOTS * s.slot_bytes:
        return f"the reserve: but for its {s.reserve >> 20} MiB, {rows[0].n_ubatch} tokens would fit on {worst.name}"
    if worst.weights > worst.usable:
        return f"weights: they do not fit on {worst.name}"
    if worst.weights + worst.kv_cache > worst.usable:
        return f"KV cache: with the weights it does not fit on {worst.name}"
    if worst.weights + worst.kv_cache + worst.compute + worst.stream > worst.usable:
        return f"compute buffers on {worst.name}"
    return f"the ring: no room for {SLOTS} experts on {worst.name}"
