"""Compute buffers and attention's operations of a released model on an assumed GPU, in a process of its own.

    python account.py MODEL N_CTX N_UBATCH[,N_UBATCH...] [GPUS]     (one JSON object per line)

The environment names the libraries (LLAMA_CPP_LIB_PATH) and the switches. Nothing is loaded and nothing computed: llama.cpp
plans, and its graph is walked. Operations are those the graph asks for, a multiply-add counted as two: for attention every pair
of a query and a key it is given, masked or not.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from typing import Any

import llama_cpp.llama_cpp as C

from hybrid_moe_ext._native import ggml_function
from hybrid_moe_ext.fits.child import _FLASH_ATTENTION, Session
from hybrid_moe_ext.fits.source import open_source

_P = ctypes.c_void_p
# ggml_tensor: type, buffer, ne[4], nb[4], op, op_params[16], flags, src[10], view_src, view_offs, data, name[64]
_NE, _SRC, _NAME = 16, 152, 256
_INIT_FULL = 3  # in the table of llama_memory_i: two destructors, init_batch, init_full
_ABSORBED = ("attn_k_b", "attn_v_b", "wk_b_trans")  # weights of the latent's way to keys and values


def _ne(tensor: int) -> list[int]:
    return list((ctypes.c_int64 * 4).from_address(tensor + _NE))


def _source(tensor: int, i: int) -> int:
    return _P.from_address(tensor + _SRC + 8 * i).value or 0


def _name(tensor: int) -> str:
    return ctypes.string_at(tensor + _NAME).decode()


def _planned_graph(context: Any, n_tokens: int) -> int:
    """What `llama_context::graph_reserve` builds and splits, without memory for it: there is none on an assumed GPU."""
    memory = ctypes.cast(C.llama_get_memory(context), _P).value
    full = _P()  # a std::unique_ptr, returned through a hidden pointer; never freed: the process ends soon
    init_full = _P.from_address(_P.from_address(memory).value + 8 * _INIT_FULL).value
    ctypes.CFUNCTYPE(None, _P, _P)(init_full)(ctypes.addressof(full), memory)
    reserve = C._lib["_ZN13llama_context13graph_reserveEjjjPK22llama_memory_context_ibPm"]
    number = ctypes.c_uint32
    reserve.restype, reserve.argtypes = _P, [_P, number, number, number, _P, ctypes.c_bool, _P]
    return reserve(context, n_tokens, 1, 1, full, True, None)


def operations(context: Any, n_tokens: int) -> Counter[str]:
    """By kind: scores and values, the latent's expansion, other products; and the nodes of the graph."""
    graph = _planned_graph(context, n_tokens)
    node_at = ggml_function("ggml_graph_node", _P, [_P, ctypes.c_int])
    op_of = ggml_function("ggml_op_desc", ctypes.c_char_p, [_P])
    found: Counter[str] = Counter()
    for i in range(ggml_function("ggml_graph_n_nodes", ctypes.c_int, [_P])(graph)):
        node = node_at(graph, i)
        op = op_of(node)
        found["nodes"] += 1
        if op == b"FLASH_ATTN_EXT":
            (dk, n_q, n_head, _), n_kv, dv = _ne(_source(node, 0)), _ne(_source(node, 1))[1], _ne(_source(node, 2))[0]
            found["scores and values"] += 2 * n_q * n_kv * n_head * (dk + dv)
        elif op == b"MUL_MAT":
            a, b, c, d = _ne(node)
            kind = "expansion" if any(w in _name(_source(node, 0)) for w in _ABSORBED) else "other products"
            found[kind] += 2 * _ne(_source(node, 0))[0] * a * b * c * d
    return found


def main(model: str, n_ctx: int, sizes: list[int], n_gpus: int) -> None:
    session = Session()
    devices = session.start([64 << 30] * n_gpus)["devices"]
    with open_source(model, None, "q8_0") as source:
        mode = "none" if n_gpus == 1 else "layer"
        session.load(source.kind, str(source.path), "q8_0", mode, [d["name"] for d in devices])
        for n_ubatch in sizes:
            context = max(n_ctx, n_ubatch)
            answer = session.measure(n_ubatch, context, "f16")
            line = {"model": model, "n_ctx": context, "n_ubatch": n_ubatch, **answer.get("refused", {})}
            for use in answer["uses"]:
                if use["compute"]:
                    line[f"compute {use['device'] or use['buffer']}"] = round(use["compute"] / 2**30, 3)
            print(json.dumps(line | operations_of(session, n_ubatch, context)), flush=True)


def operations_of(session: Session, n_ubatch: int, n_ctx: int) -> dict[str, float]:
    options = C.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, n_ubatch, n_ubatch
    options.n_seq_max = options.n_outputs_max = options.n_outputs_max_per_seq = 1
    options.flash_attn_type = _FLASH_ATTENTION
    context = C.llama_init_from_model(session._model, options)
    found = operations(context, n_ubatch)
    C.llama_free(context)
    return {key: n if key == "nodes" else round(n / 1e15, 4) for key, n in found.items()}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")], int((*sys.argv[4:], 1)[0]))
