"""llama.cpp's own account of a context's memory, per buffer type, through ctypes.

libllama exports `llama_get_memory_breakdown`, which llama-server's --fit uses, but as C++: it returns a std::map by value.
A map is returned through a hidden pointer, as a C struct of its size is, so ctypes can take it; the tree below it is walked by
libstdc++'s layout. The walk is checked against the map's own count here, and by child.py against what llama.cpp logs in plain
text, so a libllama built otherwise is an error, not a wrong figure. The nodes are never freed: some hundred bytes, in a process
that ends soon.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp.llama_cpp as C

from .._native import PINNED_LLAMA_CPP_PYTHON, ggml_function
from ..errors import PluginError

_SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"
_MOST_NODES = 64  # buffer types; a walk that finds more is in the wrong memory


class _Map(ctypes.Structure):
    """std::map: comparator, then the header node (its parent is the root) and the number of nodes."""

    _fields_ = [
        ("compare", ctypes.c_size_t),
        ("colour", ctypes.c_size_t),
        ("root", ctypes.c_void_p),
        ("leftmost", ctypes.c_void_p),
        ("rightmost", ctypes.c_void_p),
        ("n_nodes", ctypes.c_size_t),
    ]


class _Node(ctypes.Structure):
    _fields_ = [
        ("colour", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("buffer_type", ctypes.c_void_p),
        ("model", ctypes.c_size_t),
        ("context", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    ]


@dataclass(frozen=True)
class BufferUse:
    """Bytes in one buffer type."""

    buffer: str
    device: str  # "" for the host's memory
    model: int
    context: int
    compute: int


def read(context: Any) -> list[BufferUse]:
    """Of a llama_context *. Raises PluginError when this libllama cannot be asked."""
    try:
        function = ctypes.CFUNCTYPE(_Map, ctypes.c_void_p)((_SYMBOL, C._lib))
    except AttributeError as error:
        raise PluginError(f"libllama has no memory accounting that can be called: {_remedy()}") from error
    found: _Map = function(context)
    uses: list[BufferUse] = []
    _walk(found.root, uses)
    if len(uses) != found.n_nodes:
        raise PluginError(f"libllama's memory accounting has another layout ({found.n_nodes} entries): {_remedy()}")
    return uses


def _walk(address: int | None, uses: list[BufferUse]) -> None:
    if not address or len(uses) > _MOST_NODES:
        return
    node = _Node.from_address(address)
    _walk(node.left, uses)
    uses.append(_use(node))
    _walk(node.right, uses)


def _use(node: _Node) -> BufferUse:
    handle = ctypes.c_void_p(node.buffer_type)
    name = _text("ggml_backend_buft_name", handle)
    on_host = ggml_function("ggml_backend_buft_is_host", ctypes.c_bool, [ctypes.c_void_p])(handle)
    device = ggml_function("ggml_backend_buft_get_device", ctypes.c_void_p, [ctypes.c_void_p])(handle)
    of = _text("ggml_backend_dev_name", ctypes.c_void_p(device)) if device and not on_host else ""
    return BufferUse(name, of, node.model, node.context, node.compute)


def _text(function: str, handle: ctypes.c_void_p) -> str:
    return str(ggml_function(function, ctypes.c_char_p, [ctypes.c_void_p])(handle).decode("utf-8", "replace"))


def _remedy() -> str:
    return f"install the tested release, llama-cpp-python=={PINNED_LLAMA_CPP_PYTHON}, built with GCC"
