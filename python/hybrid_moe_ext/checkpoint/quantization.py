"""How config.json says the weights are stored, and which scale tensors FP8 weights then have. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .config import Fields
from .safetensors import TensorRef

Block = tuple[int, int]  # rows and columns of weights that share a scale
BLOCK_SUFFIX = "_scale_inv"  # behind the weight's name; multiply by it, despite the name
SUFFIX = "_scale"

SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
REMEDY = (
    "FP8 (E4M3) with scales per block, output channel or tensor (quant_method fp8 or compressed-tensors) and unquantised"
    " weights can be run: get such a release"
)


def grid_shape(rows: int, k: int, block: Block) -> tuple[int, int]:
    """How many scales a [rows, k] matrix has; blocks at the edges may be partial."""
    return -(-rows // block[0]), -(-k // block[1])


def in_words(rows: int, k: int, block: Block) -> str:
    """How many weights of a [rows, k] matrix share a scale."""
    if block == (rows, k):
        return "one per tensor"
    return "one per output channel" if block == (1, k) else f"one per block of {block[0]} x {block[1]}"


@dataclass(frozen=True)
class Strategy:
    """One way for weights to share scales."""

    kind: str  # block | channel | tensor
    size: Block = (0, 0)  # of a block

    def block(self, rows: int, k: int) -> Block:
        return {"block": self.size, "channel": (1, k), "tensor": (rows, k)}[self.kind]

    def shapes(self, rows: int, k: int) -> list[tuple[int, ...]]:
        """How the scales of a [rows, k] matrix may be stored."""
        grid = grid_shape(rows, k, self.block(rows, k))
        others: dict[str, list[tuple[int, ...]]] = {"block": [], "channel": [(rows,)], "tensor": [(1,), ()]}
        return [grid, *others[self.kind]]

    @property
    def rule(self) -> str:
        size = f" of {self.size[0]}x{self.size[1]}" if self.kind == "block" else ""
        return f"one scale per {self.kind}{size}"


@dataclass(frozen=True)
class Fp8:
    """FP8 weights: value = code x scale[row // block[0], column // block[1]]. Tensors may differ in the strategy."""

    strategies: tuple[Strategy, ...]
    suffixes: tuple[str, ...]  # of a scale's name, behind its weight's

    def block_of(self, weight: TensorRef, scale: TensorRef) -> Block:
        """What a scale tensor's type and shape say, when config.json allows it."""
        if scale.dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{scale.path}: scale {scale.name!r} is {scale.dtype}, but must be one of {', '.join(SCALE_DTYPES)}:"
                f" get a release with such scales"
            )
        rows, k = weight.shape
        for strategy in self.strategies:
            if scale.shape in strategy.shapes(rows, k):
                return strategy.block(rows, k)
        wanted = [f"{list(s.shapes(rows, k)[0])} ({s.rule})" for s in self.strategies]
        raise CheckpointError(
            f"{scale.path}: tensor {scale.name!r} has the shape {list(scale.shape)}, but must have {' or '.join(wanted)}:"
            f" config.json and weights do not belong together, download both again"
        )


def read_quantization(config: Fields) -> Fp8 | None:
    """How the weights are stored: None for plain BF16, F16 or F32."""
    fields = config.child("quantization_config")
    if fields is None:
        return None
    method = fields.get("quant_method", "missing")
    if method == "fp8":
        return _read_fp8(fields)
    if method == "compressed-tensors":
        return _read_compressed_tensors(fields)
    raise fields.unsupported("quant_method", REMEDY)


def _read_fp8(fields: Fields) -> Fp8:
    """Blocks as DeepSeek and Qwen release them; without weight_block_size one scale per tensor or per row."""
    if fields.get("fmt", "e4m3") != "e4m3":
        raise fields.unsupported("fmt", REMEDY)
    block = fields.get("weight_block_size", None)
    if block is None:
        return Fp8((Strategy("tensor"), Strategy("channel")), (SUFFIX, BLOCK_SUFFIX))
    return Fp8((Strategy("block", _read_block(fields, "weight_block_size")),), (BLOCK_SUFFIX, SUFFIX))


def _read_block(fields: Fields, key: str) -> Block:
    block = fields.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise fields.fail(key, "but must be two positive integers [rows, columns]")
    return block[0], block[1]


# Both names stand for the same bytes: codes as they are beside their scales.
_FORMATS = ("float-quantized", "naive-quantized")


def _read_compressed_tensors(fields: Fields) -> Fp8:
    """What llm-compressor writes. A group of layers may have a strategy of its own; each scale's shape tells which."""
    fields.only("format", _FORMATS, REMEDY)
    fields.only("quantization_status", ("compressed",), REMEDY, default="compressed")
    _refuse_more(fields, "sparsity_config", harmless=("dense",))
    _refuse_more(fields, "transform_config", harmless=())
    groups = fields.child("config_groups")
    if groups is None or not groups.values:
        raise fields.fail("config_groups", "but must describe the quantised layers")
    strategies = [_read_group(group) for name in groups.values if (group := groups.child(name)) is not None]
    return Fp8(tuple(dict.fromkeys(strategies)), (SUFFIX,))


def _refuse_more(fields: Fields, key: str, harmless: tuple[str, ...]) -> None:
    """Weights that are stored sparse or rotated besides."""
    more = fields.child(key)
    if more is not None and more.values and more.values.get("format") not in harmless:
        raise fields.unsupported(key, REMEDY)


def _read_group(group: Fields) -> Strategy:
    group.only("format", _FORMATS, REMEDY, default=None)
    weights = group.child("weights")
    if weights is None:
        raise group.fail("weights", "but must describe how they are stored")
    weights.only("type", ("float",), REMEDY)
    weights.only("num_bits", (8,), REMEDY)
    weights.only("symmetric", (True,), REMEDY, default=True)
    if weights.get("group_size", None) is not None:
        raise weights.unsupported("group_size", REMEDY)
    kind: Any = weights.only("strategy", ("block", "channel", "tensor"), REMEDY)
    return Strategy(kind, _read_block(weights, "block_structure") if kind == "block" else (0, 0))
