"""`hybrid-moe host-env`: its lines work when pasted, and say what is right for a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid_moe_ext
import models
from hybrid_moe_ext import library_path

COMMAND = [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()", "host-env"]


def host_env(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def pasted(lines: str, command: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
    done = subprocess.run(["bash", "-euc", lines + command], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lines_are_ready_to_paste():
    told = host_env("-t", 2)
    assert told.returncode == 0 and told.stderr == "", told.stderr
    assert pasted(told.stdout, 'echo "$GGML_BACKEND_PATH"') == f"{library_path()}\n"
    assert pasted(told.stdout, 'echo "$LLAMA_ARG_OVERRIDE_TENSOR $LLAMA_ARG_THREADS"') == "exps=HybridMoE 2\n"
    assert f"hybrid-moe-ext {hybrid_moe_ext.__version__}" in told.stdout
    assert told.stdout.endswith(": -ot exps=HybridMoE -t 2\n")


def test_a_stock_host_that_was_given_the_lines_has_the_device():
    script = """if 1:
        import ctypes
        from llama_cpp import llama_cpp as C
        C.llama_backend_init()
        C._lib.ggml_backend_load_all()
        C._lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p
        print("found" if C._lib.ggml_backend_dev_by_name(b"HybridMoE") else "not found")
    """
    assert pasted(host_env().stdout, f"{sys.executable} -c '{script}'") == "found\n"
    assert pasted("", f"{sys.executable} -c '{script}'") == "not found\n"


def test_json_has_the_same():
    told = json.loads(host_env("--json").stdout)
    assert told["variables"]["GGML_BACKEND_PATH"] == str(library_path())
    assert told["flags"][:2] == ["-ot", "exps=HybridMoE"]


def test_a_model_is_looked_at():
    told = host_env(models.twin("BF16")).stdout
    assert "all experts run on HybridMoE" in told and "exps=HybridMoE" in told


@pytest.mark.parametrize(
    ("model", "sentence"),
    [(models.fp8_directory, "hybrid-moe convert"), (lambda: "missing.gguf", "does not exist")],
)
def test_what_no_stock_host_opens_is_refused(model, sentence):
    done = host_env(model())
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert sentence in done.stderr


def test_a_wrong_path_for_the_counters_is_refused(tmp_path):
    """HYBRID_MOE_STATS is opened when a host loads us, not when it ends."""
    script = "import hybrid_moe_ext; hybrid_moe_ext.register()"
    env = os.environ | {"HYBRID_MOE_STATS": str(tmp_path / "missing" / "file")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode != 0 and "cannot be written: No such file or directory" in done.stderr


def test_counters_are_appended_at_exit(tmp_path):
    script = """if 1:
        import models, hybrid_moe_ext as h
        models.logits(h.Llama(models.twin("F32"), **models.OPTIONS))
        print(h.counters().n_matmuls)
    """
    path = tmp_path / "stats"
    env = os.environ | {"HYBRID_MOE_STATS": str(path)}
    for n_processes in (1, 2):
        command, here = [sys.executable, "-c", script], Path(__file__).parent
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=here)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == n_processes and lines[-1]["matmuls"] == int(done.stdout) > 0
        assert lines[-1]["ggml"].startswith("0.25")
