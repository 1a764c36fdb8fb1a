"""What a stock llama.cpp program needs on this machine to run its experts here: variables and flags, as shell lines."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from . import __version__
from ._native import DEVICE, library_path
from .checkpoint import is_checkpoint_dir
from .errors import CheckpointError
from .info import BOTH, HOST, describe_model

TESTED_GGML = "0.20 to 0.25"  # oldest_host and newest_host of cpp/plugin/host.h

# To the device by name: a host that did not load the plug-in then stops and says so.
ALL_EXPERTS = f"exps={DEVICE}"
# To "the CPU", which asks the plug-in first, type by type: what it has no kernels for keeps llama.cpp's own layouts.
EXPERTS_BY_TYPE = "exps=CPU"


@dataclass(frozen=True)
class HostEnv:
    """`variables` suffice for llama-server, llama-completion and llama-cli; llama-bench reads the first and takes `flags`."""

    variables: dict[str, str]
    flags: list[str]
    notes: list[str]

    def shell_lines(self) -> list[str]:
        lines = [f"# {note}" for note in self.notes]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return [*lines, f"# the same as flags, for llama-bench: {shlex.join(self.flags)}"]


def host_env(n_threads: int, model: str | None = None) -> HostEnv:
    """`model`: a GGUF, to say what is right for its experts. Raises CheckpointError when no stock host can open it."""
    override, notes = ALL_EXPERTS, [f"hybrid-moe-ext {__version__}; hosts on Linux with ggml {TESTED_GGML}"]
    if model is not None:
        override, note = _for_model(model)
        notes.append(f"{Path(model).name}: {note}")
    variables = {
        "GGML_BACKEND_PATH": str(library_path()),
        "LLAMA_ARG_OVERRIDE_TENSOR": override,
        "LLAMA_ARG_THREADS": str(n_threads),
    }
    return HostEnv(variables, ["-ot", override, "-t", str(n_threads)], notes)


def _for_model(path: str) -> tuple[str, str]:
    if is_checkpoint_dir(path):
        raise CheckpointError(
            f"{path} is a Hugging Face directory, which no stock host opens: `hybrid-moe convert` makes a GGUF of it"
        )
    model = describe_model(path)
    if model.experts_on is None:
        raise CheckpointError(f"{path} has no experts: this package has nothing to do for it")
    kept = ", ".join(model.host_expert_types)
    if model.experts_on == HOST:
        return EXPERTS_BY_TYPE, f"experts of type {kept} have no kernels here and stay with the host"
    if model.experts_on == BOTH:
        return EXPERTS_BY_TYPE, f"experts run on {DEVICE}, but those of type {kept} stay with the host"
    return ALL_EXPERTS, f"all experts run on {DEVICE}"
