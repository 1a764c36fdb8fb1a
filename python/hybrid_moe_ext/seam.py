"""The seam into llama-cpp-python: the one place that knows how it gets a model and a context. Nothing else is replaced.

llama_cpp.Llama builds an internals.LlamaModel, which checks that its path exists and calls
llama_cpp.llama_cpp.llama_model_load_from_file(path, params), and an internals.LlamaContext, which calls
llama_cpp.llama_cpp.llama_init_from_model(model, params). Each function is replaced, once, by one that asks whether
*this thread* is inside `loading_by` or `creating_by`, and otherwise does what it always did. tests/test_seam.py checks
both against the pinned release.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp.llama_cpp as C

Loader = Callable[[Any], Any]  # llama_model_params -> llama_model *, or None
Creator = Callable[[Any, Any], Any]  # llama_model *, llama_context_params (may be changed) -> llama_context *, or None

_thread = threading.local()
_original = C.llama_model_load_from_file
_original_init = C.llama_init_from_model


def _load_from_file(path: bytes, params: Any, /) -> Any:
    loader: Loader | None = getattr(_thread, "loader", None)
    return _original(path, params) if loader is None else loader(params)


def _init_from_model(model: Any, params: Any, /) -> Any:
    creator: Creator | None = getattr(_thread, "creator", None)
    return create_stock(model, params) if creator is None else creator(model, params)


C.llama_model_load_from_file = _load_from_file
C.llama_init_from_model = _init_from_model


@contextlib.contextmanager
def loading_by(loader: Loader) -> Iterator[None]:
    """Inside, on this thread, llama-cpp-python loads models by `loader`."""
    _thread.loader = loader
    try:
        yield
    finally:
        _thread.loader = None


@contextlib.contextmanager
def creating_by(creator: Creator) -> Iterator[None]:
    """Inside, on this thread, llama-cpp-python makes contexts by `creator`."""
    _thread.creator = creator
    try:
        yield
    finally:
        _thread.creator = None


def explain_decode(context: Any, explain: Callable[[RuntimeError], Exception]) -> None:
    """Lets a LlamaContext's decode raise what `explain` makes of "llama_decode returned -3"."""
    decode = context.decode

    def decode_or_explain(batch: Any) -> None:
        try:
            decode(batch)
        except RuntimeError as error:
            raise explain(error) from error

    context.decode = decode_or_explain


def load_stock(path: bytes, params: Any) -> Any:
    """What llama-cpp-python would have called for a model."""
    return _original(path, params)


@contextlib.contextmanager
def adjusting_by(adjust: Callable[[Any, Any], None]) -> Iterator[None]:
    """Inside, on this thread, `adjust(model, params)` may change the parameters of contexts last, whoever makes them."""
    _thread.adjust = adjust
    try:
        yield
    finally:
        _thread.adjust = None


def create_stock(model: Any, params: Any) -> Any:
    """What llama-cpp-python would have called for a context."""
    adjust: Callable[[Any, Any], None] | None = getattr(_thread, "adjust", None)
    if adjust is not None:
        adjust(model, params)
    return _original_init(model, params)
