"""llama.cpp's accounting of one model, asked in a child process (child.py)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from .. import errors
from ..errors import CheckpointError, HybridMoeError, PluginError


@dataclass(frozen=True)
class Gpu:
    """A device that can carry layers; `n_bytes` is what is free on it, or what it is assumed to have."""

    name: str
    description: str
    backend: str  # "CUDA", "Vulkan", ...; "assumed"
    n_bytes: int


@dataclass(frozen=True)
class Use:
    """Bytes on one device."""

    model: int = 0
    context: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        return self.model + self.context + self.compute


@dataclass(frozen=True)
class Account:
    """One context: bytes per device, of the host, and of expert weights, which are on none."""

    devices: dict[str, Use]
    host: Use
    experts: int


class Refused(Exception):
    """llama.cpp cannot make this model or context; its words."""


EXPERTS = "HybridMoE"


class Accounting:
    """`with Accounting(...) as accounting:` load, then measure as often as needed."""

    def __init__(self, model: str, assumed: list[int] | None = None):
        self._model = model
        self._errors = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # an assertion's own words, not a debugger's
        )  # fmt: skip
        try:
            devices = self._ask("start", assumed=assumed or [])["devices"]
        except BaseException:
            self.close()
            raise
        self.gpus = [Gpu(d["name"], d["description"], d["backend"], d["free"]) for d in devices]

    def load(self, kind: str, path: str, dense_type: str, split_mode: str, gpus: list[Gpu]) -> dict[str, Any]:
        """The model's metadata and `n_ctx_train`. Raises Refused."""
        names = [gpu.name for gpu in gpus]
        return self._ask("load", kind=kind, path=path, dense_type=dense_type, split_mode=split_mode, devices=names)

    def measure(self, n_ubatch: int, n_ctx: int, kv_type: str) -> Account:
        """Raises Refused."""
        uses = self._ask("measure", n_ubatch=n_ubatch, n_ctx=n_ctx, kv_type=kv_type)["uses"]
        devices = {gpu.name: _sum(uses, lambda u, name=gpu.name: u["device"] == name) for gpu in self.gpus}
        host = _sum(uses, lambda u: not u["device"] and u["buffer"] != EXPERTS)
        return Account(devices, host, sum(u["model"] for u in uses if u["buffer"] == EXPERTS))

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        if "error" in answer:
            raise getattr(errors, answer["kind"])(answer["error"])
        return answer

    def _died(self) -> HybridMoeError:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-2:]
        if code < 0:  # an assertion of llama.cpp about what the header says
            return CheckpointError(
                f"{self._model}: llama.cpp stops on this model ({' / '.join(last)}): use a file of another source"
            )
        return PluginError(f"{self._model}: the accounting process ended with {code} ({' / '.join(last)})")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Accounting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def gpus_here() -> list[Gpu]:
    """The GPUs of this machine that llama.cpp sees."""
    with Accounting("this machine") as accounting:
        return accounting.gpus


def _sum(uses: list[dict[str, Any]], wanted: Any) -> Use:
    chosen = [u for u in uses if wanted(u)]
    return Use(*(sum(u[field] for u in chosen) for field in ("model", "context", "compute")))
