"""What `fits` answers: plain records in bytes, seconds and tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .accounting import Gpu
from .cost import Cost


@dataclass(frozen=True)
class DeviceUse:
    """One GPU, in bytes. What is left after all others is the ring of expert slots."""

    name: str
    usable: int  # without the reserve
    weights: int
    kv_cache: int
    compute: int  # llama.cpp's buffers for intermediate results
    stream: int  # ours: a layer's input and partial sum, and where FP8 is expanded
    ring: int  # below zero: so much is missing
    slots: int  # whole experts that the ring holds


@dataclass(frozen=True)
class Row:
    """One n_ubatch that was tried."""

    n_ubatch: int
    fits: bool  # two slots or more on every device
    devices: tuple[DeviceUse, ...]
    host_compute: int  # llama.cpp's buffers in host memory
    ceiling_tps: float  # tokens per pass / pass_s: what the links alone allow
    tps: float  # the same with returned activations and with compute at the given TFLOP/s


@dataclass(frozen=True)
class Fits:
    model: str
    architecture: str
    expert_types: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    split_mode: str
    split_reason: str
    links: tuple[float, ...]  # GB/s
    fp8_link: str | None  # how FP8 experts cross it; None for other types
    n_ctx: int
    n_ctx_train: int
    n_prompt: int
    tflops: float
    link_bytes: int  # that one pass over the experts moves
    slot_bytes: int
    pass_s: float  # link_bytes over all links
    rows: tuple[Row, ...]
    best: Row | None  # the largest n_ubatch that fits
    fastest: (
        Row | None
    )  # the tried one with the highest tps: no more passes, and what it does not take goes to the ring
    limited_by: str  # what keeps n_ubatch from being larger, in words
    slowest: str  # at `fastest`: "link" or "compute"; "" without it
    n_passes: int  # for the prompt, at `fastest`
    ttft_link_s: float  # n_passes x pass_s
    ttft_s: float  # with activations and compute
    cost: Cost  # of the prompt
    serial_s: float  # everything but the experts on one GPU at a time, as with "none" and "layer"
    tensor_s: float | None  # the same with "tensor": divided, with its sums over the links; None where it cannot be had
    tensor_sum_bytes: int  # that "tensor" sends each way over every link for its sums
    split_modes: dict[str, str]  # of several GPUs: llama.cpp's mode -> "", or why it refuses
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
