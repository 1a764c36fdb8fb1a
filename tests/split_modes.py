"""Child process of test_fits: python split_modes.py SIMGPU GGUF MODE... Attention on two simulated GPUs, experts on our device.

Prints as JSON, per split mode, how far its logits are from the CPU's and what it took, or llama.cpp's refusal.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from hybrid_moe_ext import _native
from hybrid_moe_ext.loading import _EXPERTS, _BufferOverride

MODES = {"cpu": 1, "none": 0, "layer": 1, "row": 2, "tensor": 3}
N_CTX, N_TOKENS, F32 = 256, 24, 0

errors: list[str] = []
P, TEXT = ctypes.c_void_p, ctypes.c_char_p


def keep(level: int, text: bytes, _: Any) -> None:
    if level == 4:
        errors.append(text.decode().strip())


log = C.llama_log_callback(keep)


def set_pointer(params: Any, field: str, address: int) -> None:
    at = ctypes.byref(params, getattr(type(params), field).offset)
    ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))[0] = address


class Refused(Exception):
    pass


class Run:
    def __init__(self, path: str, mode: str):
        errors.clear()
        by_name = _native.ggml_function("ggml_backend_dev_by_name", P, [TEXT])
        names = [] if mode == "cpu" else [b"SimGPU0", b"SimGPU1"]
        self.devices = (ctypes.c_void_p * 3)(*(by_name(name) for name in names))
        self.overrides = (_BufferOverride * 2)(_BufferOverride(_EXPERTS, _native.buffer_type_handle()))
        params = C.llama_model_default_params()
        set_pointer(params, "devices", ctypes.addressof(self.devices))
        set_pointer(params, "tensor_buft_overrides", ctypes.addressof(self.overrides))
        params.split_mode, params.n_gpu_layers = MODES[mode], 0 if mode == "cpu" else -1
        self.model = C.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise Refused(errors[0])
        options = C.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = N_CTX
        options.n_threads = options.n_threads_batch = options.flash_attn_type = 1
        options.n_outputs_max = options.n_outputs_max_per_seq = 1
        options.type_k = options.type_v = F32
        self.context = C.llama_init_from_model(self.model, options)
        assert self.context, errors

    def last_logits(self) -> np.ndarray:
        batch = C.llama_batch_init(N_TOKENS, 0, 1)
        batch.n_tokens = N_TOKENS
        for i in range(N_TOKENS):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = (7 * i + 3) % 64, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == N_TOKENS - 1
        assert C.llama_decode(self.context, batch) == 0, errors
        C.llama_batch_free(batch)
        n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.model))
        at = ctypes.cast(C.llama_get_logits_ith(self.context, -1), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(at, (n_vocab,)).astype(np.float64)

    def free(self) -> None:
        C.llama_free(self.context)
        C.llama_model_free(self.model)


def simgpu(name: str, result: Any) -> Any:
    by_name = _native.ggml_function("ggml_backend_reg_by_name", P, [TEXT])
    address = _native.ggml_function("ggml_backend_reg_get_proc_address", P, [P, TEXT])(
        by_name(b"SimGPU"), name.encode()
    )
    return ctypes.CFUNCTYPE(result)(address)


def books() -> list[dict[str, Any]]:
    return json.loads(simgpu("simgpu_stats", TEXT)())["devices"]


def attempt(path: str, mode: str, reference: np.ndarray) -> dict[str, Any]:
    simgpu("simgpu_reset_stats", None)()
    before = _native.counters().n_matmuls
    try:
        run = Run(path, mode)
    except Refused as refusal:
        return {"refused": str(refusal)}
    used = [d["memory"]["used"] for d in books()]
    logits = run.last_logits()
    run.free()
    return {
        "nmse": float(((logits - reference) ** 2).sum() / (reference**2).sum()),
        "n_ops": [d["compute"]["n"] for d in books()],
        "used": used,
        "n_matmuls": _native.counters().n_matmuls - before,
    }


def main() -> None:
    library, path, *modes = sys.argv[1:]
    C.llama_log_set(log, None)
    C.llama_backend_init()
    assert _native.ggml_function("ggml_backend_load", P, [TEXT])(library.encode())
    _native.register()
    cpu = Run(path, "cpu")
    reference = cpu.last_logits()
    cpu.free()
    print(json.dumps({mode: attempt(path, mode, reference) for mode in modes}))


main()
