"""A source archive in the shape of llama-cpp-python's, whose llama.cpp compiles in a second: its libllama.so is the installed
one's with a function more. And patches for it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

import llama_cpp
import pytest

from hybrid_moe_ext.patched import cache, make, recipe, source
from hybrid_moe_ext.patched.patch_files import read_patches

STOCK = Path(llama_cpp.__file__).parent / "lib"
COMMAND = [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()"]

# The bindings' functions are looked up in libraries that libllama.so needs, too.
_CMAKE = f"""cmake_minimum_required(VERSION 3.21)
project(llama LANGUAGES C CXX)
add_library(llama SHARED src/llama.c)
if(NOT WITHOUT_STOCK)
  target_link_options(llama PRIVATE -Wl,--no-as-needed)
  target_link_libraries(llama PRIVATE {STOCK}/libllama.so)
endif()
"""
_SOURCE = "int tiny_answer(void) { return 1; }\n"
_PATCH = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
Subject: [PATCH 1/1] llama : another answer to a question of some length
 that nobody asked

Why it is needed.

Switch: always, or when asked
---
 src/llama.c | 2 +-

diff --git a/src/llama.c b/src/llama.c
--- a/src/llama.c
+++ b/src/llama.c
@@ -1 +1 @@
-int tiny_answer(void) { return 1; }
+int tiny_answer(void) { return 2; }
--\x20
2.39.5

"""


def write_archive(path: Path) -> str:
    """Its SHA-256."""
    folder = f"llama_cpp_python-{source.RELEASE}/vendor/llama.cpp"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"CMakeLists.txt": _CMAKE, "src/llama.c": _SOURCE, "models/large.gguf": "large"}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_patch(folder: Path, text: str = _PATCH, name: str = "0001-another-answer.patch") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def broken_patch() -> str:
    """That applies, and does not compile."""
    return _PATCH.replace("+int tiny_answer(void) { return 2; }", "+int tiny_answer(void) { return missing; }")


class Tiny:
    """What a build needs, with a cache of its own."""

    def __init__(self, folder: Path):
        self.sdist = folder / source.ARCHIVE
        self.sha256 = write_archive(self.sdist)
        self.patches = write_patch(folder / "patches")
        self.steps: list[str] = []
        self.shares: list[float] = []

    def recipe(self, *cmake_args: str) -> recipe.Recipe:
        return recipe.make_recipe(read_patches(self.patches), [], cmake_args, dict(os.environ) | {"CMAKE_ARGS": ""})

    def build(self, *cmake_args: str) -> cache.Build:
        progress = make.Progress(self.steps.append, self._compiling)
        return make.build(self.recipe(*cmake_args), self.patches, self.sdist, 1, progress)

    def _compiling(self) -> contextlib.nullcontext:
        return contextlib.nullcontext(self.shares.append)


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """With the cache in `folder`, and the tiny archive's hash as the pinned one."""
    if recipe.find_tool("cmake") is None:
        pytest.skip("no cmake on this machine")
    made = Tiny(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(source, "SDIST_SHA256", made.sha256)
    monkeypatch.setattr(recipe, "SDIST_SHA256", made.sha256)
    return made


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Tiny:
    return prepare(tmp_path, monkeypatch)
