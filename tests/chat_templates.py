"""The chat templates of llama.cpp's archive, which are their models' own. No tests."""

from __future__ import annotations

import os
import tarfile
from functools import cache

import pytest

from hybrid_moe_ext.server.template import Template

needs_archive = pytest.mark.skipif(
    not os.environ.get("LLAMA_CPP_SDIST"), reason="set LLAMA_CPP_SDIST to llama-cpp-python's source archive"
)
_FOLDER = "/vendor/llama.cpp/models/templates/"


@cache
def all_templates() -> dict[str, str]:
    """By name; none without the archive."""
    path = os.environ.get("LLAMA_CPP_SDIST")
    if not path:
        return {}
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if _FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[member.name.rpartition("/")[2].removesuffix(".jinja")] = file.read().decode()
    return found


@cache
def template(name: str) -> Template:
    return Template(all_templates()[name], "<s>", "</s>")
