"""Every tensor of a Shape, by llama.cpp's names: what a GGUF of that model has in it. Names and sizes only, no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import gguf
from gguf import GGMLQuantizationType as Type

from ..errors import OptionError
from .shapes import Mla, Shape

# Types that experts can be asked for in, as `--type` has them.
EXPERT_TYPES = (
    "FP8", "BF16", "F16", "F32", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "IQ4_XS", "MXFP4", "NVFP4",
)  # fmt: skip
DENSE_TYPES = {"bf16": Type.BF16, "q8_0": Type.Q8_0, "f32": Type.F32}
FP8_BLOCK = 128  # rows and columns that share an F32 scale in released FP8 models


@dataclass(frozen=True)
class Tensor:
    name: str
    type: Type
    shape: tuple[int, ...]  # outermost first

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return self.n_elements // int(block) * int(block_bytes)


def tensors_of(shape: Shape, expert_type: str, dense_type: str) -> list[Tensor]:
    """Raises OptionError for a type that experts of this shape cannot have."""
    if expert_type not in EXPERT_TYPES:
        raise OptionError(f"--type {expert_type}: experts cannot be asked for in it: choose {', '.join(EXPERT_TYPES)}")
    if dense_type not in DENSE_TYPES:
        raise OptionError(f"--dense-type {dense_type}: is not known: choose {', '.join(DENSE_TYPES)}")
    kind = Type.I8 if expert_type == "FP8" else Type[expert_type]
    block = int(gguf.GGML_QUANT_SIZES[kind][0])
    for k in (shape.n_embd, shape.n_ff_expert):
        if k % block:
            raise OptionError(
                f"--type {expert_type}: its blocks have {block} weights, which do not divide rows of {k}: choose another"
            )
    dense = DENSE_TYPES[dense_type]
    found = [Tensor("token_embd.weight", dense, (shape.n_vocab, shape.n_embd))]
    found += [Tensor("output_norm.weight", Type.F32, (shape.n_embd,))]
    found += [Tensor("output.weight", dense, (shape.n_vocab, shape.n_embd))]
    for layer in range(shape.n_layer):
        parts = {**_norms(shape), **(_mla(shape, shape.mla) if shape.mla else _gqa(shape)), **_ffn(shape, layer)}
        for name, dims in parts.items():
            type_ = kind if "_exps.weight" in name else dense if _is_matrix(name, dims) else Type.F32
            found.append(Tensor(f"blk.{layer}.{name}", type_, dims))
    return found


def scale_bytes(shape: Shape) -> int:
    """Of all FP8 experts of one layer: they cross the link with the codes."""
    rows, k = -(-shape.n_ff_expert // FP8_BLOCK), -(-shape.n_embd // FP8_BLOCK)
    return 3 * shape.n_expert * rows * k * 4


def _is_matrix(name: str, dims: tuple[int, ...]) -> bool:
    """Routers stay in F32, as in released files."""
    return len(dims) > 1 and name != "ffn_gate_inp.weight" and not name.endswith(".bias")


def _norms(s: Shape) -> dict[str, tuple[int, ...]]:
    second = "post_attention_norm" if s.arch in ("glm4moe", "gpt-oss") else "ffn_norm"
    return {"attn_norm.weight": (s.n_embd,), f"{second}.weight": (s.n_embd,)}


def _mla(s: Shape, m: Mla) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q_a.weight": (m.q_lora, s.n_embd),
        "attn_q_a_norm.weight": (m.q_lora,),
        "attn_q_b.weight": (s.n_head * (m.nope + m.rope), m.q_lora),
        "attn_kv_a_mqa.weight": (m.kv_lora + m.rope, s.n_embd),
        "attn_kv_a_norm.weight": (m.kv_lora,),
        "attn_k_b.weight": (s.n_head, m.kv_lora, m.nope),
        "attn_v_b.weight": (s.n_head, m.v_dim, m.kv_lora),
        "attn_output.weight": (s.n_embd, s.n_head * m.v_dim),
    }


def _gqa(s: Shape) -> dict[str, tuple[int, ...]]:
    rows = {"q": s.n_head * s.head_dim, "k": s.n_head_kv * s.head_dim, "v": s.n_head_kv * s.head_dim}
    found: dict[str, tuple[int, ...]] = {f"attn_{name}.weight": (n, s.n_embd) for name, n in rows.items()}
    found["attn_output.weight"] = (s.n_embd, rows["q"])
    if s.arch in ("glm4moe", "gpt-oss"):
        found |= {f"attn_{name}.bias": (n,) for name, n in rows.items()}
    if s.arch == "gpt-oss":
        found |= {"attn_output.bias": (s.n_embd,), "attn_sinks.weight": (s.n_head,)}
    else:
        whole = s.arch == "minimax-m2"  # one norm over all heads
        found |= {f"attn_{x}_norm.weight": (rows[x] if whole else s.head_dim,) for x in ("q", "k")}
    return found


def _ffn(s: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    if layer < s.n_layer_dense:
        return dict(_gated("", s.n_ff, s.n_embd))
    found: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (s.n_expert, s.n_embd)}
    if s.arch in ("deepseek2", "glm4moe", "minimax-m2"):
        found["exp_probs_b.bias"] = (s.n_expert,)
    for name, (rows, k) in _gated("_exps", s.n_ff_expert, s.n_embd):
        found[name] = (s.n_expert, rows, k)
        if s.arch == "gpt-oss":
            found[name.replace("weight", "bias")] = (s.n_expert, rows)
    if s.arch == "gpt-oss":
        found["ffn_gate_inp.bias"] = (s.n_expert,)
    if s.n_ff_shared:
        found |= dict(_gated("_shexp", s.n_ff_shared, s.n_embd))
    return found


def _gated(suffix: str, n_ff: int, n_embd: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for name in ("gate", "up", "down"):
        yield f"ffn_{name}{suffix}.weight", (n_embd, n_ff) if name == "down" else (n_ff, n_embd)
