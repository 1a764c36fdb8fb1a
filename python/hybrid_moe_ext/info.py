"""What a model is and what would run where, read from headers alone: no weight is touched, nothing is loaded.

info = describe_model("DeepSeek-V3/")        # or a GGUF, or the first file of a split one
print(info.experts_on, info.parts["experts"].types)
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf

from .checkpoint import is_checkpoint_dir, open_checkpoint, trailer
from .checkpoint.quantization import in_words
from .errors import CheckpointError

OURS = "HybridMoE"
HOST = "host"
BOTH = "HybridMoE and host"

# Types that supports_op takes experts of on CPUs with AVX2 (worth_taking in cpp/kernels/select.cpp), by the name GGUF or
# safetensors has for them.
ACCEPTED_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "F8_E4M3", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4",
)  # fmt: skip
PARTS = ("experts", "attention", "ffn", "embeddings", "other")

_EXPERT_WEIGHT = re.compile(r"\.ffn_(up|down|gate|gate_up)_exps\.weight$")
_GGUF_PARTS = (
    ("attention", re.compile(r"^blk\.\d+\.(attn|ssm|indexer)")),
    ("ffn", re.compile(r"^blk\.\d+\.(ffn|exp_probs)")),
    ("embeddings", re.compile(r"^(token_|position_|output|rope_)")),
)


@dataclass(frozen=True)
class Part:
    """One part of a model. `n_bytes` is what is stored, scales included; `types` divides it by stored type."""

    n_bytes: int
    types: dict[str, int]
    runs_on: str


@dataclass(frozen=True)
class ModelInfo:
    path: str
    format: str  # "hf" | "gguf"
    architecture: str
    n_layer: int
    n_expert: int  # 0: not a Mixture-of-Experts model
    n_expert_used: int
    n_ctx_train: int
    fp8_block: tuple[int, int] | None  # rows, columns of weights that share a scale, in the first such tensor
    fp8_scales: str | None  # the same in words: one per output channel has another block in every tensor
    parts: dict[str, Part]  # those of PARTS that the model has
    n_skipped: int  # released tensors that are not run (multi-token prediction)
    is_fp8_gguf: bool = False  # experts are FP8 codes in tensors of type I8, their scales follow the tensor data

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts.values())

    @property
    def experts_on(self) -> str | None:
        """Where experts would run; None when there are none."""
        return self.parts["experts"].runs_on if "experts" in self.parts else None

    @property
    def host_expert_types(self) -> list[str]:
        """Types of experts that stay with the host."""
        types = self.parts["experts"].types if "experts" in self.parts else {}
        return [name for name in types if name not in ACCEPTED_TYPES]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"n_bytes": self.n_bytes}


def describe_model(path: str | os.PathLike[str]) -> ModelInfo:
    """Raises CheckpointError when the path is neither a usable Hugging Face directory nor a GGUF."""
    if is_checkpoint_dir(path):
        return _describe_directory(Path(path))
    return _describe_gguf(Path(path))


def _describe_directory(path: Path) -> ModelInfo:
    checkpoint = open_checkpoint(path)
    summary = checkpoint.summary()
    stored = [(tensor.part, ref) for tensor in checkpoint.dense for ref in (tensor.source, tensor.scale) if ref]
    codes = [ref for tensor in checkpoint.experts for ref in tensor.codes]
    scales = [ref for tensor in checkpoint.experts for ref in tensor.scales or ()]
    stored += [("experts", ref) for ref in codes]
    unique = {ref.name: (part, ref.dtype, ref.n_bytes) for part, ref in stored}  # one matrix may be two GGUF tensors
    parts = _parts(unique.values(), extra_bytes={"experts": sum(ref.n_bytes for ref in scales)})
    return ModelInfo(
        path=str(path),
        format="hf",
        architecture=summary.architecture,
        n_layer=summary.n_layer,
        n_expert=summary.n_expert,
        n_expert_used=summary.n_expert_used,
        n_ctx_train=int(checkpoint.config.get("max_position_embeddings") or 0),
        fp8_block=summary.block,
        fp8_scales=summary.scales,
        parts=parts,
        n_skipped=summary.n_skipped,
    )


def _describe_gguf(path: Path) -> ModelInfo:
    shards = read_gguf_shards(path)
    first = shards[path]
    scaled = _fp8_tensors(shards)
    fp8 = next(iter(scaled.values()), None)
    tensors = [
        (_gguf_part(t.name), "F8_E4M3" if t.name in scaled else t.type, t.n_bytes)
        for shard in shards.values()
        for t in shard.tensors
    ]
    architecture = first.fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: general.architecture is missing: this GGUF holds no model")
    return ModelInfo(
        path=str(path),
        format="gguf",
        architecture=architecture,
        n_layer=_count(first.fields, architecture, "block_count"),
        n_expert=_count(first.fields, architecture, "expert_count"),
        n_expert_used=_count(first.fields, architecture, "expert_used_count"),
        n_ctx_train=_count(first.fields, architecture, "context_length"),
        fp8_block=fp8.block if fp8 else None,
        fp8_scales=in_words(fp8.n_rows, fp8.k, fp8.block) if fp8 else None,
        parts=_parts(tensors, extra_bytes={"experts": sum(entry.scale_bytes for entry in scaled.values())}),
        n_skipped=0,
        is_fp8_gguf=trailer.VERSION_KEY in first.fields,
    )


def _fp8_tensors(shards: dict[Path, GgufHeader]) -> dict[str, trailer.Entry]:
    """Tensors that hold FP8 codes, by name; every expert tensor of type I8 must be one."""
    scaled: dict[str, trailer.Entry] = {}
    for path, header in shards.items():
        codes = {t.name for t in header.tensors if t.type == "I8" and _EXPERT_WEIGHT.search(t.name)}
        if not codes and trailer.VERSION_KEY not in header.fields:
            continue
        entries = {entry.name: entry for entry in trailer.read_entries(path)}
        for name in sorted(codes ^ entries.keys()):
            fault = "no scales for it" if name in codes else "scales for it, but it is no FP8 tensor of this file"
            raise CheckpointError(f"{path}: tensor {name!r}: the FP8 trailer has {fault}: {trailer.REMEDY}")
        scaled |= entries
    return scaled


def _count(fields: dict[str, Any], architecture: str, key: str) -> int:
    value = fields.get(f"{architecture}.{key}", 0)
    return value if isinstance(value, int) else 0


def _gguf_part(name: str) -> str:
    if _EXPERT_WEIGHT.search(name):
        return "experts"
    return next((part for part, pattern in _GGUF_PARTS if pattern.search(name)), "other")


def _parts(tensors: Iterable[tuple[str, str, int]], extra_bytes: dict[str, int] | None = None) -> dict[str, Part]:
    types: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    for part, type_, n_bytes in tensors:
        types[part][type_] += n_bytes
    parts = {}
    for name, counted in types.items():
        if counted:
            n_bytes = sum(counted.values()) + (extra_bytes or {}).get(name, 0)
            parts[name] = Part(n_bytes, dict(counted), _experts_run_on(counted) if name == "experts" else HOST)
    return parts


def _experts_run_on(types: Iterable[str]) -> str:
    ours = {name in ACCEPTED_TYPES for name in types}
    return BOTH if len(ours) == 2 else OURS if True in ours else HOST


# --- GGUF headers. gguf.GGUFReader makes an array object per vocabulary entry (seconds for large vocabularies); here
# arrays are stepped over.

_SCALARS = {
    gguf.GGUFValueType.UINT8: "<B",
    gguf.GGUFValueType.INT8: "<b",
    gguf.GGUFValueType.UINT16: "<H",
    gguf.GGUFValueType.INT16: "<h",
    gguf.GGUFValueType.UINT32: "<I",
    gguf.GGUFValueType.INT32: "<i",
    gguf.GGUFValueType.FLOAT32: "<f",
    gguf.GGUFValueType.BOOL: "<?",
    gguf.GGUFValueType.UINT64: "<Q",
    gguf.GGUFValueType.INT64: "<q",
    gguf.GGUFValueType.FLOAT64: "<d",
}
_SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    name: str
    type: str
    shape: tuple[int, ...]  # as in the file: row length first
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    fields: dict[str, Any]  # strings and scalars; an array is its length
    tensors: list[GgufTensor]


def remedy(path: Path) -> str:
    """For a file that is no GGUF."""
    if path.suffix == ".safetensors":
        return "give the folder it lies in, a Hugging Face directory"
    return "give a GGUF or a Hugging Face directory"


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises CheckpointError when it is missing, no GGUF (version 2 or 3) or cut off within the header."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is no GGUF file: {remedy(path)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: give a GGUF file or a Hugging Face directory") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except (struct.error, ValueError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: its header is damaged or cut off ({error}): download the file again") from error


def read_gguf_shards(path: Path) -> dict[Path, GgufHeader]:
    """Of all files of a model, whose first is `path`."""
    first = read_gguf_header(path)
    return {path: first} | {p: read_gguf_header(p) for p in _other_shards(path, first.fields)}


class _Cursor:
    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 4  # after the magic

    def header(self) -> GgufHeader:
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        n_tensors, n_fields = self._scalar("<Q"), self._scalar("<Q")
        fields = {}
        for _ in range(n_fields):
            name = self._string()
            fields[name] = self._value(gguf.GGUFValueType(self._scalar("<I")))
        return GgufHeader(fields, [self._tensor() for _ in range(n_tensors)])

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _skip(self, n: int) -> None:
        if n > len(self._data) - self._at:
            raise ValueError(f"{n} bytes expected at offset {self._at} of {len(self._data)}")
        self._at += n

    def _string(self) -> str:
        n = self._scalar("<Q")
        first = self._at
        self._skip(n)
        return self._data[first : self._at].decode("utf-8", "replace")

    def _value(self, type_: gguf.GGUFValueType) -> Any:
        if type_ in _SCALARS:
            return self._scalar(_SCALARS[type_])
        if type_ == gguf.GGUFValueType.STRING:
            return self._string()
        item, n = gguf.GGUFValueType(self._scalar("<I")), self._scalar("<Q")
        if item in _SCALARS:
            self._skip(n * struct.calcsize(_SCALARS[item]))
        elif item == gguf.GGUFValueType.STRING:
            for _ in range(n):
                self._skip(self._scalar("<Q"))
        else:
            raise ValueError("arrays of arrays are not known")
        return n

    def _tensor(self) -> GgufTensor:
        name, n_dims = self._string(), self._scalar("<I")
        if n_dims > 4:
            raise ValueError(f"tensor {name} has {n_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(n_dims))
        type_ = gguf.GGMLQuantizationType(self._scalar("<I"))
        self._scalar("<Q")  # offset
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        n_elements = 1
        for n in shape:
            n_elements *= n
        return GgufTensor(name, type_.name, shape, n_elements // block * block_bytes)


def _other_shards(path: Path, fields: dict[str, Any]) -> list[Path]:
    """The files 2 to n of a split GGUF, by llama.cpp's naming rule."""
    n_shards = fields.get("split.count", 0)
    if not isinstance(n_shards, int) or n_shards < 2:
        return []
    name = _SPLIT_NAME.match(path.name)
    if not name or int(name["number"]) != 1 or int(name["count"]) != n_shards:
        first = f"...-00001-of-{n_shards:05d}.gguf"
        raise CheckpointError(f"{path} is one of {n_shards} files of a model: give the first, named {first}")
    return [path.with_name(f"{name['prefix']}-{i:05d}-of-{n_shards:05d}.gguf") for i in range(2, n_shards + 1)]
