"""A module of this package in a process of its own that answers lines with JSON objects, a line each, until its input ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import Any

from ..errors import PluginError
from ..options import ENV_PREFIX, Options


class Child:
    """`options` go to it by its environment; `more` is added, variables in `without` are left out. `what` names it in errors."""

    def __init__(
        self,
        module: str,
        arguments: list[object],
        options: Options,
        what: str,
        more: Mapping[str, str] | None = None,
        without: tuple[str, ...] = ("GGML_BACKEND_PATH",),
    ):
        self._what = what
        env = {name: value for name, value in os.environ.items() if name not in without}
        env |= {ENV_PREFIX + name.upper(): str(getattr(options, name)) for name in Options.names()}
        self._errors = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env | dict(more or {}),
        )  # fmt: skip

    def ask(self, command: str) -> dict[str, Any]:
        """Raises PluginError with its last words when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What it says without being asked, or still has to say."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        told: dict[str, Any] = json.loads(line)
        return told

    def _fail(self) -> None:
        self._process.wait()
        self._errors.seek(0)
        reason = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-3:]
        raise PluginError(f"{self._what} ended with {self._process.returncode}: {' / '.join(reason)}")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
