"""The host process of vulkan_host.py: llama-cpp-python's bindings on the libraries of an npm package that has Vulkan.

    python child.py REQUEST.json       one JSON object per run on stdout, see `Ran` in vulkan_host.py

The environment names the libraries (LLAMA_CPP_LIB_PATH) and the devices (GGML_VK_VISIBLE_DEVICES)."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def bind_what_there_is() -> None:
    """The package's libraries are some weeks older than the bindings and lack a dozen functions, none of them used here;
    the structures are the same. Without this, importing the bindings fails at the first."""
    original = ctypes.CDLL.__getattr__

    def tolerant(library: ctypes.CDLL, name: str) -> Any:
        try:
            return original(library, name)
        except AttributeError:
            if not name.startswith("llama_"):
                raise
            return ctypes.CFUNCTYPE(None)(lambda: sys.exit(f"{name} is not in {library._name}"))

    ctypes.CDLL.__getattr__ = tolerant  # type: ignore[method-assign]


bind_what_there_is()

import llama_cpp.llama_cpp as C  # noqa: E402
import numpy as np  # noqa: E402

from hybrid_moe_ext import _native  # noqa: E402

GGML_F32, N_CTX = 0, 256
N_LOOK = 16  # tokens of the pass that shows where results lie; up to 8, the GPU would need other shaders
# Where the scheduler put the results of these says which device computed attention.
ATTENTION = ("kqv_out", "attn_out", "fattn", "__fattn__", "kqv_merged", "Qcur", "Kcur")
EXPERTS = ("ffn_moe_gate", "ffn_moe_up", "ffn_moe_down", "ffn_moe_out", "ffn_moe_gate_up")


class Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class TensorHead(ctypes.Structure):
    """The first fields of ggml_tensor, which ggml 0.20 to 0.25 have alike."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4)]


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    return _native.ggml_function(name, result, list(arguments))


P = ctypes.c_void_p
device_by_name = ggml("ggml_backend_dev_by_name", P, ctypes.c_char_p)
buffer_type_of = ggml("ggml_backend_dev_buffer_type", P, P)
buffer_name = ggml("ggml_backend_buffer_name", ctypes.c_char_p, P)
tensor_name = ggml("ggml_get_name", ctypes.c_char_p, P)


def device(name: str) -> int:
    found = device_by_name(name.encode())
    assert found, f"this host has no device {name}"
    return found


def buffer_type(name: str) -> int:
    return _native.buffer_type_handle() if name == _native.DEVICE else buffer_type_of(device(name))


def load(run: dict[str, Any]) -> Any:
    options = C.llama_model_default_params()
    handles = [device(name) for name in run["devices"]]
    options.devices = ctypes.cast((P * (len(handles) + 1))(*handles, None), P)
    overrides = (Override * (len(run["overrides"]) + 1))()
    for i, (pattern, name) in enumerate(run["overrides"].items()):
        overrides[i] = Override(pattern.encode(), buffer_type(name))
    options.tensor_buft_overrides = ctypes.cast(overrides, P)
    shares = (ctypes.c_float * C.LLAMA_MAX_DEVICES)(*run["tensor_split"])  # as many as the libraries read
    if run["tensor_split"]:
        options.tensor_split = shares
    options.n_gpu_layers = run["n_gpu_layers"]
    options.split_mode = {"none": 0, "layer": 1, "row": 2}[run["split_mode"]]
    options.use_extra_bufts = False  # stock's AMX layout of Q8_0 aborts on DeepSeek's attention
    if not run["mmap"]:
        options.load_mode = C.LLAMA_LOAD_MODE_NONE
    model = C.llama_model_load_from_file(run["model"].encode(), options)
    assert model, f"{run['model']} does not load"
    return model


@contextmanager
def context(model: Any, run: dict[str, Any], callback: Any = None) -> Iterator[Any]:
    options = C.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = N_CTX, run["n_batch"], run["n_ubatch"]
    options.n_threads = options.n_threads_batch = run["n_threads"]
    options.type_k = options.type_v = GGML_F32  # an F16 cache would cost 4e-7
    options.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_ENABLED if run["flash_attn"] else C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if callback is not None:
        options.cb_eval = callback
    made = C.llama_init_from_model(model, options)
    assert made, f"{run['model']}: no context"
    yield made
    C.llama_free(made)


def logits(model: Any, made: Any, tokens: list[int]) -> np.ndarray:
    """[n_tokens, n_vocab]: the whole prompt in one llama_decode, which cuts it into passes of n_ubatch tokens."""
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    batch = C.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert C.llama_decode(made, batch) == 0, "llama_decode failed"
    at = ctypes.cast(C.llama_get_logits(made), ctypes.POINTER(ctypes.c_float))
    out = np.ctypeslib.as_array(at, (len(tokens), n_vocab)).copy()
    C.llama_batch_free(batch)
    return out


def where(model: Any, run: dict[str, Any], tokens: list[int]) -> dict[str, dict[str, int]]:
    """How many results of attention and of expert blocks lie in which buffers, from a pass of its own: the scheduler
    shows every node before it computes, and "not needed" leaves its splits whole."""
    seen: dict[str, Counter[str]] = {"attention": Counter(), "experts": Counter()}

    @C.ggml_backend_sched_eval_callback
    def look(tensor: int, ask: bool, _: Any) -> bool:
        name = tensor_name(tensor).decode()
        for part, names in (("attention", ATTENTION), ("experts", EXPERTS)):
            if name.rsplit("-", 1)[0].split(" ")[0] in names:
                head = TensorHead.from_address(tensor)
                seen[part][buffer_name(head.buffer).decode() if head.buffer else "none"] += 1
        return False

    with context(model, run, look) as made:
        logits(model, made, tokens)
    return {part: dict(counts) for part, counts in seen.items()}


def streamed() -> dict[str, int]:
    """Device -> experts that it has computed from streamed weights since the process began."""
    library = _native.library()
    if not hasattr(library, "hybrid_moe_stream_report"):
        return {}
    library.hybrid_moe_stream_report.restype = ctypes.c_char_p
    report = json.loads(library.hybrid_moe_stream_report())
    assert not report["troubles"], report["troubles"]
    return {device["name"]: device["experts"] for device in report["devices"]}


def run_one(run: dict[str, Any]) -> dict[str, Any]:
    model = load(run)
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    tokens = [int(t) for t in np.random.default_rng(run["seed"]).integers(3, min(n_vocab, 250), run["n_tokens"])]
    before, on_devices_before = _native.counters(), streamed()
    with context(model, run) as made:
        np.save(run["logits"], logits(model, made, tokens))
    told, on_devices = _native.counters(), streamed()
    placed = where(model, run, tokens[:N_LOOK])
    C.llama_model_free(model)
    counted = {name: after - first for name, after, first in zip(told._fields, told, before, strict=True)}
    moved = {name: n - on_devices_before.get(name, 0) for name, n in on_devices.items()}
    return {"counters": counted, "streamed": moved, "where": placed}


def main(request: dict[str, Any]) -> None:
    folder = Path(os.environ["LLAMA_CPP_LIB_PATH"])
    C.llama_backend_init()
    ggml("ggml_backend_load_all_from_path", None, ctypes.c_char_p)(os.fsencode(folder))
    if request["plugin"]:
        from hybrid_moe_ext import register

        register()
    for run in request["runs"]:
        print(json.dumps(run_one(run)), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
