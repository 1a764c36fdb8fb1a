"""A server in a process of its own, for the engine benchmark: llama-server or `hybrid-moe serve`. Started, waited for, ended; if
it dies, its last words are the error."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from ..errors import OptionError, PluginError

START_S = 600  # a model of hundreds of gigabytes is read in this time
END_S = 30
DYING_S = 5  # between a connection that breaks and the end of the process
LAST_LINES = 5


class ServerProcess:
    def __init__(self, what: str, port: int, process: subprocess.Popen[bytes], log: IO[bytes]):
        self.what, self.port = what, port
        self._process, self._log = process, log

    def check_alive(self, patience_s: float = 0) -> None:
        """Raises PluginError with its log's last lines when it has ended, or does within so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        code = self._process.poll()
        if code is not None:
            self._log.seek(0)
            lines = [line.strip() for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            told = " / ".join(lines[-LAST_LINES:]) or "it said nothing"
            raise PluginError(f"{self.what} ended with {code}: {told}")

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            self.check_alive()
            with contextlib.suppress(OSError):  # urllib's errors are OSErrors: it loads still
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10).close()
                return
            time.sleep(0.05)
        raise PluginError(f"{self.what} was not ready within {START_S} s: try it by hand")

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def server(what: str, command: Sequence[object], environment: Mapping[str, str]) -> Iterator[ServerProcess]:
    """`command` gets `--host 127.0.0.1 --port N` appended."""
    port = _free_port()
    line = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    with TemporaryFile() as log:
        try:
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment))
        except OSError as error:
            raise OptionError(f"{what}: {line[0]} cannot be run ({error.strerror}): give a program") from error
        running = ServerProcess(what, port, process, log)
        try:
            running.wait_until_ready()
            yield running
        finally:
            running.end()


def llama_server_command(
    binary: Path, model: str, n_ctx: int, n_parallel: int, n_threads: int, more: Sequence[str]
) -> list[object]:
    """As our engine runs: all sequences share `n_ctx`; what it keeps of finished requests is chosen per request."""
    return [
        binary, "-m", model, "-c", n_ctx, "-np", n_parallel, "-kvu", "-t", n_threads, "-tb", n_threads, "--cache-ram", 0,
        "--fit", "off", *more,
    ]  # fmt: skip


def find_binary(path: Path) -> Path:
    """A path, or a name on PATH. Raises OptionError."""
    found = shutil.which(str(path))
    if found is None:
        there = "is not executable" if path.exists() else "does not exist"
        raise OptionError(f"--peer {path} {there}: give the path of llama.cpp's llama-server")
    return Path(found)


def our_server_command(model: str, name: str, flags: Mapping[str, object]) -> list[object]:
    given = [text for flag, value in flags.items() for text in ("--" + flag.replace("_", "-"), str(value))]
    return [sys.executable, "-c", "from hybrid_moe_ext.cli import main; main()", "serve", model, "--name", name, *given]


def stock_environment() -> dict[str, str]:
    """A host without the plug-in."""
    return {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
