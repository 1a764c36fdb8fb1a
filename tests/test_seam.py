"""The seam against the pinned llama-cpp-python: what it replaces is what that release calls, and only on our loads."""

import importlib.metadata
import inspect
import threading

import llama_cpp
import llama_cpp._internals as internals
import llama_cpp.llama_cpp as C
import pytest

import models
from hybrid_moe_ext import _native, seam


def test_the_pinned_release_is_installed():
    assert importlib.metadata.version("llama_cpp_python") == _native.PINNED_LLAMA_CPP_PYTHON


def test_the_release_loads_through_the_function_we_replace():
    source = inspect.getsource(internals.LlamaModel.__init__)
    assert "llama_cpp.llama_model_load_from_file(" in source
    assert internals.llama_cpp is C and C.llama_model_load_from_file is seam._load_from_file


def test_only_the_loading_thread_is_redirected():
    asked, elsewhere = [], []

    def other() -> None:
        elsewhere.append(llama_cpp.Llama(str(models.twin("F32")), vocab_only=True, verbose=False).n_vocab())

    with seam.loading_by(lambda params: asked.append(1)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert elsewhere and not asked
        with pytest.raises(ValueError, match="Failed to load"):
            llama_cpp.Llama(str(models.twin("F32")), vocab_only=True, verbose=False)
    assert asked == [1]
    assert llama_cpp.Llama(str(models.twin("F32")), vocab_only=True, verbose=False).n_vocab() == elsewhere[0]
