"""What goes where when experts are streamed to GPUs: layers, expert tensors, tokens per pass. Without a GPU nothing is touched.

Everything but the experts goes to the GPUs, the experts stay in host memory, and a prompt is computed in as few passes as memory
allows: every pass streams all experts once, however many tokens share it (docs/fits.md has what that means per model).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C
from llama_cpp._utils import suppress_stdout_stderr

from . import seam
from ._native import ggml_function
from .errors import OptionError
from .expert_size import ExpertSize
from .gpus import Gpu, choose_gpus, find_gpus
from .loading import BufferOverrides, point
from .options import Options
from .patched.switches import TILE, switched_on

# Tokens per pass, at most. A pass streams all experts: with 51 GB/s that is the time in which one GPU of today computes about so
# many tokens (DeepSeek-V3: 13 s), so more tokens save nothing, and they take the memory that look-ahead streams into. In host
# memory so many cost 64 MiB in llama-cpp-python's batch, and 2 bytes per token of the pass and of the context for the mask.
MOST_TOKENS = 16384
# With graphs in token tiles (patches/0001), whose buffers for these cost less than for 16384 without.
MOST_TOKENS_IN_TILES = 32768
# With logits for every token; each needs a row of the vocabulary in device and host memory.
MOST_TOKENS_WITH_LOGITS = 2048
# llama.cpp's own default. Below, streaming is rarely worth it.
FEWEST_TOKENS = 512
# Experts that must fit on a device next to everything else, so that copies overlap with computation whatever the routing.
RING_SLOTS = 8
_TILE_ROWS = 1024  # rows of one expert that are computed at once: device_tile_rows in cpp/stream/expert_graph.h

# Sent to "the CPU", llama.cpp asks all buffer types of host memory, ours first: type by type they come here or stay its own.
_EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_(ch)?exps\."


def most_tokens() -> int:
    """Of a pass, where memory allows it: by what this process's llama.cpp can do."""
    return MOST_TOKENS_IN_TILES if TILE in switched_on() else MOST_TOKENS


@dataclass(frozen=True)
class Placement:
    """What was chosen for one model. `n_gpu_layers` -1: all layers; `flash_attention` "auto": where the device has it."""

    devices: tuple[str, ...]  # that experts are streamed to; empty: everything is as without a GPU
    n_gpu_layers: int
    n_batch: int
    n_ubatch: int
    flash_attention: str  # "auto", "on" or "off"
    why: str
    layer_devices: tuple[str, ...] = ()  # that layers lie on

    def __str__(self) -> str:
        if not self.devices:
            return f"no experts are streamed: {self.why}"
        where = "there" if self.layer_devices == self.devices else f"on {', '.join(self.layer_devices)}"
        there = (
            f"{_layers(self.n_gpu_layers)} without their experts {where}"
            if self.n_gpu_layers
            else "all layers on the CPU"
        )
        return (
            f"long prompts stream experts to {', '.join(self.devices)}; {there}; "
            f"up to {self.n_ubatch} tokens per pass, flash attention {self.flash_attention} ({self.why})"
        )


