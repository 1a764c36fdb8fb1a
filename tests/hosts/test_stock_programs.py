"""llama-completion, llama-bench and llama-server, unmodified and statically linked to ggml's registry, as hosts.

Slow, because somebody has to build them: LLAMA_CPP_BIN names the folder (docs/hosts.md)."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from host_models import CONTINUATION, N_PRODUCTS, PROMPT, demo_gguf
from host_run import Ran, environment, matmuls, program, run

from hybrid_moe_ext.host_env import host_env
from models import FOLDER

pytestmark = pytest.mark.slow

N_TOKENS = 24
EXPERTS = ["-ot", "exps=HybridMoE"]


def completion(kind: str, plugin: bool, *flags: str) -> Ran:
    options = ["-p", PROMPT, "-n", N_TOKENS, "--temp", 0, "-t", 2, "-c", 256, "-no-cnv", "--no-warmup"]
    command = [program("llama-completion"), "-m", demo_gguf(kind), *options, "--no-display-prompt", *flags]
    return run(command, plugin)


def is_golden(text: str) -> bool:
    """The first N_TOKENS of the golden text. This program, also stock, now and then ends before its last token is
    printed; that all were computed is counted."""
    return len(text) > 90 and CONTINUATION.startswith(text.rstrip("\n"))


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
@pytest.mark.parametrize("override", ["exps=HybridMoE", "exps=CPU"])
def test_completion_same_text(kind, override):
    ours = completion(kind, True, "-ot", override)
    assert is_golden(ours.stdout) and is_golden(completion(kind, False).stdout)
    assert ours.matmuls == N_TOKENS * N_PRODUCTS


def test_completion_fp8_gives_the_text_of_its_exact_twin():
    ours = completion("FP8", True, *EXPERTS)
    assert is_golden(ours.stdout) and is_golden(completion("F32", False).stdout)
    assert ours.matmuls == N_TOKENS * N_PRODUCTS


@pytest.mark.parametrize("mode", ["none", "dio"])
def test_completion_without_mmap(mode):
    ours = completion("Q8_0", True, *EXPERTS, "--load-mode", mode)
    assert is_golden(ours.stdout)
    assert ours.matmuls == N_TOKENS * N_PRODUCTS


def test_cpu_moe_alone_does_not_look_for_plugins():
    """What docs/hosts.md warns of: a statically linked program starts no search for this flag. Should it begin to,
    the page is wrong."""
    with pytest.raises(AssertionError, match="did not load the plug-in"):
        completion("Q8_0", True, "--cpu-moe")


def test_override_without_the_plugin_is_an_error():
    with pytest.raises(AssertionError, match="unknown buffer type"):
        completion("Q8_0", False, *EXPERTS)


@pytest.mark.parametrize("flags", [[], EXPERTS])
def test_bench_looks_for_plugins_by_itself(flags):
    options = ["-p", 16, "-n", 4, "-r", 1, "-t", 2, "-o", "json"]
    ran = run([program("llama-bench"), "-m", demo_gguf("Q8_0"), *options, *flags], True)
    measured = json.loads(ran.stdout)
    assert [row["n_prompt"] + row["n_gen"] for row in measured] == [16, 4] and all(
        row["avg_ts"] > 0 for row in measured
    )
    assert "HybridMoE" in measured[0]["backends"]
    assert ran.matmuls >= (1 + 4) * N_PRODUCTS and ran.matmuls % N_PRODUCTS == 0  # warm-ups come on top


def test_bench_with_what_host_env_prints():
    told = asdict(host_env(n_threads=2))
    options = ["-p", 0, "-n", 2, "-r", 1, "-o", "json"]
    ran = run([program("llama-bench"), "-m", demo_gguf("Q8_0"), *options, *told["flags"]], True)
    assert ran.matmuls > 0
    # the variables alone, for a program that takes them
    options = ["-p", PROMPT, "-n", 4, "--temp", 0, "-c", 256, "-no-cnv", "--no-warmup"]
    ran = run([program("llama-completion"), "-m", demo_gguf("Q8_0"), *options], True, **told["variables"])
    assert ran.matmuls == 4 * N_PRODUCTS


class Server:
    def __init__(self, port: int):
        self._port = port

    def post(self, path: str, body: dict) -> dict:
        url, data = f"http://127.0.0.1:{self._port}{path}", json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=10) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False


@contextmanager
def server(kind: str, stats: Path | None, log: Path, *flags: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", port, "-t", 2, "-c", 512, "-np", 2, "-v"]
    command = [program("llama-server"), "-m", demo_gguf(kind), *options, *flags]
    with log.open("w") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(stats)
        )
        try:
            told, deadline = Server(port), time.monotonic() + 120
            while not told.healthy():
                assert process.poll() is None, log.read_text(errors="replace")[-6000:]
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
                time.sleep(0.2)
            yield told
        finally:
            process.terminate()  # it ends in an orderly way, and the plug-in writes its counters
            process.wait(timeout=60)


def answer(kind: str, plugin: bool, *flags: str) -> tuple[str, int, str]:
    name = f"server-{kind}-{plugin}-{len(flags)}"
    stats, log = FOLDER / f"{name}.stats", FOLDER / f"{name}.log"
    stats.unlink(missing_ok=True)
    with server(kind, stats if plugin else None, log, *flags) as told:
        text = told.post("/completion", {"prompt": PROMPT, "n_predict": N_TOKENS, "temperature": 0})["content"]
    return text, matmuls(stats) if plugin else 0, log.read_text(errors="replace")


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_server_same_text_and_fit(kind):
    """--fit is on by default: it first loads the model without memory, into zero-size buffers of ours."""
    text, n, log = answer(kind, True, *EXPERTS, "--fit", "on")
    assert len(text) > 50 and CONTINUATION.startswith(text) and text == answer(kind, False)[0]
    assert n >= N_TOKENS * N_PRODUCTS and n % N_PRODUCTS == 0  # its warm-up comes on top
    assert re.search(r"fitting params to|fit_params", log), log[:4000]
    assert "HybridMoE model buffer size" in log


def test_server_fp8_gives_the_text_of_its_exact_twin():
    text, n, _ = answer("FP8", True, *EXPERTS)
    assert text == answer("F32", False)[0]
    assert n >= N_TOKENS * N_PRODUCTS
