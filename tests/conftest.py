"""Environment of all tests, and the paths of what several of them use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from simgpu.build import library

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml's crash handler starts a debugger, which can hang
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "models" / "tiny-deepseek-v3-fp8"


# Kernels that round activations to BF16, as their instruction wants them. Whole-model tests compare to 1e-9, so they run
# on the best exact kernels; these are tested by themselves (test_kernels, test_avx512, test_golden).
BF16_KERNELS = ("avx512_bf16", "avx512_gfni")


def pytest_configure(config: object) -> None:
    from hybrid_moe_ext import _native

    if "HYBRID_MOE_ISA" not in os.environ:
        available = _native.library().hybrid_moe_available_isas().decode().split()
        os.environ["HYBRID_MOE_ISA"] = next(isa for isa in available if isa not in BF16_KERNELS)


def pytest_collection_modifyitems(items: list) -> None:
    """Tests that need a stock host in this process come first: once another test has registered the plug-in, it stays."""
    items.sort(key=lambda item: item.path.name != "test_checkpoint_logits.py")


@pytest.fixture(scope="session")
def simgpu(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the simulated GPU."""
    cache = getattr(pytestconfig, "cache", None)
    return library(cache.mkdir("simgpu") if cache else tmp_path_factory.mktemp("simgpu"))


@pytest.fixture
def no_deadlock() -> Iterator[None]:
    """A test that waits for ever ends, and says where each thread was."""
    from engine_solo import watchdog

    with watchdog():
        yield
