"""`hybrid-moe serve` as a process: it says where it listens, drains at SIGTERM, and refuses wrong input in one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from conftest import DEMO
from engine_solo import DEADLOCK_S

COMMAND = [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()", "serve"]
SMALL = ["--ctx", "1024", "--threads", "1", "--port", "0"]
PROMPT = "The licenses for most software are designed to"


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its address, once it serves."""
    child = subprocess.Popen([*COMMAND, str(DEMO), *SMALL, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        line = child.stderr.readline()
        found = re.search(r"^serving tiny-deepseek-v3-fp8 at (http://\S+)/v1, 1024 tokens of context", line)
        assert found, line + (child.stderr.read() if child.poll() is not None else "")
        assert child.stderr.readline().startswith("dual batch: off (attention is not on a GPU")
        yield child, found[1]
    finally:
        child.kill()
        child.communicate(timeout=DEADLOCK_S)


def stream(url: str, n: int, key: str = "none") -> openai.Stream:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLOCK_S)
    return client.completions.create(
        model=DEMO.name, prompt=PROMPT, max_tokens=n, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )


def refuses(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=DEADLOCK_S).status_code == 503
    except httpx.ConnectError:
        return True


def test_sigterm_lets_streams_finish(tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with started("--api-key-file", str(key)) as (child, url):
        with pytest.raises(openai.AuthenticationError):
            stream(url, 1)
        n = 150
        chunks = stream(url, n, "sesame")
        next(chunks)
        child.send_signal(signal.SIGTERM)
        seen, was_refused = 1, False
        for chunk in chunks:
            seen, last = seen + 1, chunk
            was_refused = was_refused or refuses(url)
        assert was_refused, "it took connections until the stream was done"
        assert last.choices[0].finish_reason == "length" and seen > n / 2
        assert child.wait(DEADLOCK_S) == 0
        assert child.stderr.read() == ""


def test_sigterm_waits_for_drain_s_only() -> None:
    with started("--drain-s", "0.05") as (child, url):
        chunks = stream(url, 1000)
        next(chunks)
        child.send_signal(signal.SIGTERM)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(chunks)
        assert child.wait(DEADLOCK_S) == 0


def test_ctrl_c() -> None:
    with started() as (child, _):
        child.send_signal(signal.SIGINT)
        assert child.wait(DEADLOCK_S) == 130
        assert "Traceback" not in child.stderr.read()


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([str(DEMO), "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        ([str(DEMO), "--queue", "0"], "queue"),
        ([str(DEMO), "--timeout-s", "-1"], "timeout_s"),
        ([str(DEMO), "--api-key-file", "/does/not/exist"], "/does/not/exist"),
        ([str(DEMO), "--api-key-file", os.devnull], os.devnull),
        ([str(DEMO), "--cors-origin", "chat.example"], "chat.example"),
        (["/does/not/exist"], "/does/not/exist"),
        ([str(DEMO), "--port", "TAKEN"], "port"),
    ],
)
def test_wrong_input(arguments: list[str], named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [str(taken.getsockname()[1]) if a == "TAKEN" else a for a in arguments]
        done = subprocess.run([*COMMAND, *given], capture_output=True, text=True, timeout=DEADLOCK_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and named in done.stderr


def test_missing_packages_are_named() -> None:
    """With the command that installs them; and other commands do without."""
    hide = "import sys; sys.modules['fastapi'] = None; from hybrid_moe_ext.cli import main; main({!r})"
    done = subprocess.run(
        [sys.executable, "-c", hide.format(["serve", str(DEMO)])], capture_output=True, text=True, timeout=DEADLOCK_S
    )
    assert done.returncode == 2 and "pip install 'hybrid-moe-ext[server]'" in done.stderr, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", hide.format(["info", str(DEMO)])], capture_output=True, text=True, timeout=DEADLOCK_S
    )
    assert done.returncode == 0, done.stderr
