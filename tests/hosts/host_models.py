"""The demo model as GGUF files that any llama.cpp host reads, experts included. Helpers, not tests."""

from __future__ import annotations

import json
import shutil
import struct
from functools import cache
from pathlib import Path

import llama_cpp
import llama_cpp._logger
import numpy as np

import checkpoint_fixtures as fixtures
from conftest import DEMO
from hybrid_moe_ext.checkpoint import open_checkpoint
from hybrid_moe_ext.convert import convert
from models import FOLDER

# The two best logits stay more than 3 apart, so another rounding (stock rounds activations to BF16 or Q8_0) flips none.
GOLDEN = json.loads((DEMO / "golden.json").read_text())["prompts"][0]
PROMPT, CONTINUATION = GOLDEN["text"], GOLDEN["greedy_text"]
N_PRODUCTS = 9  # expert matrix products per pass: 3 MoE layers x (gate, up, down)
FTYPES = {
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q5_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "MXFP4": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}


def _read_safetensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    out = {}
    for name, entry in json.loads(data[8 : 8 + n]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            bits = np.frombuffer(data[8 + n + first : 8 + n + end], fixtures.NUMPY[entry["dtype"]])
            out[name] = (entry["dtype"], bits.reshape(entry["shape"]))
    return out


@cache
def _f32() -> Path:
    """Dequantised here, by the definition, and written by the package: experts are then ordinary F32 tensors."""
    tensors = {}
    for shard in sorted(DEMO.glob("*.safetensors")):
        tensors |= _read_safetensors(shard)
    directory = FOLDER / "demo-f32"
    directory.mkdir()
    config = json.loads((DEMO / "config.json").read_text())
    del config["quantization_config"]
    fixtures.write_json(directory / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, directory)
    fixtures.write_safetensors(directory / "model.safetensors", fixtures.dequantised(tensors))
    path = FOLDER / "demo-F32.gguf"
    open_checkpoint(directory).virtual_gguf("f32").write(path)
    return path


@cache
def demo_gguf(kind: str) -> Path:
    """The demo model in one of llama.cpp's types (the conversion is its own), or its FP8 experts in GGUF."""
    if kind == "F32":
        return _f32()
    path = FOLDER / f"demo-{kind}.gguf"
    if kind == "FP8":
        return convert(DEMO, path, dense_type="f32")[0]
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FTYPES[kind]
    options.nthread = 2
    llama_cpp._logger.set_verbose(False)
    assert llama_cpp.llama_model_quantize(str(_f32()).encode(), str(path).encode(), options) == 0
    _align(path, 32)
    return path


def _align(path: Path, alignment: int) -> None:
    """llama.cpp's quantiser copies the key general.alignment and then places tensors at its own 32 bytes."""
    key = b"general.alignment" + struct.pack("<I", 4)
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key)
    data[at : at + 4] = struct.pack("<I", alignment)
    path.write_bytes(data)
