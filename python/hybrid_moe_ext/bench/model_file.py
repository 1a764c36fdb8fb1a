"""A GGUF with the shape of Qwen3-30B-A3B and random weights, for timing: fewer layers, no vocabulary, any weight type."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from ..checkpoint import ExpertTensor, TensorRef
from ..checkpoint import trailer as fp8
from ..checkpoint.quantization import grid_shape
from ..errors import OptionError
from .layer import random_codes

VERSION = 1  # of what is written, in the file's name: a folder may hold files of an older release
BLOCK = (128, 128)
# What goes with experts of a type that is for experts only, as released models have it.
DENSE_KIND = {"FP8": "Q8_0", "MXFP4": "Q8_0", "NVFP4": "Q8_0"}


@dataclass(frozen=True)
class ModelShape:
    n_layer: int = 4
    n_embd: int = 2048
    n_ff: int = 768
    n_expert: int = 128
    n_used: int = 8
    n_head: int = 32
    n_head_kv: int = 4
    head_dim: int = 128
    # A twelfth of the real one, as 4 layers are of 48: the output matrix keeps its share of the time.
    n_vocab: int = 151936 // 12 // 32 * 32
    n_ctx: int = 4096


@dataclass(frozen=True)
class _Tensor:
    name: str
    kind: str
    shape: tuple[int, ...]  # outermost first

    @property
    def type(self) -> Type:
        return Type.I8 if self.kind == "FP8" else Type[self.kind]

    @property
    def n_bytes(self) -> int:
        n_block, n_block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // int(n_block) * int(n_block_bytes)

    def pieces(self, rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
        """Experts are copies of one: what they hold does not matter for time, where it lies does."""
        if len(self.shape) == 1:
            yield np.ones(self.shape, np.float32).view(np.uint8)
        elif self.kind == "F32":
            yield (rng.standard_normal(self.shape) * 0.02).astype(np.float32).view(np.uint8)
        else:
            rows, k = self.shape[-2:]
            one = random_codes(self.kind, rows, k, 1, rng)
            for _ in range(int(np.prod(self.shape[:-2]))):
                yield one


def _tensors(s: ModelShape, kind: str) -> list[_Tensor]:
    dense = DENSE_KIND.get(kind, kind)
    n_query, n_key = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    found = [
        _Tensor("token_embd.weight", dense, (s.n_vocab, s.n_embd)),
        _Tensor("output_norm.weight", "F32", (s.n_embd,)),
    ]
    found.append(_Tensor("output.weight", dense, (s.n_vocab, s.n_embd)))
    for i in range(s.n_layer):
        for name in ("attn_norm", "ffn_norm"):
            found.append(_Tensor(f"blk.{i}.{name}.weight", "F32", (s.n_embd,)))
        for name in ("attn_q_norm", "attn_k_norm"):
            found.append(_Tensor(f"blk.{i}.{name}.weight", "F32", (s.head_dim,)))
        shapes = {"attn_q": (n_query, s.n_embd), "attn_k": (n_key, s.n_embd), "attn_v": (n_key, s.n_embd)}
        for name, shape in {**shapes, "attn_output": (s.n_embd, n_query)}.items():
            found.append(_Tensor(f"blk.{i}.{name}.weight", dense, shape))
        found.append(_Tensor(f"blk.{i}.ffn_gate_inp.weight", "F32", (s.n_expert, s.n_embd)))
        for name in ("gate", "up"):
            found.append(_Tensor(f"blk.{i}.ffn_{name}_exps.weight", kind, (s.n_expert, s.n_ff, s.n_embd)))
        found.append(_Tensor(f"blk.{i}.ffn_down_exps.weight", kind, (s.n_expert, s.n_embd, s.n_ff)))
    return found


def model_file(folder: Path, kind: str, shape: ModelShape) -> Path:
    """The file in `folder`, written unless it is there."""
    if not folder.is_dir():
        raise OptionError(f"{folder}: this folder does not exist: make it, or give another")
    path = folder / f"qwen3-30b-a3b-{shape.n_layer}-layers-{shape.n_embd}-{kind}-v{VERSION}.gguf"
    if path.exists():
        return path
    tensors = _tensors(shape, kind)
    n_bytes = sum(t.n_bytes for t in tensors)
    if shutil.disk_usage(folder).free < 1.1 * n_bytes:
        raise OptionError(f"{folder}: a model of {n_bytes / 1e9:.1f} GB does not fit on the disk: give another folder")
    part = path.with_suffix(".part")
    try:
        _write(part, tensors, shape, kind)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _write(path: Path, tensors: list[_Tensor], shape: ModelShape, kind: str) -> None:
    w = gguf.GGUFWriter(path, "qwen3moe")
    w.add_custom_alignment(fp8.ALIGNMENT)
    _write_metadata(w, shape)
    if kind == "FP8":
        w.add_uint32(fp8.VERSION_KEY, fp8.VERSION)
    for t in tensors:
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    rng = np.random.default_rng(0)
    starts: dict[str, int] = {}
    with path.open("ab") as file:
        for t in tensors:
            file.write(bytes(-file.tell() % fp8.ALIGNMENT))
            starts[t.name] = file.tell()
            for piece in t.pieces(rng):
                file.write(piece.data)
        file.write(bytes(-file.tell() % fp8.ALIGNMENT))
        if kind == "FP8":
            placed = [(t, starts[t.name]) for t in tensors if t.kind == "FP8"]
            _write_trailer(path, file.tell(), placed, rng)


def _write_metadata(w: gguf.GGUFWriter, s: ModelShape) -> None:
    w.add_block_count(s.n_layer)
    w.add_context_length(s.n_ctx)
    w.add_embedding_length(s.n_embd)
    w.add_feed_forward_length(3 * s.n_embd)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_expert_count(s.n_expert)
    w.add_expert_used_count(s.n_used)
    w.add_expert_feed_forward_length(s.n_ff)
    w.add_vocab_size(s.n_vocab)
    w.add_tokenizer_model("no_vocab")


def _write_trailer(path: Path, start: int, placed: list[tuple[_Tensor, int]], rng: np.random.Generator) -> None:
    """One grid of scales per shape, for all experts of all layers."""
    experts = []
    with TemporaryDirectory(prefix="hybrid-moe-bench-") as folder:
        for t, at in placed:
            n_expert, rows, k = t.shape
            grid = grid_shape(rows, k, BLOCK)
            file = Path(folder) / f"{grid[0]}x{grid[1]}"
            if not file.exists():
                file.write_bytes(rng.uniform(1e-4, 2e-4, grid).astype(np.float32).tobytes())
            scale = TensorRef(t.name, file, "F32", grid, 0, file.stat().st_size)
            experts.append((ExpertTensor(t.name, Type.I8, n_expert, rows, k, (), (scale,) * n_expert, BLOCK), at))
        trailer = fp8.Trailer(experts, start)
        with path.open("r+b") as out:
            out.seek(start)
            out.writelines(trailer.pieces())
