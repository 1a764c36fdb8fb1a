"""The families this version can run. A declarative file each, over decoder.py; a new one is a file and an entry."""

from __future__ import annotations

from pathlib import Path

from ...errors import UnsupportedModelError
from ..config import Fields
from ..family import Family
from .deepseek_v3 import DEEPSEEK_V3
from .qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {family.hf_arch: family for family in (DEEPSEEK_V3, QWEN3_MOE)}


def find_family(config: Fields) -> Family:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise config.fail("architectures", "but must be a list of names")
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"{Path(config.path)}: architecture {', '.join(architectures)} is not known; known are {', '.join(FAMILIES)}:"
        f" convert the model to GGUF to run it"
    )
