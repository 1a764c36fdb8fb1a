"""Writes and reads a released checkpoint directory: safetensors shards, index, config, tokenizer. NumPy only.

Layout as released: `X.weight` F8_E4M3 beside `X.weight_scale_inv` F32 for every linear, everything else BF16, the
router's bias F32. One tensor per expert.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
from pathlib import Path

import numpy as np

from tiny_config import QUANTIZATION_CONFIG, State, is_fp8_linear, tensor_shapes
from tiny_fp8 import dequantise, from_bf16, quantise, to_bf16

Stored = dict[str, tuple[str, np.ndarray]]  # tensor name -> safetensors dtype, array of its bits

NUMPY_DTYPE = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F8_E4M3": np.dtype("u1")}
SCALE = "_scale_inv"


def write_safetensors(path: Path, tensors: Stored) -> None:
    """Wider types first, then names: every tensor is aligned to its own size, as the reference writer does it."""
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, array = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            dtype, array = tensors[name]
            file.write(np.ascontiguousarray(array, NUMPY_DTYPE[dtype]).tobytes())


def read_safetensors(path: Path) -> Stored:
    data = Path(path).read_bytes()
    (n_header,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n_header])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + n_header :]
    tensors: Stored = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(body[begin:end], NUMPY_DTYPE[entry["dtype"]])
        tensors[name] = entry["dtype"], array.reshape(entry["shape"])
    return tensors


def store(state: State, config: dict, fp8: bool, plain_dtype: str) -> Stored:
    """Rounds a float32 state dict to what the files hold, in released order; refuses missing and misshapen tensors."""
    shapes = tensor_shapes(config)
    extra = sorted(set(state) - set(shapes))
    if extra:
        raise ValueError(f"tensors that this config does not have: {extra[:4]}")
    stored: Stored = {}
    for name, shape in shapes.items():
        if name not in state or state[name].shape != shape:
            found = state[name].shape if name in state else "missing"
            raise ValueError(f"{name}: want {shape}, found {found}")
        array = np.asarray(state[name], np.float32)
        if fp8 and is_fp8_linear(name):
            codes, scale = quantise(array)
            stored[name] = "F8_E4M3", codes
            stored[name + SCALE] = "F32", scale
        elif plain_dtype == "F32" or name.endswith("e_score_correction_bias"):
            stored[name] = "F32", array
        elif plain_dtype == "BF16":
            stored[name] = "BF16", to_bf16(array)
        else:
            raise ValueError(f"plain_dtype {plain_dtype!r}: choose BF16 or F32")
    return stored


def cut_shards(stored: Stored, shard_count: int) -> list[Stored]:
    """Shards of about equal bytes in released order. An FP8 cut falls between an expert's weight and its scale, which
    a sorted real release does too: a loader that expects the pair in one file must fail here."""
    names = list(stored)
    if not 1 <= shard_count <= len(names):
        raise ValueError(f"shard_count {shard_count} for {len(names)} tensors")
    ends = np.cumsum([array.nbytes for _, array in stored.values()])
    pairs = [i for i in range(1, len(names)) if names[i].endswith(SCALE) and ".experts." in names[i]]
    cuts = [0]
    for i_cut in range(1, shard_count):
        ideal = int(np.searchsorted(ends, ends[-1] * i_cut / shard_count)) + 1
        later = [i for i in pairs if cuts[-1] < i <= len(names) - (shard_count - i_cut)]
        cut = min(later, key=lambda i: abs(i - ideal)) if later else ideal
        cuts.append(min(max(cut, cuts[-1] + 1), len(names) - (shard_count - i_cut)))
    cuts.append(len(names))
    return [{n: stored[n] for n in names[a:b]} for a, b in itertools.pairwise(cuts)]


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_release(
    directory: str | os.PathLike,
    config: dict,
    state_dict: State,
    tokenizer_files: dict[str, dict] | None = None,
    fp8: bool = True,
    shard_count: int = 2,
    plain_dtype: str = "BF16",
) -> None:
    """Writes a checkpoint directory. `state_dict` is float32 by released name; `tokenizer_files` maps a file name to
    its JSON. With fp8 False the linears are written in `plain_dtype` (BF16 or F32) as well and the config has no
    quantization_config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("model*.safetensors*"):
        stale.unlink()  # a shard of an earlier, longer release would be picked up by a loader that globs
    shards = cut_shards(store(state_dict, config, fp8, plain_dtype), shard_count)
    weight_map: dict[str, str] = {}
    for i_shard, shard in enumerate(shards):
        file_name = "model.safetensors"
        if shard_count > 1:
            file_name = f"model-{i_shard + 1:05d}-of-{shard_count:05d}.safetensors"
        write_safetensors(directory / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    if shard_count > 1:
        total = sum(array.nbytes for shard in shards for _, array in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / "model.safetensors.index.json", index)
    written = {**config, "torch_dtype": "float32" if plain_dtype == "F32" else "bfloat16"}
    if fp8:
        written["quantization_config"] = QUANTIZATION_CONFIG
    write_json(directory / "config.json", dict(sorted(written.items())))
    generation = {"_from_model_config": True, "bos_token_id": config["bos_token_id"]}
    generation |= {"eos_token_id": config["eos_token_id"], "do_sample": False, "transformers_version": "4.33.1"}
    write_json(directory / "generation_config.json", generation)
    for file_name, value in (tokenizer_files or {}).items():
        write_json(directory / file_name, value)


def read_config(directory: str | os.PathLike) -> dict:
    return json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))


def read_stored(directory: str | os.PathLike) -> Stored:
    """Every tensor of all shards as stored, MTP layers and scales included."""
    stored: Stored = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        stored |= read_safetensors(path)
    return stored


def read_state(directory: str | os.PathLike, with_mtp: bool = False) -> State:
    """Float32 weights by released name; FP8 dequantised, MTP layers (index >= num_hidden_layers) left out."""
    config, stored = read_config(directory), read_stored(directory)
    block = tuple(config.get("quantization_config", QUANTIZATION_CONFIG)["weight_block_size"])
    state: State = {}
    for name, (dtype, array) in stored.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name.endswith(SCALE) or (layer and int(layer[1]) >= config["num_hidden_layers"] and not with_mtp):
            continue
        if dtype == "F8_E4M3":
            state[name] = dequantise(array, stored[name + SCALE][1], block)
        else:
            state[name] = from_bf16(array) if dtype == "BF16" else array
    return state
