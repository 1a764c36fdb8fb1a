"""The switches of the patches, which llama.cpp reads from the environment when a context is made. docs/whole-prompt.md."""

from __future__ import annotations

import os

from .choice import patched_with

TILE, DECOMPRESS = "LLAMA_TOKEN_TILE", "LLAMA_MLA_DECOMPRESS"
# Patch -> variable, and the value for a process that has none. Both leave a ubatch of 512 tokens its released graph.
_VALUES = {
    "0001-token-tiles": (TILE, "4096"),
    "0002-mla-decompressed-prefill": (DECOMPRESS, "1024"),
}


def set_switches() -> None:
    """Switches on what this process's llama.cpp has been patched with; a variable that is set stays, and 0 is off."""
    for patch in patched_with():
        if patch.name in _VALUES:
            os.environ.setdefault(*_VALUES[patch.name])


def switched_on() -> dict[str, str]:
    """Variable -> value, of the patches that this process's llama.cpp has, as far as they are not off."""
    names = [_VALUES[patch.name][0] for patch in patched_with() if patch.name in _VALUES]
    return {name: value for name in names if (value := os.environ.get(name, "")).isdecimal() and int(value)}
