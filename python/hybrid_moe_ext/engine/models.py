"""The engine's models: one for both workers, or one for each on a GPU of its own, over the same bytes of the experts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import llama_cpp.llama_cpp as C

from .. import seam
from ..checkpoint import is_checkpoint_dir
from ..errors import HybridMoeError
from ..expert_size import expert_size
from ..llama import Llama, prepare
from ..loading import ModelLoader
from ..options import Options
from .options import EngineOptions
from .prefill import N_SEQUENCES
from .split import Split, choose_split

UNUSED_CTX = 256  # llama.cpp's least, for contexts that nothing is computed in
# Options of Llama that place layers themselves.
_PLACED_BY_CALLER = ("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "layer_devices")


class Models:
    """`prefill` and `decode` are the same object when there is one model. `decode`'s own context is used for nothing."""

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions, given: dict[str, Any]):
        """`given`: Llama's options. Raises what Llama raises."""
        self._path = os.fspath(path)
        self._options = options
        self._given = given
        self.split = self._choose()
        self.prefill = self._load_prefill()
        self.decode = self._load_decode() if self.split.is_on else self.prefill

    @property
    def streams(self) -> bool:
        """Whether long prompts may stream their experts to a GPU."""
        return bool(self.prefill.placement.devices)

    def longest(self, model: Any = None) -> int:
        """Tokens of one sequence."""
        model = self.prefill.model if model is None else model
        return min(self._options.n_ctx, C.llama_model_n_ctx_train(model) or self._options.n_ctx)

    def decode_params(self, n_ctx: int) -> Any:
        """llama_context_params of a decode context."""
        o = self._options
        params = C.llama_context_params.from_buffer_copy(self.prefill.context_params)
        params.n_seq_max = o.n_parallel + o.n_kept + 1
        params.kv_unified = True
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(o.n_batch, n_ctx)
        params.n_outputs_max = params.n_seq_max
        return params

    def free(self) -> None:
        """After all contexts but the models' own."""
        if self.decode is not self.prefill:
            self.decode.close()
        self.prefill.close()

    def _choose(self) -> Split:
        mode = self._options.split_gpus
        if mode == "off":
            return choose_split(mode, [], None, "")
        ours = {name: self._given[name] for name in Options.names() if name in self._given}
        chosen, _, gpus = prepare(ours)
        obstacle = self._obstacle(chosen, len(gpus))
        size = None if obstacle else self._size(chosen)
        return choose_split(mode, gpus, size, obstacle)

    def _obstacle(self, chosen: Options, n_gpus: int) -> str:
        """What rules out two models whatever they are."""
        if n_gpus < 2:
            return "there are no two GPUs"
        if chosen.slp == "off":
            return "slp=off, no experts are streamed"
        if not self._is_used(self._options.n_ctx):
            return "prefill_from is not less than n_ctx, no prompt is long"
        for name in _PLACED_BY_CALLER:
            if name in self._given and not (name == "layer_devices" and self._given[name] == "auto"):
                return f"{name} is given"
        if not self._given.get("use_mmap", True) and (
            chosen.experts_memory == "mmap" or not is_checkpoint_dir(self._path)
        ):
            return "use_mmap=False reads the experts into memory once per model"
        return ""

    def _size(self, chosen: Options) -> int | None:
        """Bytes of all but the experts; None: there are none."""
        loader = ModelLoader(self._path, chosen, use_mmap=True, progress=None)
        found = expert_size(self._path, loader.checkpoint, chosen.dense_type)
        return found.dense_bytes if found else None

    def _is_used(self, longest: int) -> bool:
        return self._options.prefill_from < longest

    def _load_prefill(self) -> Llama:
        """With llama_cpp.Llama's own context as the prefill worker's."""
        o = self._options
        sizes = {"n_batch": o.prefill_batch, "n_ubatch": o.prefill_batch} if o.prefill_batch else {}

        def adjust(model: Any, params: Any) -> None:
            if o.flash_attn == "auto" and o.wants_flash:
                params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_AUTO
            params.n_seq_max = N_SEQUENCES
            params.kv_unified = True
            longest = self.longest(model)
            params.n_ctx = longest if self._is_used(longest) else UNUSED_CTX
            params.n_outputs_max = N_SEQUENCES

        where = {"layer_devices": self.split.prefill} if self.split.is_on else {}
        with seam.adjusting_by(adjust):
            return Llama(self._path, **self._common(0), **sizes, **where)

    def _load_decode(self) -> Llama:
        """The second model, and room for a decode context beside it; else the first one, and `split` says why."""

        def adjust(model: Any, params: Any) -> None:
            params.n_ctx = params.n_batch = params.n_ubatch = UNUSED_CTX

        llama = None
        try:
            with seam.adjusting_by(adjust):
                llama = Llama(
                    self._path, n_gpu_layers=-1, n_ubatch=UNUSED_CTX, layer_devices=self.split.decode, **self._common(1)
                )
            trial = seam.create_stock(llama.model, self.decode_params(self._options.n_ctx))
            why = "" if trial is not None else f"a context of {self._options.n_ctx} tokens"
            if trial is not None:
                C.llama_free(trial)
        except (HybridMoeError, ValueError, RuntimeError, MemoryError) as error:
            why = str(error)
        if llama is not None and not why:
            return llama
        if llama is not None:
            llama.close()
        self.split = Split(why=f"the second one has no room on {self.split.decode}: {why}")
        logging.getLogger("hybrid_moe_ext.engine").warning("%s", self.split)
        return self.prefill

    def _common(self, i_load: int) -> dict[str, Any]:
        n = self._options.threads().alone
        common = {"verbose": False, "n_threads": n, "n_threads_batch": n, **self._given, "n_ctx": self._options.n_ctx}
        if self._options.flash_attn != "auto":
            common["flash_attn"] = self._options.wants_flash
        report: Callable[[float], None] | None = common.get("progress")
        if report is not None and self.split.is_on:
            common["progress"] = lambda share: report((i_load + share) / 2)
        return common


def with_threads(options: EngineOptions, streams: bool) -> EngineOptions:
    """While long prompts stream, the CPU is left to decode, but for the thread that feeds the devices."""
    if not streams or options.n_threads_decode:
        return options
    return replace(options, n_threads_decode=max(1, options.threads().alone - 1))
