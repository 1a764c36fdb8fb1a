"""`Llama`: a llama_cpp.Llama that also opens Hugging Face directories. How bytes get there is loading.py's business, what goes
to GPUs placement.py's."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import llama_cpp

from . import _native, seam
from .errors import CheckpointError, OptionError
from .expert_size import expert_size
from .gpus import Gpu, choose_gpus, device_option
from .loading import ModelLoader, take_failure
from .options import Options, unknown_option
from .placement import Placement, Placer, nothing_streams

_STOCK_OPTIONS = [
    name for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY
]
# What is chosen for a model when its caller does not.
_CHOSEN = ("n_gpu_layers", "n_batch", "n_ubatch", "flash_attn")


class Llama(llama_cpp.Llama):
    """A `llama_cpp.Llama` whose Mixture-of-Experts layers run on our back end.

    `model_path`: a GGUF file, or a Hugging Face directory (config.json, tokenizer.json, safetensors; BF16 or FP8),
    which is used in place: nothing is converted or copied, experts are read from disk when they are first needed.
    `use_mmap=False` reads all of it into memory instead.

    With a GPU in this process's ggml, long prompts stream the experts to it: `devices` (["CUDA0", "CUDA1"], "auto" or
    "none") and `slp` ("auto", "on", "off") choose. Then everything but the experts goes to these GPUs, and
    `n_gpu_layers`, `n_batch`, `n_ubatch` and `flash_attn` get values that suit, unless they are given; `placement` says which.
    `layer_devices` (like `devices`) puts layers on fewer GPUs than experts are streamed to.

    More options of our own: `dense_type` ("bf16", "q8_0", "f32": what a directory's other weights are loaded as), `isa`,
    `team`, `pin`, `experts_memory` and those of streaming (see `hybrid_moe_ext.Options`), and `progress`, a function that
    gets the share loaded, 0 to 1. All others are llama_cpp.Llama's; unlike there, an unknown one is an error.

    Raises CheckpointError, OptionError or PluginError (all HybridMoeError), each with the remedy.
    """

    def __init__(self, model_path: str | os.PathLike[str], **options: Any):
        self._stack = contextlib.ExitStack()  # llama_cpp.Llama.__del__ closes it, also when we raise before it is there
        self._our_options = {name: options.pop(name) for name in (*Options.names(), "progress") if name in options}
        for name in options:
            if name not in _STOCK_OPTIONS:
                raise unknown_option(name, [*_STOCK_OPTIONS, *Options.names(), "progress"])
        path = os.fspath(model_path)
        ours = dict(self._our_options)
        progress = ours.pop("progress", None)
        chosen, self.status, gpus = prepare(ours)
        loader = ModelLoader(path, chosen, use_mmap=options.get("use_mmap", True), progress=progress)
        if loader.is_directory and options.get("use_mlock"):
            raise OptionError("use_mlock does not work with a Hugging Face directory yet: leave it out")
        self._given = [name for name in options if name in _CHOSEN]
        placer, why = _placer(loader, path, chosen, gpus, options)
        if placer is None and chosen.layer_devices != "auto":
            raise OptionError(
                f"layer_devices={chosen.layer_devices!r} says where layers lie when experts are streamed, and {why}: leave it out"
            )
        try:
            with self._placed_by(loader, placer):
                super().__init__(path, **options)
        except ValueError as error:
            if loader.error is not None:
                raise loader.error from error
            if isinstance(error, (CheckpointError, OptionError)) or loader.loaded:
                raise
            raise CheckpointError(
                f"{path}: llama.cpp cannot load this file: {error}; verbose=True shows its reasons"
            ) from error
        self.checkpoint = loader.checkpoint
        params = self.model_params, self.context_params
        self.placement: Placement = placer.placement(*params) if placer else nothing_streams(why, *params)
        seam.explain_decode(self._ctx, self._explain)

    @contextlib.contextmanager
    def _placed_by(self, loader: ModelLoader, placer: Placer | None) -> Iterator[None]:
        """Inside, the model and its context are made by ours."""
        if placer is None:
            with seam.loading_by(loader.load):
                yield
            return

        def create(model: Any, params: Any) -> Any:
            context = placer.create(model, params)
            # llama_cpp.Llama feeds a prompt in pieces of this many. Its array of logits keeps the rows that it had without us:
            # logits of a whole batch are wanted with logits_all only, and then there is a row per token of the context.
            self.n_batch = params.n_batch
            return context

        with (
            seam.loading_by(lambda params: placer.load(loader.load, params, self.context_params)),
            seam.creating_by(create),
        ):
            yield

    def _explain(self, error: RuntimeError) -> Exception:
        reason = take_failure()
        return CheckpointError(f"{self.model_path}: {reason}") if reason else error

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | self._our_options
        return {name: value for name, value in state.items() if name not in _CHOSEN or name in self._given}


def prepare(ours: dict[str, Any]) -> tuple[Options, _native.Status, list[Gpu]]:
    """Loads the plug-in. Returns our options as they hold in this process, what runs, and the GPUs that experts stream to."""
    ours = dict(ours)
    for name in ("devices", "layer_devices"):
        if name in ours:
            ours[name] = device_option(ours[name], name)
    chosen = Options.resolve(**ours)
    choose_gpus(chosen.devices)  # a name that is not there must not become the process's choice
    choose_gpus(chosen.layer_devices, "layer_devices")
    status = _native.register(chosen)
    chosen = _native.loaded_options(chosen)
    return chosen, status, choose_gpus(chosen.devices)


def _placer(
    loader: ModelLoader, path: str, chosen: Options, gpus: list[Gpu], options: dict[str, Any]
) -> tuple[Placer | None, str]:
    """None, and why, when everything is to be as without GPUs."""
    if not gpus:
        return None, "this host has no GPU" if chosen.devices == "auto" else f"devices={chosen.devices}"
    if chosen.slp == "off":
        return None, "slp=off"
    if options.get("vocab_only"):
        return None, "vocab_only"
    experts = expert_size(path, loader.checkpoint, chosen.dense_type)
    if experts is None:
        return None, "this is not a Mixture-of-Experts model"
    return Placer(gpus, experts, chosen, options), ""
