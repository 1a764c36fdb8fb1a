"""The process that asks llama.cpp: loads a model by its header alone (`no_alloc`) and says what contexts of it would take.

    python -m hybrid_moe_ext.fits.child

One JSON object per line in, one out; accounting.py has the other end. A process of its own, because assumed GPUs stay registered,
because llama.cpp's log is one per process, and because a header that makes llama.cpp abort must not end the caller.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import llama_cpp.llama_cpp as C

from .. import _native, seam
from .._native import ggml_function
from ..checkpoint import GgufStream, open_checkpoint
from ..errors import HybridMoeError, PluginError
from ..loading import _EXPERTS, _BufferOverride
from ..options import Options
from . import assumed_gpu, breakdown

_TYPES = {1: "GPU", 2: "IGPU"}  # GGML_BACKEND_DEVICE_TYPE_*: those that can carry layers
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
_FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED

_lines: deque[str] = deque(maxlen=400)
_errors: list[str] = []


def _keep(level: int, text: bytes, _: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    _lines.append(line)
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        _errors.append(line)


_log = C.llama_log_callback(_keep)  # C keeps a pointer to it


class Session:
    def __init__(self) -> None:
        self._model: Any = None
        self._devices: Any = None  # C has pointers to these
        self._overrides: Any = None

    def start(self, assumed: list[int]) -> dict[str, Any]:
        C.llama_log_set(_log, None)
        C.llama_backend_init()
        if other := _native.load_named_backend():
            raise PluginError(f"GGML_BACKEND_PATH={other} cannot be loaded ({_reasons()}): unset it or correct it")
        _native.register(Options.resolve())
        if assumed:
            assumed_gpu.register(assumed)
        return {"devices": _devices(assumed=bool(assumed))}

    def load(self, kind: str, path: str, dense_type: str, split_mode: str, devices: list[str]) -> dict[str, Any]:
        self._free_model()
        _errors.clear()
        params = C.llama_model_default_params()
        params.no_alloc, params.load_mode = True, C.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers, params.split_mode, params.main_gpu = -1, _SPLIT_MODES[split_mode], 0
        handles = [_device_handle(name) for name in devices]
        self._devices = (ctypes.c_void_p * (len(handles) + 1))(*handles)
        _set_pointer(params, "devices", ctypes.addressof(self._devices))
        self._overrides = (_BufferOverride * 2)(_BufferOverride(_EXPERTS, _native.buffer_type_handle()))
        _set_pointer(params, "tensor_buft_overrides", ctypes.addressof(self._overrides))
        with ExitStack() as stack:
            if kind == "directory":
                virtual = open_checkpoint(path).virtual_gguf(dense_type)
                stream = stack.enter_context(GgufStream(virtual))
                self._model = C.llama_model_load_from_file_ptr(stream.file, params)
            else:
                self._model = seam.load_stock(os.fsencode(path), params)
        if not self._model:
            return {"refused": _reasons() or "llama.cpp gives no reason"}
        return {"meta": _metadata(self._model), "n_ctx_train": C.llama_model_n_ctx_train(self._model)}

    def measure(self, n_ubatch: int, n_ctx: int, kv_type: str) -> dict[str, Any]:
        """What a context of one sequence would take. One row of logits, its last: the default would be one per token."""
        _errors.clear()
        _lines.clear()
        options = C.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, n_ubatch, n_ubatch
        options.n_seq_max = options.n_outputs_max = options.n_outputs_max_per_seq = 1
        options.type_k = options.type_v = _KV_TYPES[kv_type]
        options.flash_attn_type = _FLASH_ATTENTION
        context = C.llama_init_from_model(self._model, options)
        if not context:
            return {"refused": _reasons() or "llama.cpp gives no reason"}
        uses = breakdown.read(context)
        _compare_with_log(uses)
        C.llama_free(context)
        return {"uses": [asdict(use) for use in uses]}

    def _free_model(self) -> None:
        if self._model:
            C.llama_model_free(self._model)
            self._model = None


def _compare_with_log(uses: list[breakdown.BufferUse]) -> None:
    """The map's layout is libstdc++'s; what llama.cpp printed about the same buffers is plain text."""
    end = " MiB"
    printed = [line for line in _lines if "compute buffer size =" in line and line.endswith(end)]
    total = sum(float(line.removesuffix(end).rsplit(" ", 1)[1]) for line in printed)
    walked = sum(use.compute for use in uses) / 2**20
    if not printed or abs(total - walked) > 0.01 * len(printed) + 0.01:
        raise PluginError(
            f"llama.cpp's memory accounting reads as {walked:.2f} MiB of compute buffers, its log says {total:.2f}: "
            f"install the tested release, llama-cpp-python=={_native.PINNED_LLAMA_CPP_PYTHON}"
        )


def _reasons() -> str:
    """The first complaint; those after it say that something failed."""
    return re.sub(r"^\w+: (error loading model: )?", "", _errors[0]) if _errors else ""


def _set_pointer(params: Any, field: str, address: int) -> None:
    at = ctypes.byref(params, getattr(type(params), field).offset)
    ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))[0] = address


def _device_handle(name: str) -> int:
    handle = ggml_function("ggml_backend_dev_by_name", ctypes.c_void_p, [ctypes.c_char_p])(name.encode())
    if not handle:
        raise PluginError(f"there is no device {name}: hybrid-moe fits without --vram lists those of this machine")
    return int(handle)


def _devices(assumed: bool) -> list[dict[str, Any]]:
    """Those that can carry layers: the assumed ones if there are any, else discrete GPUs, else integrated ones."""
    get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t])
    found = [_describe(get(i)) for i in range(ggml_function("ggml_backend_dev_count", ctypes.c_size_t, [])())]
    if assumed:
        return [d for d in found if d["description"] == "assumed GPU"]
    return [d for d in found if d["type"] == "GPU"] or [d for d in found if d["type"] == "IGPU"]


def _describe(handle: int) -> dict[str, Any]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    pointer = ctypes.POINTER(ctypes.c_size_t)
    ggml_function("ggml_backend_dev_memory", None, [ctypes.c_void_p, pointer, pointer])(handle, free, total)
    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p])(handle)
    registry = ggml_function("ggml_backend_dev_backend_reg", ctypes.c_void_p, [ctypes.c_void_p])(handle)
    return {
        "name": _text("ggml_backend_dev_name", handle),
        "description": _text("ggml_backend_dev_description", handle),
        "backend": _text("ggml_backend_reg_name", registry),
        "type": _TYPES.get(kind, "other"),
        "free": free.value,
        "total": total.value,
    }


def _text(function: str, handle: int) -> str:
    return str(ggml_function(function, ctypes.c_char_p, [ctypes.c_void_p])(handle).decode("utf-8", "replace"))


def _metadata(model: Any) -> dict[str, str]:
    """All but the tokenizer's."""
    found = {}
    for i in range(C.llama_model_meta_count(model)):
        buffer = ctypes.create_string_buffer(512)
        C.llama_model_meta_key_by_index(model, i, buffer, 512)
        key = buffer.value.decode("utf-8", "replace")
        if not key.startswith("tokenizer."):
            C.llama_model_meta_val_str_by_index(model, i, buffer, 512)
            found[key] = buffer.value.decode("utf-8", "replace")
    return found


def main() -> None:
    session = Session()
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer = getattr(session, command)(**request)
        except HybridMoeError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
