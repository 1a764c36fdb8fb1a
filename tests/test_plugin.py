"""The plug-in in hosts: registered once, refused with one sentence where it must be, threads that do not race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_moe_ext import _native, library_path, register
from hybrid_moe_ext.options import _OTHER_VARIABLES, Options

CPP = Path(__file__).parent / "cpp"
SOURCES = CPP.parent.parent / "cpp"


def compiler(name: str) -> str:
    path = shutil.which(os.environ.get("CC" if name == "cc" else "CXX", name))
    if path is None:
        pytest.skip(f"no compiler ({name}) on this machine")
    return path


def python(script: str, **environ: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=CPP.parent)


def test_register_is_idempotent_and_reports():
    first, second = register(), register()
    assert first == second
    assert first.isa in _native.library().hybrid_moe_available_isas().decode().split()
    assert first.team in ("openmp", "pool") and first.host.startswith("0.25")
    count = _native.ggml_function("ggml_backend_dev_count", _native.ctypes.c_size_t, [])()
    get = _native.ggml_function("ggml_backend_dev_get", _native.ctypes.c_void_p, [_native.ctypes.c_size_t])
    name = _native.ggml_function("ggml_backend_dev_name", _native.ctypes.c_char_p, [_native.ctypes.c_void_p])
    assert [name(get(i)) for i in range(count)].count(b"HybridMoE") == 1


def test_loaded_twice_by_a_host_is_refused_the_second_time():
    """Also as a copy under another name, which is another library to the system."""
    script = """if 1:
        import ctypes, shutil, sys, tempfile, os, llama_cpp
        from hybrid_moe_ext import _native, register, library_path
        register()
        load = _native.ggml_function("ggml_backend_load", ctypes.c_void_p, [ctypes.c_char_p])
        copy = os.path.join(tempfile.mkdtemp(), "libggml-hybrid-moe-copy.so")
        shutil.copy(library_path(), copy)
        for path in (str(library_path()), copy):
            assert not load(path.encode()), path
        count = _native.ggml_function("ggml_backend_dev_count", ctypes.c_size_t, [])()
        print("devices", count)
        import models
        models.logits(llama_cpp.Llama(str(models.twin("F32")), **models.OPTIONS))
    """
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert "devices 2" in done.stdout
    assert done.stderr.count("has loaded the plug-in already") == 2


def test_the_environment_variable_of_stock_hosts_and_register_agree():
    script = """if 1:
        import ctypes
        from hybrid_moe_ext import _native, register
        _native.ggml_function("ggml_backend_load_all", None, [])()
        before = _native.device_handle()
        assert before and register() and _native.device_handle() == before
        print("ok")
    """
    done = python(script, GGML_BACKEND_PATH=str(library_path()))
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize(
    "version, flags, sentence",
    [
        ("0.19.9", [], "ggml 0.19.9 is too old"),
        ("0.26.0", [], "ggml 0.26.0 is too new"),
        ("1.2.3", [], "ggml 1.2.3 is too new"),
        ("unknown", [], "calls itself 'unknown'"),
        ("0.25.3", ["-DWITHOUT_LOG"], "no symbol ggml_log_internal"),
    ],
)
def test_hosts_that_cannot_have_us_get_one_sentence_and_go_on(tmp_path, version, flags, sentence):
    out = fake_host(tmp_path, version, flags)
    assert out.count("hybrid-moe:") == 2 and sentence in out, out
    assert "init 0: refused" in out and "init 1: refused" in out


def test_a_newer_host_on_request(tmp_path):
    out = fake_host(tmp_path, "0.26.0", [], HYBRID_MOE_UNTESTED_HOST="1")
    assert "init 0: loaded" in out and "init 1: refused" in out


def fake_host(tmp_path: Path, version: str, flags: list[str], **environ: str) -> str:
    program = tmp_path / "fake_host"
    subprocess.run(
        [
            compiler("cc"),
            "-w",
            f'-DVERSION="{version}"',
            *flags,
            "-rdynamic",
            "-o",
            program,
            CPP / "fake_host.c",
            "-ldl",
        ],
        check=True,
    )
    done = subprocess.run([program, library_path()], capture_output=True, text=True, env={**os.environ, **environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "name, value", [("HYBRID_MOE_ISA", "mmx"), ("HYBRID_MOE_TEAM", "horses"), ("HYBRID_MOE_PIN", "down")]
)
def test_a_host_with_a_wrong_environment_value_goes_on_without_us(tmp_path, name, value):
    out = fake_host(tmp_path, "0.25.0", [], **{name: value})
    assert f"{name}={value}" in out and "init 0: refused" in out


def test_a_misspelt_environment_variable_is_refused_and_no_other(tmp_path):
    out = fake_host(tmp_path, "0.25.0", [], HYBRID_MOE_TEAMS="pool")
    assert "unknown environment variable HYBRID_MOE_TEAMS" in out and "init 0: refused" in out
    for name in [env for _, env, _, _ in Options.describe()] + list(_OTHER_VARIABLES):
        assert name in out, "the plug-in and the Python package know the same"
    out = fake_host(tmp_path, "0.25.0", [], **dict.fromkeys(_OTHER_VARIABLES, ""), HYBRID_MOE_DENSE_TYPE="bf16")
    assert "unknown environment variable" not in out and "init 0: refused" not in out


def test_nothing_of_ggml_is_linked():
    """An undefined ggml symbol or a DT_NEEDED of ggml would tie us to one host's library names."""
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("no readelf on this machine")
    dynamic = subprocess.run([tool, "-d", library_path()], capture_output=True, text=True, check=True).stdout
    symbols = subprocess.run(
        [tool, "-W", "--dyn-syms", library_path()], capture_output=True, text=True, check=True
    ).stdout
    assert "libggml" not in dynamic and "libstdc++" not in dynamic and "libgomp" not in dynamic
    assert not [line for line in symbols.splitlines() if " UND " in line and "ggml" in line]
    exported = {line.split()[7] for line in symbols.splitlines() if " GLOBAL " in line and " UND " not in line}
    assert exported and all(name.startswith(("ggml_backend_init", "hybrid_moe_")) for name in exported)


