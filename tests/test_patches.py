"""The patches for llama.cpp: they apply to the pinned sources, off they change nothing, on they change no result.

The second half needs a libllama built with them: LLAMA_CPP_PATCHED_LIBS names the folder that has it (a folder that
LLAMA_CPP_LIB_PATH would take).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from hybrid_moe_ext.patched.patch_files import apply_patches, read_patches
from models import nmse
from tiny_families import tiny, write_model

PATCHES = sorted((ROOT / "patches").glob("*.patch"))
CHILDREN = Path(__file__).parent / "patches"
MOST_CHANGED_LINES = 600  # of all patches together
FAMILIES = ["deepseek-v3", "qwen3-235b", "glm-4.6", "minimax-m2", "gpt-oss-120b"]
SWITCHES = {
    "tiles of 64": {"LLAMA_TOKEN_TILE": "64"},
    "tiles of 100": {"LLAMA_TOKEN_TILE": "100"},
    "decompressed": {"LLAMA_MLA_DECOMPRESS": "32"},
    "decompressed in tiles": {"LLAMA_MLA_DECOMPRESS": "32", "LLAMA_TOKEN_TILE": "100"},
}
LIBRARIES = os.environ.get("LLAMA_CPP_PATCHED_LIBS")
needs_build = pytest.mark.skipif(not LIBRARIES, reason="LLAMA_CPP_PATCHED_LIBS names no libllama with the patches")


@cache
def _archive() -> Path:
    archive = os.environ.get("LLAMA_CPP_SDIST")
    if not archive:
        pytest.skip("LLAMA_CPP_SDIST names no source archive of the pinned llama-cpp-python")
    return Path(archive)


def _changed_files(patch: Path) -> set[str]:
    return set(re.findall(r"^--- a/(.+)$", patch.read_text(), re.M))


def test_they_apply_in_order_to_the_pinned_sources(tmp_path: Path) -> None:
    wanted = set().union(*(_changed_files(patch) for patch in PATCHES))
    with tarfile.open(_archive()) as archive:
        for member in archive:
            inner = member.name.partition("/vendor/llama.cpp/")[2]
            if inner in wanted:
                target = tmp_path / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
    apply_patches(ROOT / "patches", read_patches(ROOT / "patches"), tmp_path)  # refuses what does not fit exactly


def test_they_are_small() -> None:
    lines = [line for patch in PATCHES for line in patch.read_text().splitlines()]
    changed = [line for line in lines if re.match(r"[+-](?![+-]{2} )", line) and line != "-- "]
    assert len(changed) < MOST_CHANGED_LINES


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_says_what_it_is_for(patch: Path) -> None:
    message = patch.read_text().partition("\n---\n")[0]
    for field in ("Subject: ", "Applies to: ", "Reason: ", "Switch: ", "Unnecessary when: "):
        assert f"\n{field}" in message, f"{patch.name} has no line {field!r}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patched")


def _logits(folder: Path, family: str, tag: str, **environment: str) -> dict[str, np.ndarray]:
    model, out = folder / f"{family}.gguf", folder / f"{family}-{tag}.npz"
    if not model.exists():
        write_model(model, tiny(family))
    if not out.exists():
        plain = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")}
        subprocess.run([sys.executable, CHILDREN / "child.py", model, out], env=plain | environment, check=True)
    return {name: rows.astype(np.float64) for name, rows in np.load(out).items()}


@needs_build
@pytest.mark.parametrize("family", FAMILIES)
def test_switched_off_every_bit_is_the_stock_librarys(family: str, folder: Path) -> None:
    stock = _logits(folder, family, "stock")
    off = _logits(folder, family, "off", LLAMA_CPP_LIB_PATH=str(LIBRARIES))
    for name, rows in stock.items():
        assert np.array_equal(off[name], rows), name


@needs_build
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_switched_on_the_logits_are_the_same(family: str, switch: str, folder: Path) -> None:
    if "LLAMA_MLA_DECOMPRESS" in SWITCHES[switch] and family != "deepseek-v3":
        pytest.skip(f"{family} has no latent attention")
    stock = _logits(folder, family, "stock")
    on = _logits(folder, family, switch, LLAMA_CPP_LIB_PATH=str(LIBRARIES), **SWITCHES[switch])
    assert any(not np.array_equal(on[name], rows) for name, rows in stock.items()), "the switch did nothing"
    exact = {name.partition("/")[0]: rows for name, rows in stock.items() if name.endswith("/plain")}
    for name, rows in exact.items():
        assert nmse(on[f"{name}/plain"], rows) <= 1e-9, name
    # Flash attention rounds to F16, on the CPU most of all for few queries: no further from the exact result than stock is.
    flash_error = max(nmse(stock[f"{name}/flash"], rows) for name, rows in exact.items())
    for name, rows in exact.items():
        assert nmse(on[f"{name}/flash"], rows) <= 2 * flash_error, name


@needs_build
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_a_prompt_through_the_plugin_ends_in_the_same_text(device: str, request: pytest.FixtureRequest) -> None:
    """The bundled model, its experts by our back end: on the CPU, or streamed to a simulated GPU that runs attention."""
    arguments = [sys.executable, CHILDREN / "prompt.py", ROOT / "models" / "tiny-deepseek-v3-fp8"]
    if device == "simgpu":
        arguments.append(request.getfixturevalue("simgpu"))
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "SIMGPU_"))}
    on = {"LLAMA_CPP_LIB_PATH": str(LIBRARIES), **SWITCHES["decompressed in tiles"]}
    told = []
    for environment in ({"HYBRID_MOE_LLAMA": "stock"}, on):
        done = subprocess.run(arguments, env=plain | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(json.loads(done.stdout.splitlines()[-1]))
    stock, patched = told
    assert patched["tokens"] == stock["tokens"] and patched["logits"] != stock["logits"]
    assert nmse(np.array(patched["logits"]), np.array(stock["logits"])) <= 1e-4  # F16 caches and flash attention
    for answer in told:
        assert answer["devices"] == (["SimGPU0"] if device == "simgpu" else [])
        assert answer["streamed"] == (stock["streamed"] if device == "simgpu" else 0)
    assert device == "cpu" or stock["streamed"] > 0


def _account(model: str, n_ctx: int, n_ubatch: int, **environment: str) -> dict[str, float]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")}
    plain["HYBRID_MOE_LLAMA"] = "stock"  # not a patched build of this machine
    done = subprocess.run(
        [sys.executable, CHILDREN / "account.py", model, str(n_ctx), str(n_ubatch)],
        env=plain | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


@needs_build
def test_deepseek_v3_takes_a_prompt_of_32k_in_one_pass_beside_its_weights() -> None:
    stock = _account("deepseek-v3", 32768, 32768)
    on = {"LLAMA_CPP_LIB_PATH": str(LIBRARIES), "LLAMA_TOKEN_TILE": "4096", "LLAMA_MLA_DECOMPRESS": "1024"}
    patched = _account("deepseek-v3", 32768, 32768, **on)
    assert patched["compute GPU0"] <= 4.0 < stock["compute GPU0"]
    attention = [a["scores and values"] + a["expansion"] for a in (patched, stock)]
    assert attention[0] <= 0.4 * attention[1]


@needs_build
def test_a_short_prompt_has_the_stock_graph() -> None:
    on = {"LLAMA_CPP_LIB_PATH": str(LIBRARIES), "LLAMA_TOKEN_TILE": "4096", "LLAMA_MLA_DECOMPRESS": "1024"}
    assert _account("deepseek-v3", 32768, 512, **on) == _account("deepseek-v3", 32768, 512)
