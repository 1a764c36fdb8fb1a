"""What the tests of refused checkpoints share: a refusal is one line that names things. Helpers, not tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoint_fixtures as fx
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.errors import CheckpointError

QWEN = "qwen3_moe"
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def refused(directory: Path, *words: str, kind: type[CheckpointError] = CheckpointError) -> None:
    """The message names what is in `words` and is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert caught.type is kind, caught.value
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def edit(path: Path, **changes: object) -> None:
    """Replaces fields of a JSON file; None removes one."""
    value = json.loads(path.read_text(encoding="utf-8")) | changes
    fx.write_json(path, {key: v for key, v in value.items() if v is not None})
