"""Loads one model into llama.cpp: a GGUF as ever, a Hugging Face directory as a virtual GGUF with experts in place."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

from . import _native, seam
from .checkpoint import Checkpoint, GgufStream, is_checkpoint_dir, open_checkpoint
from .errors import CheckpointError, HybridMoeError, OptionError, PluginError
from .info import remedy
from .options import Options

Progress = Callable[[float], None]

# Expert tensors of a directory must come to us wherever their layer lives: their bytes are in no other buffer.
_EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_exps\."


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


class BufferOverrides:
    """Where tensors with certain names go. Holds what `params` points to: it must live until the load is over."""

    def __init__(self, params: Any, pattern: bytes, buffer_type: int):
        self._array = (_BufferOverride * 2)(_BufferOverride(pattern, buffer_type))
        point(params, "tensor_buft_overrides", self._array)


def point(params: Any, field: str, array: Any) -> None:
    """Sets a pointer whatever type llama-cpp-python declares for it."""
    address = ctypes.byref(params, getattr(type(params), field).offset)
    ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(array)


class ModelLoader:
    """One load. After it `error` holds what went wrong in our part, if anything did."""

    def __init__(self, path: str, options: Options, use_mmap: bool, progress: Progress | None):
        self.error: HybridMoeError | None = None
        self.loaded = False
        self._path = path
        self._options = options
        self._use_mmap = use_mmap
        self._progress = progress
        self._interrupted: BaseException | None = None
        self.is_directory = is_checkpoint_dir(path)
        if not self.is_directory and not use_mmap and options.experts_memory != "mmap":
            raise OptionError(
                f"{path}: experts_memory={options.experts_memory!r} needs use_mmap=True for a GGUF: without it llama.cpp "
                "reads the experts into memory of its own, neither placed nor shared"
            )
        self.checkpoint: Checkpoint | None = open_checkpoint(path) if self.is_directory else None
        if not self.is_directory:
            _check_gguf(Path(path))

    def load(self, params: Any) -> Any:
        """The seam's loader: llama_model_params -> llama_model * or None. A later attempt forgets what an earlier one said."""
        self.error, self.loaded = None, False
        keep = self._watch(params)
        _native.check(_native.library().hybrid_moe_choose_experts_memory(self._options.experts_memory.encode()))
        try:
            model = self._load_directory(params) if self.is_directory else self._load_gguf(params)
        except HybridMoeError as error:
            self.error, model = error, None
        finally:
            _native.library().hybrid_moe_choose_experts_memory(None)
        del keep
        if self._interrupted is not None:
            raise self._interrupted
        self.loaded = model is not None
        return model

    def _watch(self, params: Any) -> Any:
        """Progress reports; an exception in one (Ctrl-C too) stops the load and is raised after it."""

        def report(share: float, _: Any) -> bool:
            try:
                if self._progress is not None:
                    self._progress(share)
                return True
            except BaseException as error:  # must not cross C
                self._interrupted = error
                return False

        callback = C.llama_progress_callback(report)
        params.progress_callback = callback
        return callback

    def _load_gguf(self, params: Any) -> Any:
        take_failure()  # an older one
        model = seam.load_stock(os.fsencode(self._path), params)
        reason = take_failure()
        if reason:  # with mmap llama.cpp ignores it, and would only stop at the first token
            if model is not None:
                C.llama_model_free(model)
            raise CheckpointError(reason if reason.startswith("/") else f"{self._path}: {reason}")
        return model

    def _load_directory(self, params: Any) -> Any:
        assert self.checkpoint is not None
        overrides = BufferOverrides(params, _EXPERTS, _native.buffer_type_handle())
        params.load_mode = C.LLAMA_LOAD_MODE_NONE
        if self._options.dense_type == "q8_0" and _has_amx():
            # llama.cpp puts Q8_0 weights into a layout for AMX and then stops the process when a product's input is not
            # contiguous, as DeepSeek's are (GGML_ASSERT(*cur_backend_id != -1); stock llama.cpp 0.5.0 does on such a GGUF).
            params.use_extra_bufts = False
        # Copies are made of the files' bytes at first use, so the load itself leaves experts alone.
        in_place = self._use_mmap or self._options.experts_memory != "mmap"
        table = _native.ExpertTable(copied=not in_place)
        for tensor in self.checkpoint.experts:
            table.add(tensor)
        virtual = self.checkpoint.virtual_gguf(self._options.dense_type)
        with GgufStream(virtual, serve_experts=not in_place) as stream, table:
            model = C.llama_model_load_from_file_ptr(stream.file, params)
        del overrides
        error = _as_ours(stream.error) or self._judge(model, params, table, stream.copied_expert_bytes)
        if error is not None:
            if model is not None:
                C.llama_model_free(model)
            raise error
        return model

    def _judge(self, model: Any, params: Any, table: _native.ExpertTable, n_copied: int) -> HybridMoeError | None:
        """What is wrong with a load that raised nothing."""
        if model is None:
            return CheckpointError(
                f"{self._path}: llama.cpp cannot load this checkpoint; verbose=True shows its reasons"
            )
        if n_copied:
            return PluginError(
                f"{self._path}: this llama.cpp read {n_copied} bytes of experts that it was to leave alone: "
                f"install the tested release, llama-cpp-python=={_native.PINNED_LLAMA_CPP_PYTHON}"
            )
        if not params.vocab_only and table.n_bound != table.n_tensors:
            return PluginError(
                f"{self._path}: {table.n_tensors - table.n_bound} of {table.n_tensors} expert tensors were not placed on "
                f"{_native.DEVICE}: this host overrides where tensors go, leave such options out"
            )
        return None


def _has_amx() -> bool:
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def take_failure() -> str:
    """The plug-in's sentence on the last load or computation of this thread, once; empty when it had no complaint."""
    return str(_native.library().hybrid_moe_take_failure().decode("utf-8", "replace"))


def _as_ours(error: BaseException | None) -> HybridMoeError | None:
    if error is None or isinstance(error, HybridMoeError):
        return error
    if isinstance(error, OSError):
        return CheckpointError(f"a file of the checkpoint cannot be read: {error}")
    raise error


def _check_gguf(path: Path) -> None:
    """Says what a path is when it is no GGUF; llama.cpp would only say that it failed."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a GGUF file or a Hugging Face directory")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is no GGUF file (it begins with {magic!r}): {remedy(path)}")
