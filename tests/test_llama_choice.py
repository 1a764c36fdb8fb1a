"""Which llama.cpp a process loads: a patched build that suits, otherwise the stock library, with one sentence that says why."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_moe_ext import BuildError, patched
from hybrid_moe_ext.cli import run
from hybrid_moe_ext.patched import cache, choice, probe
from hybrid_moe_ext.patched.patch_files import patches_folder, read_patches
from tiny_llama import STOCK, prepare

ASK = """
import json, os, sys
import hybrid_moe_ext
from hybrid_moe_ext import patched
told = patched.in_use()
try:
    hybrid_moe_ext.register()
    error = ""
except hybrid_moe_ext.OptionError as refusal:
    error = str(refusal)
print(json.dumps([told.kind, told.why, told.build and told.build.key, patched.library_file(), error,
                  [patch.name for patch in patched.patched_with()], os.environ.get("LLAMA_CPP_LIB_PATH"),
                  "/hybrid-moe/llama/" in open("/proc/self/maps").read()]))
"""


@dataclasses.dataclass(frozen=True)
class Answer:
    kind: str
    why: str
    key: str | None
    library: str
    error: str  # of register()
    patches: list[str]
    lib_path_after: str | None
    has_cached: bool  # a library of the cache is in the process
    stderr: str = ""


def ask(before: str = "", **environment: str) -> Answer:
    """What a process of its own loads."""
    env = {name: value for name, value in os.environ.items() if name != "HYBRID_MOE_LLAMA"} | environment
    done = subprocess.run([sys.executable, "-c", before + ASK], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("load_backend:")]  # llama.cpp's log
    return Answer(*json.loads(done.stdout.splitlines()[-1]), stderr="\n".join(said))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A cache with one tiny build."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(folder, monkeypatch).build()
    return folder / "cache"


@pytest.fixture
def own(built: Path, tmp_path, monkeypatch) -> cache.Build:
    """A build with the patches that this package brings, as far as its record says."""
    shutil.copytree(built, tmp_path / "cache", symlinks=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = cache.read_build(cache.build_keys()[0])
    return rewrite(made, patches=tuple(read_patches(patches_folder())))


def rewrite(build: cache.Build, **changes) -> cache.Build:
    changed = dataclasses.replace(build, **changes)
    changed.write(build.lib.parent)
    return changed


def test_a_build_that_suits_is_loaded_and_nothing_leaks(own):
    told = ask()
    assert (told.kind, told.why, told.key, told.error) == ("patched", "", own.key, "")
    assert told.library == str(own.lib / "libllama.so") and told.patches == [p.name for p in own.patches]
    assert told.lib_path_after is None and told.stderr == ""  # children of this process choose for themselves
    assert (own.lib.parent / "probed.json").exists()


def test_it_can_be_left_out_and_named(own):
    told = ask(HYBRID_MOE_LLAMA="stock")
    assert (told.kind, told.why, told.key, told.has_cached) == ("stock", "HYBRID_MOE_LLAMA=stock", None, False)
    assert told.library == str(STOCK / "libllama.so") and told.patches == [] and told.stderr == ""
    rewrite(own, patches=(patched.Patch("0001-x", "x", "always on", "0"),))  # another's patches: only by name
    assert ask(HYBRID_MOE_LLAMA=own.key).patches == ["0001-x"]
    told = ask()
    assert told.kind == "stock" and f"choose it by HYBRID_MOE_LLAMA={own.key}" in told.why
    assert (told.stderr != "") == bool(own.patches)  # with no patches of its own, this package misses nothing


def test_what_is_named_and_cannot_be_used_is_an_error(own):
    told = ask(HYBRID_MOE_LLAMA="stok")
    assert told.kind == "stock" and told.error.startswith(
        "HYBRID_MOE_LLAMA=stok cannot be used: there is no build stok in "
    )
    assert told.error.endswith("choose auto, stock or another build")


def test_the_users_own_path_is_kept(own, tmp_path):
    told = ask(LLAMA_CPP_LIB_PATH=str(STOCK))
    assert (told.kind, told.why, told.key) == ("given", "LLAMA_CPP_LIB_PATH names it", None)
    assert told.library == str(STOCK / "libllama.so") and told.lib_path_after == str(STOCK) and not told.has_cached
    told = ask(LLAMA_CPP_LIB_PATH=str(own.lib))
    assert (told.kind, told.key, told.patches) == ("given", own.key, [p.name for p in own.patches])
    assert "LLAMA_CPP_LIB_PATH is set" in ask(LLAMA_CPP_LIB_PATH=str(STOCK), HYBRID_MOE_LLAMA=own.key).error


def test_nothing_is_exchanged_under_way(own):
    told = ask(before="import llama_cpp\n")
    assert (told.kind, told.key, told.has_cached, told.stderr) == ("stock", None, False, "")
    assert told.why.startswith("llama_cpp was imported before hybrid_moe_ext: import hybrid_moe_ext first")


def test_a_library_that_lacks_a_function_is_refused_before_it_is_loaded(own, tmp_path):
    program = tmp_path / "lacking.c"
    program.write_text("int nothing;\n")
    subprocess.run(["cc", "-shared", "-o", own.lib / "libllama.so", program], check=True)
    rewrite(own, files={"libllama.so": cache.file_facts(own.lib / "libllama.so")})
    told = ask()
    assert (told.kind, told.key, told.has_cached) == ("stock", None, False)
    assert f"llama-cpp-python cannot load {own.lib} (" in told.why and "undefined symbol" in told.why
    assert told.stderr == f"the patched llama.cpp is not used: {told.why}"


def test_a_library_that_no_longer_loads_leaves_the_stock_one(own):
    """It was fine when it was tried; then, say, the driver it needs was removed."""
    probe.probe_once(own)
    (own.lib / "libllama.so").write_bytes(b"no library")
    rewrite(own, files={"libllama.so": cache.file_facts(own.lib / "libllama.so")})
    told = ask()
    assert (told.kind, told.has_cached, told.error) == ("stock", False, "") and "cannot load" in told.why
    assert told.library == str(STOCK / "libllama.so") and told.lib_path_after is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"release": "0.3.35"},
            r"is for llama-cpp-python 0\.3\.35, 0\.\S+ is installed: run `hybrid-moe build-llama` again",
        ),
        ({"cpu": ("avx1024", "sse2")}, "is for a CPU with avx1024, which this one lacks"),
        ({"files": {"libllama.so": (1, 1)}}, r"lib/libllama\.so is not as it was built"),
        ({"files": {"libggml.so": (1, 1)}}, r"lib/libggml\.so is not as it was built"),
        ({"ggml": "0.1.0"}, r"is ggml 0\.\S+, not the 0\.1\.0 it was built as"),
        ({"key": "?"}, "record is another build's"),
    ],
)
def test_what_does_not_suit_is_refused_in_one_sentence(own, changes, sentence, monkeypatch):
    monkeypatch.setattr(choice, "cpu_features", lambda: ("avx2", "sse2"))
    rewrite(own, **({"cpu": ()} | changes))
    with pytest.raises(BuildError, match=sentence):
        choice._usable(own.key, is_forced=False)


def test_a_build_without_the_gpus_of_the_stock_library_is_taken_by_name_only(own, monkeypatch):
    monkeypatch.setattr(choice, "stock_backends", lambda: ["cuda", "vulkan"])
    rewrite(own, backends=("vulkan",))
    with pytest.raises(
        BuildError, match=r"lacks cuda, which the installed llama-cpp-python has: .* with --backend cuda"
    ):
        choice._usable(own.key, is_forced=False)
    assert choice._usable(own.key, is_forced=True).key == own.key
    assert "lacks cuda" in choice.why_not(own.key)
    monkeypatch.setenv("HYBRID_MOE_LLAMA", own.key)
    assert choice.why_not(own.key) == ""
    monkeypatch.setenv("HYBRID_MOE_LLAMA", "stock")
    assert choice.why_not(own.key) == "HYBRID_MOE_LLAMA=stock"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "patches": [{"name": 1}]}'])
def test_a_damaged_record_is_refused(own, text):
    (own.lib.parent / "build.json").write_text(text)
    with pytest.raises(BuildError, match=r"build\.json cannot be read"):
        choice._usable(own.key, is_forced=False)


def test_back_ends_are_told_by_the_libraries(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    for name in (
        "libggml.so",
        "libggml-base.so",
        "libggml-cpu.so",
        "libggml-cuda.so",
        "libggml-cuda.so.0",
        "libllama.so",
    ):
        (tmp_path / "lib" / name).touch()
    spec = dataclasses.make_dataclass("Spec", ["origin"])(str(tmp_path / "__init__.py"))
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: spec)
    assert choice.stock_backends() == ["cuda"]


def test_info_says_what_is_in_use(capsys, monkeypatch):
    patch = patched.Patch("0001-x", "a subject", "GGML_X=1", "0")
    build = cache.Build("0" * 16, "", "", "", (patch,), (), (), (), (), {})
    monkeypatch.setattr(choice, "_choice", choice.Choice("patched", build))
    assert run(["info"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("llama.cpp:    patched by hybrid-moe build-llama, ggml 0.")
    assert first.endswith(patched.library_file()) and second == "patch:        0001-x (a subject); GGML_X=1"
    monkeypatch.setattr(choice, "_choice", choice.Choice("stock", why="of a reason"))
    assert run(["info"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "not patched:  of a reason"
    assert run(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["llama_cpp"]
    assert (told["kind"], told["patches"], told["not_patched_because"]) == ("stock", [], "of a reason")
    monkeypatch.setattr(choice, "_choice", choice.Choice("stock", error="HYBRID_MOE_LLAMA=x cannot be used"))
    assert run(["info"]) == 2 and capsys.readouterr().err == "error: HYBRID_MOE_LLAMA=x cannot be used\n"
