"""`Llama`: a llama_cpp.Llama that also opens Hugging Face directories. How bytes get there is loading.py's business."""

from __future__ import annotations

import contextlib
import inspect
import os
from typing import Any

import llama_cpp

from . import _native, seam
from .errors import CheckpointError, OptionError
from .loading import ModelLoader, take_failure
from .options import Options, unknown_option

_STOCK_OPTIONS = [
    name for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY
]


class Llama(llama_cpp.Llama):
    """A `llama_cpp.Llama` whose Mixture-of-Experts layers run on our back end.

    `model_path`: a GGUF file, or a Hugging Face directory (config.json, tokenizer.json, safetensors; BF16 or FP8),
    which is used in place: nothing is converted or copied, experts are read from disk when they are first needed.
    `use_mmap=False` reads all of it into memory instead.

    Options of our own: `dense_type` ("bf16", "q8_0", "f32": what a directory's other weights are loaded as), `isa`,
    `team`, `pin`, `experts_memory` (see `hybrid_moe_ext.Options`), and `progress`, a function that gets the share
    loaded, 0 to 1. All others are llama_cpp.Llama's; unlike there, an unknown one is an error.

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
        chosen = Options.resolve(**ours)
        self.status = _native.register(chosen)
        loader = ModelLoader(path, chosen, use_mmap=options.get("use_mmap", True), progress=progress)
        if loader.is_directory and options.get("use_mlock"):
            raise OptionError("use_mlock does not work with a Hugging Face directory yet: leave it out")
        try:
            with seam.loading_by(loader.load):
                super().__init__(path, **options)
        except ValueError as error:
            if loader.error is not None:
                raise loader.error from error
            if isinstance(error, CheckpointError) or loader.loaded:
                raise
            raise CheckpointError(
                f"{path}: llama.cpp cannot load this file: {error}; verbose=True shows its reasons"
            ) from error
        self.checkpoint = loader.checkpoint
        seam.explain_decode(self._ctx, self._explain)

    def _explain(self, error: RuntimeError) -> Exception:
        reason = take_failure()
        return CheckpointError(f"{self.model_path}: {reason}") if reason else error

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | self._our_options