class Placer:
    """Chooses for one model what its caller did not give; used by the seam while the model and its context are made."""

    def __init__(self, gpus: list[Gpu], experts: ExpertSize, options: Options, given: dict[str, Any]):
        """`given`: what the caller of llama_cpp.Llama gave, by name."""
        self._gpus = gpus
        self._layer_gpus = (
            gpus if options.layer_devices == "auto" else choose_gpus(options.layer_devices, "layer_devices")
        )
        self._experts = experts
        self._options = options
        self._given = given
        self._able = self._with_room(gpus, FEWEST_TOKENS)  # before anything is loaded; others never get experts
        self._kept: list[Any] = []
        self._why: list[str] = []

    # --- the model

    def load(self, load: Callable[[Any], Any], params: Any, context_params: Any) -> Any:
        """`load`: llama_model_params -> llama_model * or None. As many layers on the GPUs as leave room for a context."""
        host_memory = ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p, [])()
        self._kept = [BufferOverrides(params, _EXPERTS, host_memory)]
        # By default llama.cpp chooses: it knows which devices are one GPU seen by two back ends.
        if self._options.devices != "auto" or self._options.layer_devices != "auto":
            self._point_at(self._layer_gpus, params)
        if "n_gpu_layers" in self._given:
            return load(params)
        n = self._experts.n_layer
        for n_layers in (-1, *sorted({n * 3 // 4, n // 2, n // 4, 0}, reverse=True)):
            params.n_gpu_layers = n_layers
            model = load(params)
            if model is None and not self._may_lack_memory():
                return None
            if model is not None and self._has_room(model, context_params):
                if n_layers >= 0:
                    self._why.append(f"more layers do not fit on {_names(self._layer_gpus)}")
                return model
            if model is not None:
                C.llama_model_free(model)
        self._why.append(f"no room for llama.cpp's buffers on {_names(self._layer_gpus)}")
        self._point_at([], params)
        return load(params)

    def _point_at(self, gpus: list[Gpu], params: Any) -> None:
        """llama.cpp uses these, and no others."""
        self._kept.append((ctypes.c_void_p * (len(gpus) + 1))(*[gpu.handle for gpu in gpus]))
        point(params, "devices", self._kept[-1])

    def _may_lack_memory(self) -> bool:
        """A load that failed although memory is plenty fails with fewer layers as well."""
        return 2 * self._experts.dense_bytes > sum(gpu.memory()[0] for gpu in self._layer_gpus)

    def _has_room(self, model: Any, params: Any) -> bool:
        trial = type(params).from_buffer_copy(params)
        self._set(trial, self._fewest(trial))
        context = self._create(model, trial)
        if context is None:
            return False
        has = len(self._with_room(self._able, trial.n_ubatch)) == len(self._able)
        C.llama_free(context)
        return has

    # --- the context

    def create(self, model: Any, params: Any) -> Any:
        """A llama_context with the largest pass that fits; `params` say in the end what it has."""
        if params.embeddings or "n_ubatch" in self._given:
            self._set(params, int(self._given.get("n_ubatch", params.n_ubatch)))
            context = self._create(model, params)
        else:
            context = self._search(model, params)
        if context is None:
            raise OptionError(
                f"llama.cpp cannot make a context of n_ctx={params.n_ctx} for {params.n_ubatch} tokens per pass with "
                f"{_layers(self._given.get('n_gpu_layers', -1))} on {_names(self._layer_gpus)}: choose a smaller n_ctx, fewer "
                "n_gpu_layers or a smaller n_ubatch, or devices=[] to leave the GPUs alone"
            )
        return context

    def _search(self, model: Any, params: Any) -> Any:
        """Halves from the most, then goes up again between what fitted and what did not."""
        devices = self._with_room(self._able, FEWEST_TOKENS)
        n = self._most(model, params)
        if not devices:
            self._why.append(f"hardly room for experts on {_names(self._gpus)}")
            n = min(n, FEWEST_TOKENS)
        good, bad = 0, 0
        context = None
        while n:
            self._free(context)
            self._set(params, n)
            context = self._create(model, params)
            if context is not None and len(self._with_room(devices, n)) == len(devices):
                good = n
            else:
                bad = n
                if n <= FEWEST_TOKENS:
                    break
            n = _next(good, bad)
        if bad:
            self._why.append(f"{bad} tokens per pass leave no room for {RING_SLOTS} experts")
        if good and params.n_ubatch != good:
            self._free(context)
            self._set(params, good)
            context = self._create(model, params)
        return context

    def _create(self, model: Any, params: Any) -> Any:
        """None when there is no memory. Attempts may fail, so without verbose=True nobody wants to see their complaints."""
        with suppress_stdout_stderr(disable=bool(self._given.get("verbose", True))):
            return seam.create_stock(model, params)

    def _free(self, context: Any) -> None:
        if context is not None:
            C.llama_free(context)

    def _most(self, model: Any, params: Any) -> int:
        n_ctx = params.n_ctx or C.llama_model_n_ctx_train(model)
        cap = MOST_TOKENS_WITH_LOGITS if self._wants_all_logits() else most_tokens()
        return min(n_ctx, cap, self._given.get("n_batch", cap))

    def _fewest(self, params: Any) -> int:
        if "n_ubatch" in self._given:
            return int(self._given["n_ubatch"])
        return min(FEWEST_TOKENS, params.n_ctx or FEWEST_TOKENS, self._given.get("n_batch", FEWEST_TOKENS))

    def _set(self, params: Any, n_ubatch: int) -> None:
        """All that a context of so many tokens per pass has, but for what the caller gave."""
        if "flash_attn" not in self._given:
            params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_AUTO
        if params.embeddings:
            return  # texts of many sequences share a batch there, and llama_cpp.Llama has counted on its size already
        n_batch = self._given.get("n_batch", max(n_ubatch, FEWEST_TOKENS) if "n_ubatch" in self._given else n_ubatch)
        params.n_batch = min(n_batch, params.n_ctx or n_batch)
        params.n_ubatch = min(n_ubatch, params.n_batch)
        if not self._wants_all_logits():
            # llama_cpp.Llama asks for the last token's logits only. The default, a row of the vocabulary for every token of a
            # pass, is gigabytes on the device at these sizes.
            params.n_outputs_max = params.n_seq_max

    def _wants_all_logits(self) -> bool:
        return bool(self._given.get("logits_all")) or self._given.get("draft_model") is not None

    def _with_room(self, gpus: list[Gpu], n_tokens: int) -> list[Gpu]:
        """Those on which a batch and a ring fit, now, as cpp/stream/device_stream.cpp takes them."""
        e = self._experts
        batch = 2 * n_tokens * e.n_embd * 4 + 2 * _TILE_ROWS * (e.n_ff + e.n_embd) * 4
        ring = RING_SLOTS * e.slot_bytes
        if self._options.ring_mib != "auto" and float(self._options.ring_mib) > 0:
            ring = min(ring, max(2 * e.slot_bytes, int(float(self._options.ring_mib) * 2**20)))
        share = 0.8 if self._options.vram_share == "auto" else float(self._options.vram_share)
        return [gpu for gpu in gpus if gpu.memory()[0] * share >= batch + ring]

    # --- afterwards

    def placement(self, model_params: Any, context_params: Any) -> Placement:
        flash = {C.LLAMA_FLASH_ATTN_TYPE_AUTO: "auto", C.LLAMA_FLASH_ATTN_TYPE_ENABLED: "on"}
        n_layers = model_params.n_gpu_layers
        kept = [name for name in ("n_gpu_layers", "n_batch", "n_ubatch", "flash_attn") if name in self._given]
        why = [f"slp={self._options.slp}", *self._why, *([f"as given: {', '.join(kept)}"] if kept else [])]
        return Placement(
            devices=tuple(gpu.name for gpu in self._gpus),
            n_gpu_layers=-1 if n_layers < 0 or n_layers > self._experts.n_layer else n_layers,
            n_batch=context_params.n_batch,
            n_ubatch=context_params.n_ubatch,
            flash_attention=flash.get(context_params.flash_attn_type, "off"),
            why="; ".join(why),
            layer_devices=tuple(gpu.name for gpu in self._layer_gpus),
        )


def _next(good: int, bad: int) -> int:
    """The next number of tokens to try, 0: enough is known."""
    if not bad:
        return 0
    if not good:
        return max(bad // 2, FEWEST_TOKENS)
    step = max(FEWEST_TOKENS // 2, bad // 8)
    middle = (good + bad) // 2 // 256 * 256
    return middle if bad - good > step and good < middle < bad else 0


def _names(gpus: list[Gpu]) -> str:
    return ", ".join(gpu.name for gpu in gpus)


def _layers(n: int) -> str:
    return "all layers" if n < 0 else f"{n} layer{'' if n == 1 else 's'}"


def nothing_streams(why: str, model_params: Any, context_params: Any) -> Placement:
    """Of a model that is placed as its caller and llama-cpp-python have it."""
    is_flash = context_params.flash_attn_type == C.LLAMA_FLASH_ATTN_TYPE_ENABLED
    n_layers = model_params.n_gpu_layers
    return Placement(
        (),
        -1 if n_layers == 0x7FFFFFFF else n_layers,
        context_params.n_batch,
        context_params.n_ubatch,
        "on" if is_flash else "off",
        why,
    )


def attention_on_gpu(placement: Placement) -> bool:
    """Whether layers lie on a GPU, with experts streamed or not."""
    return placement.n_gpu_layers != 0 and bool(find_gpus())
