"""`hybrid-moe build-llama`: keys, the lock, whole builds or none. A tiny llama.cpp is built; the real one takes minutes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from conftest import ROOT
from hybrid_moe_ext import BuildError, OptionError
from hybrid_moe_ext.cli import run
from hybrid_moe_ext.patched import cache, recipe, source
from hybrid_moe_ext.patched.patch_files import read_patches
from tiny_llama import COMMAND, Tiny, broken_patch, tiny, write_patch

__all__ = ["tiny"]


def compiler(folder: Path, on_compile: str) -> str:
    """A C++ compiler for CMake that can tell its version; everything else is `on_compile`."""
    program = folder / "c++"
    program.write_text(f'#!/bin/sh\ncase "$*" in --version) echo tiny 1.0; exit 0;; esac\n{on_compile}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"-DCMAKE_CXX_COMPILER={program}"


def left_in_cache() -> set[str]:
    return {re.sub(r"^[0-9a-f]{16}", "KEY", path.name) for path in cache.cache_folder().iterdir()}


def test_the_pin_is_that_of_the_plug_in_and_of_the_package():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert re.search(r'HYBRID_MOE_LLAMA_VERSION "(.*?)"', cmake)[1] == source.RELEASE
    assert re.search(r'HYBRID_MOE_LLAMA_SHA256 "(.*?)"', cmake)[1] == source.SDIST_SHA256
    assert f'"llama-cpp-python=={source.RELEASE}"' in (ROOT / "pyproject.toml").read_text()


def test_the_key_tells_builds_apart(tmp_path, monkeypatch):
    patches = read_patches(write_patch(tmp_path))
    monkeypatch.setattr(recipe, "_version", lambda program: f"{Path(program).name} 1.0")
    monkeypatch.setattr(recipe.shutil, "which", lambda name, path=None: f"/bin/{Path(name).name}")

    def key(patches=patches, backends=("vulkan", "cuda"), args=("-DA=1",), **environ: str) -> str:
        return recipe.make_recipe(patches, backends, args, environ).key

    same = [
        key(),
        key(backends=("cuda", "vulkan", "cpu")),
        key(args=("A=1",)),
        key(args=(), CMAKE_ARGS="-DA=1"),
        key(X="1"),
    ]
    assert len(set(same)) == 1
    others = [
        key(patches=[]), key(backends=("cuda",)), key(args=()), key(args=("-DA=1", "-DB=2")), key(CXXFLAGS="-O1"),
        key(CXX="clang++"), key(args=("-DA=1", "-DGGML_NATIVE=OFF")), key(args=("-DA=1", "-DCMAKE_C_COMPILER=clang")),
    ]  # fmt: skip
    write_patch(tmp_path, broken_patch())
    others.append(key(patches=read_patches(tmp_path)))
    monkeypatch.setattr(recipe, "cpu_features", lambda: ("other",))
    others.append(key())
    assert len({*same, *others}) == len(others) + 1


def test_only_a_build_for_the_cpu_at_hand_depends_on_it(tmp_path):
    for value, is_native in (("OFF", False), ("off", False), ("ON", True)):
        made = recipe.make_recipe([], [], [f"-DGGML_NATIVE:BOOL={value}"], {"PATH": os.environ["PATH"]})
        assert bool(made.cpu) == is_native and (not is_native or made.cpu == recipe.cpu_features())


def test_what_the_user_says_comes_last(tmp_path):
    made = recipe.make_recipe([], ["vulkan"], ["-DCMAKE_BUILD_TYPE=Debug"], {"PATH": os.environ["PATH"]})
    command = made.configure("cmake", "Ninja", tmp_path / "s", tmp_path / "b")
    assert command[:7] == ["cmake", "-S", f"{tmp_path}/s", "-B", f"{tmp_path}/b", "-G", "Ninja"]
    assert command[-2:] == ["-DGGML_VULKAN=ON", "-DCMAKE_BUILD_TYPE=Debug"] and "-DBUILD_SHARED_LIBS=ON" in command


@pytest.mark.parametrize(
    ("backends", "args", "environ", "error", "sentence"),
    [
        (["cude"], [], {}, OptionError, "--backend cude is unknown: choose of cpu, cuda"),
        ([], ["GGML_CUDA"], {}, OptionError, "write -DNAME=VALUE"),
        ([], [], {"CXX": "c+++"}, BuildError, r"the compiler c\+\+\+ is not there: apt-get install g\+\+"),
        ([], [], {"CC": "false"}, BuildError, "false --version fails with exit code 1"),
        (["cuda"], [], {"CUDACXX": "nvcd"}, BuildError, "nvcd is not there: install NVIDIA's CUDA toolkit"),
    ],
)
def test_what_cannot_be_built_is_said_at_once(backends, args, environ, error, sentence):
    with pytest.raises(error, match=sentence):
        recipe.make_recipe([], backends, args, {"PATH": os.environ["PATH"], **environ})


def test_missing_tools_are_named(monkeypatch):
    there: set[str] = set()
    monkeypatch.setattr(recipe, "find_tool", lambda name: name if name in there else None)
    with pytest.raises(BuildError, match=r"cmake is not installed: pip install 'hybrid-moe-ext\[build\]'"):
        recipe.find_cmake()
    there.add("cmake")
    with pytest.raises(BuildError, match="neither ninja nor make"):
        recipe.find_cmake()
    there.add("make")
    assert recipe.find_cmake() == ("cmake", "Unix Makefiles")
    there.add("ninja")
    assert recipe.find_cmake() == ("cmake", "Ninja")


def test_an_archive_with_another_hash_is_refused(tmp_path):
    archive = tmp_path / source.ARCHIVE
    with pytest.raises(BuildError, match="is no file: give llama_cpp_python-"):
        source.find_sdist(archive, tmp_path)
    archive.write_bytes(b"x")
    with pytest.raises(BuildError, match=f"has SHA-256 2d7.*, not the pinned {source.SDIST_SHA256}"):
        source.find_sdist(archive, tmp_path)


def test_without_a_network_the_remedy_is_the_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BuildError, match=r"could not be fetched \(.+\): without a network give .* --sdist"):
        source.find_sdist(None, tmp_path)


def test_a_build_is_whole_patched_and_made_once(tiny: Tiny):
    first = tiny.build()
    assert ctypes.CDLL(str(first.lib / "libllama.so")).tiny_answer() == 2
    assert first.changed_file() is None and first.ggml and [p.name for p in first.patches] == ["0001-another-answer"]
    assert tiny.shares and tiny.shares[-1] == 1
    assert left_in_cache() == {"KEY", "KEY.log", "last", "lock"}
    n_steps = len(tiny.steps)
    assert tiny.build() == first and len(tiny.steps) == n_steps
    (first.lib / "libllama.so").unlink()
    again = tiny.build()
    assert again.key == first.key and again.changed_file() is None
    other = tiny.build("-DOTHER=1")
    assert cache.build_keys() == [other.key, first.key]
    tiny.build()
    assert cache.build_keys() == [first.key, other.key]  # asked for last


def test_a_failed_build_leaves_a_log_and_nothing_else(tiny: Tiny, tmp_path):
    with pytest.raises(BuildError, match=r"configuring llama.cpp failed: install what it misses .*\.log") as caught:
        tiny.build(compiler(tmp_path, "echo no such luck >&2; exit 1"))
    assert any("no such luck" in line for line in caught.value.log_tail)
    write_patch(tiny.patches, broken_patch())
    with pytest.raises(BuildError, match=r"compiling llama.cpp failed") as caught:
        tiny.build()
    assert any("missing" in line for line in caught.value.log_tail)
    assert left_in_cache() == {"KEY.log", "lock"} and cache.build_keys() == []


def test_a_build_that_cannot_be_loaded_is_not_kept(tiny: Tiny):
    with pytest.raises(BuildError, match=r"cannot load .*undefined symbol"):
        tiny.build("-DWITHOUT_STOCK=ON")
    with pytest.raises(BuildError, match=r"made no libllama.so"):
        tiny.build("-DBUILD_SHARED_LIBS=OFF", "-DCMAKE_SHARED_LIBRARY_SUFFIX_C=.nothing")
    assert cache.build_keys() == [] and "work" not in left_in_cache()


def start(tiny: Tiny, *arguments: str) -> subprocess.Popen[str]:
    """The command, with the tiny archive's hash for the real one's."""
    pinned = f"from hybrid_moe_ext.patched import recipe, source; recipe.SDIST_SHA256 = source.SDIST_SHA256 = {tiny.sha256!r}; "
    command = [
        COMMAND[0],
        "-c",
        pinned + COMMAND[2],
        "build-llama",
        "--sdist",
        str(tiny.sdist),
        "--patches",
        str(tiny.patches),
    ]
    return subprocess.Popen(
        [*command, "--backend", "cpu", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def slow_compiler(folder: Path) -> str:
    """It tells its process and waits until a file `go` is there; then it is the usual one."""
    return compiler(folder, f'echo $$ > {folder}/pid\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\nexec g++ "$@"')


def wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    while not (path.is_file() and path.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return path.read_text()


def test_two_builders_take_turns(tiny: Tiny, tmp_path):
    argument = slow_compiler(tmp_path)
    first = start(tiny, f"--cmake-arg={argument}")
    wait_for(tmp_path / "pid", first)
    second = start(tiny, f"--cmake-arg={argument}")
    line = second.stderr.readline()
    assert line == f"process {first.pid} is building here: waiting for it\n", line + second.stderr.read()
    (tmp_path / "go").touch()
    (out, err), (other_out, other_err) = first.communicate(), second.communicate()
    assert out == other_out == f"{cache.read_build(cache.build_keys()[0]).lib}\n", err + other_err
    assert "compiling: 100 %" in err and "compiling" not in other_err  # the second found it done
    assert f"not used: build {cache.build_keys()[0]} has " in err and "choose it by HYBRID_MOE_LLAMA=" in err
    assert "patch:        0001-another-answer (llama : another answer" in err and "always, or when asked" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_half(tiny: Tiny, tmp_path, number):
    process = start(tiny, f"--cmake-arg={slow_compiler(tmp_path)}")
    child = int(wait_for(tmp_path / "pid", process))
    process.send_signal(number)
    process.communicate()
    assert cache.build_keys() == []
    if number == signal.SIGTERM:
        assert process.returncode == 130 and left_in_cache() == {"KEY.log", "lock"}
        while Path(f"/proc/{child}").exists():  # gone with it
            time.sleep(0.05)
    else:
        assert "work" in left_in_cache()  # until the next build, which waits for what is still running there
        threading.Timer(0.5, (tmp_path / "go").touch).start()
    assert tiny.build().changed_file() is None and "work" not in left_in_cache()
    assert any("is building here" in step for step in tiny.steps) == (number == signal.SIGKILL)


def test_list_and_clean(tiny: Tiny, capsys):
    done = tiny.build()
    (cache.cache_folder() / "0123456789abcdef").mkdir()
    assert run(["build-llama", "--list"]) == 0
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith(f"{done.key}  {done.built}  ") and good.endswith("  cpu  0001-another-answer")
    assert bad.startswith("0123456789abcdef  cannot be used: ") and "does not exist" in bad
    assert run(["build-llama", "--clean"]) == 0
    assert "removed from" in capsys.readouterr().err and left_in_cache() == {"lock"}


def test_contradictions_and_empty_folders_get_one_line(tmp_path, capsys):
    for arguments, sentence in (
        (["--list", "--clean"], "give no other option"),
        (["--list", "-j", "2"], "give no other option"),
        (["--patches", str(tmp_path)], "holds no patches"),
        (["--patches", str(tmp_path / "nowhere")], "is no folder"),
    ):
        assert run(["build-llama", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and sentence in err
