"""Small random DeepSeek-V3 checkpoints, written by hand with NumPy: no torch, no tokenizers. Helpers, not tests."""

# ruff: noqa: RUF001  (texts in many scripts, and DeepSeek's own bar)

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

NUMPY = {"F8_E4M3": "u1", "F8_E5M2": "u1", "U8": "u1", "BF16": "<u2", "F16": "<f2"}
NUMPY |= {"F32": "<f4", "I32": "<i4", "F64": "<f8"}
BLOCK = (128, 128)

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "kv_lora_rank": 64,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 160,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 48,
    "vocab_size": 300,
}

QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK)}


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


def shapes(config: dict, mtp: bool = True) -> dict[str, tuple[int, ...]]:
    """Released name -> shape, written out from the released file's layout."""
    c = config
    d, heads, kv = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    n_layer = c["num_hidden_layers"]
    for layer in range(n_layer + (c["num_nextn_predict_layers"] if mtp else 0)):
        p = f"model.layers.{layer}."
        attention = {
            "kv_a_proj_with_mqa.weight": (kv + rope, d),
            "kv_a_layernorm.weight": (kv,),
            "kv_b_proj.weight": (heads * (nope + v), kv),
            "o_proj.weight": (d, heads * v),
        }
        if c["q_lora_rank"]:
            attention["q_a_proj.weight"] = (c["q_lora_rank"], d)
            attention["q_a_layernorm.weight"] = (c["q_lora_rank"],)
            attention["q_b_proj.weight"] = (heads * (nope + rope), c["q_lora_rank"])
        else:
            attention["q_proj.weight"] = (heads * (nope + rope), d)
        found |= {p + "self_attn." + name: shape for name, shape in attention.items()}
        found[p + "input_layernorm.weight"] = found[p + "post_attention_layernorm.weight"] = (d,)
        if layer < c["first_k_dense_replace"]:
            mlps = {"mlp.": c["intermediate_size"]}
        else:
            mlps = {f"mlp.experts.{e}.": c["moe_intermediate_size"] for e in range(c["n_routed_experts"])}
            mlps["mlp.shared_experts."] = c["moe_intermediate_size"] * c["n_shared_experts"]
            found[p + "mlp.gate.weight"] = (c["n_routed_experts"], d)
            found[p + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for mlp, n_ff in mlps.items():
            found[p + mlp + "gate_proj.weight"] = found[p + mlp + "up_proj.weight"] = (n_ff, d)
            found[p + mlp + "down_proj.weight"] = (d, n_ff)
        if layer >= n_layer:
            found[p + "eh_proj.weight"] = (d, 2 * d)
            found[p + "enorm.weight"] = found[p + "hnorm.weight"] = found[p + "shared_head.norm.weight"] = (d,)
    found["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], d)
    return found


def is_linear(name: str) -> bool:
    return "_proj" in name and "eh_proj" not in name and name.endswith(".weight")


def random_tensors(
    config: dict, dtype: str, seed: int = 1, scale_dtype: str = "F32"
) -> dict[str, tuple[str, np.ndarray]]:
    """name -> (safetensors dtype, bits). `dtype` fp8, BF16, F16 or F32; norms near one, the rest near zero."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, shape in shapes(config).items():
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


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_json(pair_merges: bool = False) -> dict:
    """258 + 4 tokens: two specials, the bytes, a few merges and two added tokens behind them. (tokenizers numbers added
    tokens itself, without a gap, whatever the file says.)"""
    tokens = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", *byte_level_alphabet()]
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"]]
    tokens += ["".join(pair) for pair in merges]
    names = [(0, tokens[0], True), (1, tokens[1], True), (262, "<｜User｜>", False), (263, "<think>", False)]
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special,
         "special": special}
        for i, text, special in names
    ]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": GPT2,
        "post_processor": GPT2,
        "decoder": GPT2,
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


TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>"},
    "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"},
    "pad_token": "<｜end▁of▁sentence｜>",
    "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "tokenizer_class": "LlamaTokenizerFast",
}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_checkpoint(
    directory: Path, dtype: str = "fp8", n_shards: int = 2, tensors: dict | None = None, **changes: object
) -> dict[str, tuple[str, np.ndarray]]:
    """A whole checkpoint directory; `changes` replace config fields. Returns the tensors as written."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    tensors = random_tensors(config, dtype) if tensors is None else tensors
    if dtype == "fp8":
        config.setdefault("quantization_config", QUANTIZATION)
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", tokenizer_json())
    write_json(directory / "tokenizer_config.json", TOKENIZER_CONFIG)
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
