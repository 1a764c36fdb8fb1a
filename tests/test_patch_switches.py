"""The patches' switches: set where the process's llama.cpp has the patches, left alone where the user has set them."""

from __future__ import annotations

import os

import pytest

from hybrid_moe_ext import patched, placement, register
from hybrid_moe_ext.cli.fits import _above_default
from hybrid_moe_ext.fits.cost import prompt_cost
from hybrid_moe_ext.fits.source import Source
from hybrid_moe_ext.patched import choice
from hybrid_moe_ext.patched.cache import Build
from hybrid_moe_ext.patched.patch_files import patches_folder, read_patches
from hybrid_moe_ext.patched.switches import _VALUES, DECOMPRESS, TILE


@pytest.fixture
def unset(monkeypatch):
    for name in (TILE, DECOMPRESS):
        monkeypatch.setenv(name, "")  # so that what the test leaves behind is undone
        monkeypatch.delenv(name)


@pytest.fixture
def ours(unset, monkeypatch):
    """As if this process's llama.cpp had the patches of this package."""
    build = Build("0" * 16, "", "", "", tuple(read_patches(patches_folder())), (), (), (), (), {})
    monkeypatch.setattr(choice, "_choice", choice.Choice("patched", build))


def values() -> tuple[str | None, str | None]:
    return os.environ.get(TILE), os.environ.get(DECOMPRESS)


def test_every_switched_patch_is_there_and_names_its_variable():
    switches = {patch.name: patch.switch for patch in read_patches(patches_folder())}
    for name, (variable, _) in _VALUES.items():
        assert switches[name].startswith(f"{variable}=")


def test_a_stock_library_gets_none(unset, monkeypatch):
    monkeypatch.setattr(choice, "_choice", choice.Choice("stock"))
    register()
    assert values() == (None, None) and patched.switched_on() == {}
    monkeypatch.setenv(TILE, "64")  # nobody reads it
    assert placement.most_tokens() == placement.MOST_TOKENS
    assert "up to 16384 by itself" in _above_default(20000)[0]


def test_what_is_not_set_is_switched_on_before_a_model_is_loaded(ours):
    register()
    assert values() == ("4096", "1024") and set(patched.switched_on()) == {TILE, DECOMPRESS}
    assert placement.most_tokens() == 32768
    assert _above_default(20000) == [] and "up to 32768 by itself" in _above_default(40000)[0]


@pytest.mark.parametrize("value", ["0", "", "off"])
def test_what_the_user_set_stays(ours, monkeypatch, value):
    monkeypatch.setenv(TILE, value)
    register()
    assert values() == (value, "1024") and set(patched.switched_on()) == {DECOMPRESS}
    assert placement.most_tokens() == placement.MOST_TOKENS


def test_fits_counts_decompressed_attention_tile_by_tile(ours, monkeypatch):
    """Two heads, keys of 4 + 2, values of 4, a latent of 8: scores and values of each pair, and each tile's cells once."""
    meta = {
        "general.architecture": "deepseek2", "deepseek2.block_count": "1", "deepseek2.embedding_length": "16",
        "deepseek2.attention.head_count": "2", "deepseek2.attention.key_length": "10",
        "deepseek2.attention.value_length": "8", "deepseek2.attention.key_length_mla": "6",
        "deepseek2.attention.value_length_mla": "4", "deepseek2.attention.kv_lora_rank": "8",
        "deepseek2.rope.dimension_count": "2",
    }  # fmt: skip
    source = Source("made-up", "gguf", "", ("F32",), 1, 2, 16, 16, 1, 1, 100)
    monkeypatch.setenv(TILE, "4")
    monkeypatch.setenv(DECOMPRESS, "10")
    pairs = sum(1 for query in range(10) for key in range(10) if key <= query)
    cells = 4 + 8 + 10
    assert prompt_cost(meta, source, 10).attention == 2 * (2 * (6 + 4) * pairs + 2 * 8 * (4 + 4) * cells)
    assert prompt_cost(meta, source, 9).attention == 2 * 2 * (10 + 8) * 45  # too short: absorbed
