"""Small random checkpoints, written by hand with NumPy: no torch, no tokenizers. Helpers, not tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from checkpoint_families import BLOCK, BYTE_LEVEL, FAMILIES

NUMPY = {"F8_E4M3": "u1", "F8_E5M2": "u1", "U8": "u1", "BF16": "<u2", "F16": "<f2"}
NUMPY |= {"F32": "<f4", "I32": "<i4", "F64": "<f8"}
DEFAULT = "deepseek_v3"
CONFIG = FAMILIES[DEFAULT].config
QUANTIZATION = FAMILIES[DEFAULT].quantization
TOKENIZER_CONFIG = FAMILIES[DEFAULT].tokenizer_config


def e4m3(code: int) -> float:
    """One code's value, written from the definition and not like the product does it."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return float("nan") if code & 0x7F == 0x7F else -value if sign else value


E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> BF16 bits, nearest even, in float64 arithmetic on the bits."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    low = bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & (bits & 0x10000 != 0))
    return ((bits >> 16) + up).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def dequantise(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    rows, k = codes.shape
    wide = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[:rows, :k]
    return E4M3[codes] * wide.astype(np.float32)


def is_linear(name: str) -> bool:
    return "_proj" in name and "eh_proj" not in name and name.endswith(".weight")


def random_tensors(config: dict, dtype: str, seed: int = 1, scale_dtype: str = "") -> dict[str, tuple[str, np.ndarray]]:
    """name -> (safetensors dtype, bits). `dtype` fp8, BF16, F16 or F32; norms near one, the rest near zero."""
    rng = np.random.default_rng(seed)
    release = FAMILIES[config["model_type"]]
    scale_dtype = scale_dtype or release.scale_dtype
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, shape in release.shapes(config).items():
        if dtype == "fp8" and is_linear(name):
            codes = rng.integers(0, 256, shape, np.uint8)
            codes[codes & 0x7F == 0x7F] = 0
            tensors[name] = ("F8_E4M3", codes)
            grid = tuple(-(-n // b) for n, b in zip(shape, BLOCK, strict=True))
            scale = (rng.uniform(0.5, 2, grid) * 1e-3).astype(np.float32)
            tensors[name + "_scale_inv"] = pack(scale, scale_dtype)
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(0.05)
        if "norm" in name:
            values += 1
        if name.endswith("gate.weight"):
            values *= 10
        plain = "F32" if name.endswith("e_score_correction_bias") else "BF16" if dtype == "fp8" else dtype
        tensors[name] = pack(values, plain)
    return tensors


def pack(values: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
    return dtype, bf16_bits(values) if dtype == "BF16" else values.astype(NUMPY[dtype])


def unpack(tensors: dict[str, tuple[str, np.ndarray]], name: str) -> np.ndarray:
    """float32 values of a tensor, dequantised by the definition."""
    dtype, bits = tensors[name]
    if dtype == "F8_E4M3":
        return dequantise(bits, unpack(tensors, name + "_scale_inv"))
    return from_bf16(bits) if dtype == "BF16" else bits.astype(np.float32)


def dequantised(tensors: dict[str, tuple[str, np.ndarray]]) -> dict[str, tuple[str, np.ndarray]]:
    """The same model in F32. transformers would not do: it mistakes the blocks of ragged matrices."""
    return {name: ("F32", unpack(tensors, name)) for name in tensors if not name.endswith("_scale_inv")}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]], header: dict | None = None) -> None:
    """`header` replaces entries of the true header, for damaged files; a value of None removes the entry."""
    entries: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, bits) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    entries |= header or {}
    text = json.dumps({k: v for k, v in entries.items() if v is not None}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bits.tobytes() for _, bits in tensors.values()))


def byte_level_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def tokenizer_json(family: str = DEFAULT, pair_merges: bool = False) -> dict:
    """The bytes and a few merges, the family's special tokens before and behind them: some 265 tokens. (tokenizers
    numbers added tokens itself, without a gap, whatever the file says.)"""
    release = FAMILIES[family]
    tokens = [*release.first_tokens, *byte_level_alphabet()]
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"]]
    tokens += ["".join(pair) for pair in merges]
    names = [(i, text, True) for i, text in enumerate(release.first_tokens)]
    names += [(len(tokens) + i, text, special) for i, (text, special) in enumerate(release.added_tokens)]
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special,
         "special": special}
        for i, text, special in names
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": release.normalizer,
        "pre_tokenizer": release.pre_tokenizer,
        "post_processor": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges if pair_merges else [" ".join(pair) for pair in merges],
        },
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_checkpoint(
    directory: Path,
    dtype: str = "fp8",
    n_shards: int = 2,
    tensors: dict | None = None,
    family: str = DEFAULT,
    **changes: object,
) -> dict[str, tuple[str, np.ndarray]]:
    """A whole checkpoint directory; `changes` replace config fields. Returns the tensors as written."""
    directory.mkdir(parents=True, exist_ok=True)
    release = FAMILIES[family]
    config = {**release.config, **changes}
    tensors = random_tensors(config, dtype) if tensors is None else tensors
    if dtype == "fp8":
        config.setdefault("quantization_config", release.quantization)
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", tokenizer_json(family))
    write_json(directory / "tokenizer_config.json", release.tokenizer_config)
    if release.generation_config:
        write_json(directory / "generation_config.json", release.generation_config)
    names = list(tensors)
    files = [f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors" for i in range(n_shards)]
    weight_map = {}
    for i, file in enumerate(files):
        part = names[i::n_shards]  # scatters weights and their scales over the shards, as sorted releases do
        write_safetensors(directory / ("model.safetensors" if n_shards == 1 else file), {n: tensors[n] for n in part})
        weight_map |= dict.fromkeys(part, file)
    if n_shards > 1:
        write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tensors
