"""What `hybrid-moe info` says about the llama.cpp it runs on: which library, which patches, how they are switched on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .. import patched
from .._native import host_version
from ..patched import Patch
from ..patched.source import RELEASE

_KINDS = {
    "stock": f"as released in llama-cpp-python {RELEASE}",
    "patched": "patched by hybrid-moe build-llama",
    "given": "the library that LLAMA_CPP_LIB_PATH names",
}


def llama_facts() -> dict[str, Any]:
    """Raises OptionError when HYBRID_MOE_LLAMA asks for what could not be loaded."""
    patched.check()
    chosen = patched.in_use()
    return {
        "llama_cpp": {
            "kind": chosen.kind,
            "path": patched.library_file(),
            "ggml": host_version(),
            "build": chosen.build.key if chosen.build else None,
            "patches": [asdict(patch) for patch in patched.patched_with()],
            "not_patched_because": chosen.why,
        }
    }


def llama_lines(facts: dict[str, Any]) -> list[str]:
    told = facts["llama_cpp"]
    lines = [f"llama.cpp:    {_KINDS[told['kind']]}, ggml {told['ggml']}: {told['path']}"]
    lines += patch_lines([Patch(**patch) for patch in told["patches"]])
    if told["not_patched_because"] and told["kind"] == "stock":
        lines.append(f"not patched:  {told['not_patched_because']}")
    return lines


def patch_lines(patches: Sequence[Patch]) -> list[str]:
    return [f"patch:        {patch.name} ({patch.subject}); {patch.switch}" for patch in patches]
