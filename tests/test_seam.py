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


def test_the_release_makes_contexts_through_the_function_we_replace():
    source = inspect.getsource(internals.LlamaContext.__init__)
    assert "llama_cpp.llama_init_from_model(self.model.model, self.params)" in source
    assert C.llama_init_from_model is seam._init_from_model


def test_the_release_reads_what_a_creator_may_change_after_it():
    """llama_cpp.Llama hands its own parameters on, and makes its batch by `n_batch` once the context is there."""
    source = inspect.getsource(llama_cpp.Llama.__init__)
    context = source.index("internals.LlamaContext(")
    assert "params=self.context_params" in source[context:]
    assert "n_tokens=self.n_batch" in source[context:]
    assert "self.context_params.n_batch = " not in source[context:]


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


def test_only_the_creating_thread_is_redirected():
    asked, elsewhere = [], []

    def other() -> None:
        elsewhere.append(llama_cpp.Llama(str(models.twin("F32")), n_ctx=64, verbose=False).n_ctx())

    def create(model, params):
        asked.append(params.n_ctx)
        params.n_ctx = 512
        return seam.create_stock(model, params)

    with seam.creating_by(create):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert elsewhere == [256] and not asked  # llama.cpp rounds up
        assert llama_cpp.Llama(str(models.twin("F32")), n_ctx=64, verbose=False).n_ctx() == 512
    with pytest.raises(RuntimeError, match="stop"), seam.creating_by(lambda model, params: 1 / 0):
        raise RuntimeError("stop")
    assert asked == [64]
    assert llama_cpp.Llama(str(models.twin("F32")), n_ctx=64, verbose=False).n_ctx() == 256