def build_team_test(program: Path, *flags: str) -> subprocess.CompletedProcess:
    sources = [CPP / "test_team.cpp", *sorted((SOURCES / "threads").glob("*.cpp"))]
    command = [compiler("c++"), "-std=c++20", "-O1", "-g", *flags, f"-I{SOURCES}", *sources, "-o", program]
    return subprocess.run([*command, "-pthread", "-ldl"], capture_output=True, text=True)


def test_the_pool_under_thread_sanitizer(tmp_path):
    program = tmp_path / "team"
    built = build_team_test(program, "-fsanitize=thread")
    if built.returncode != 0 and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer runtime")
    assert built.returncode == 0, built.stderr
    # Address space randomisation beyond 30 bits confuses older runtimes.
    prefix = [shutil.which("setarch"), "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*prefix, program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


def test_the_pool_with_a_forked_child(tmp_path):
    program = tmp_path / "team"
    built = build_team_test(program)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "fork"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


def test_pool_and_openmp_give_the_same_logits():
    script = """if 1:
        import models, json, hybrid_moe_ext as h
        m = h.Llama(models.twin("F32"), **models.OPTIONS)
        print(m.status.team, models.logits(m).tobytes().hex()[:4096])
    """
    outputs = {}
    for team in ("pool", "openmp"):
        done = python(script, HYBRID_MOE_TEAM=team)
        if team == "openmp" and "openmp" not in done.stdout:
            pytest.skip("this llama-cpp-python was built without OpenMP")
        outputs[team] = done.stdout.split()
        assert outputs[team][0] == team, done.stderr
    assert outputs["pool"][1] == outputs["openmp"][1]


@pytest.mark.parametrize("team", ["pool", "openmp"])
def test_two_contexts_in_two_threads(team):
    """At once, for a while: each gets, bit for bit, what it gets alone."""
    script = """if 1:
        import concurrent.futures, models, hybrid_moe_ext as h
        llms = [h.Llama(models.twin("F32"), **models.OPTIONS) for _ in range(2)]
        print(llms[0].status.team)
        prompts = [models.prompt(40), models.prompt(100)]
        def run(i):
            return [models.logits(llms[i], prompts[i]).tobytes() for _ in range(10)]
        alone = [models.logits(llms[i], prompts[i]).tobytes() for i in range(2)]
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            together = list(threads.map(run, range(2)))
        assert all(out == alone[i] for i in range(2) for out in together[i])
        print("same")
    """
    done = python(script, HYBRID_MOE_TEAM=team)
    if "HYBRID_MOE_TEAM=openmp is not available" in done.stderr:
        pytest.skip("this llama-cpp-python was built without OpenMP")
    assert done.stdout.split() == [team, "same"], done.stderr
