"""The seam into llama-cpp-python: the one place that knows how its LlamaModel gets a model. Nothing else is replaced.

llama_cpp.Llama builds an internals.LlamaModel, which checks that its path exists and calls
llama_cpp.llama_cpp.llama_model_load_from_file(path, params). That function is replaced, once, by one that asks whether
*this thread* is inside `loading_by`, and otherwise does what it always did. tests/test_seam.py checks it against the
pinned release.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp.llama_cpp as C

Loader = Callable[[Any], Any]  # llama_model_params -> llama_model *, or None

_thread = threading.local()
_original = C.llama_model_load_from_file


def _load_from_file(path: bytes, params: Any, /) -> Any:
    loader: Loader | None = getattr(_thread, "loader", None)
    return _original(path, params) if loader is None else loader(params)


C.llama_model_load_from_file = _load_from_file


@contextlib.contextmanager
def loading_by(loader: Loader) -> Iterator[None]:
    """Inside, on this thread, llama-cpp-python loads models by `loader`."""
    _thread.loader = loader
    try:
        yield
    finally:
        _thread.loader = None


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
    """What llama-cpp-python would have called."""
    return _original(path, params)
