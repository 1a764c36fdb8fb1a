"""An opened checkpoint directory: what it is, how large, and its virtual GGUF. The steps are in the files it calls."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from ..errors import CheckpointError
from .config import Fields, read_json
from .families import find_family
from .family import Family
from .inventory import Inventory, take_inventory
from .quantization import in_words, read_quantization
from .shards import read_tensors
from .tokenizer import Vocabulary, read_vocabulary
from .virtual_gguf import VirtualGguf

FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "f32": gguf.LlamaFileType.ALL_F32,
}


@dataclass(frozen=True)
class Summary:
    """Sizes as stored on disk; MTP layers, which are not run, are not counted."""

    architecture: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    part_bytes: dict[str, int]  # experts, attention, ffn (dense and shared), embeddings; scales included
    dtype_bytes: dict[str, int]
    block: tuple[int, int] | None  # FP8 scale block [rows, columns] of the first such tensor
    scales: str | None  # the same in words
    n_skipped: int  # released tensors left out


class Checkpoint:
    """Everything that the headers can tell has been checked when this exists; no weight has been read."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        family: Family,
        hparams: Any,
        inventory: Inventory,
        vocabulary: Vocabulary,
    ):
        self.path = path
        self.config = config
        self.family = family
        self.hparams = hparams
        self.vocabulary = vocabulary
        self.inventory = inventory
        self.experts = inventory.experts
        self.dense = inventory.dense
        self.n_layer: int = hparams.n_layer
        self.n_expert: int = hparams.n_expert
        self.n_expert_used: int = hparams.n_expert_used

    def virtual_gguf(self, dense_type: str = "bf16") -> VirtualGguf:
        """The model as a GGUF; `dense_type` (bf16, q8_0 or f32) is the type of all matrices but the experts."""

        def write_metadata(w: gguf.GGUFWriter) -> None:
            w.add_type("model")
            w.add_name(self.path.name)
            w.add_file_type(FILE_TYPES[dense_type])
            w.add_quantization_version(gguf.GGML_QUANT_VERSION)
            self.family.write_hparams(w, self.hparams)
            self.vocabulary.write(w)

        return VirtualGguf(write_metadata, self.family.gguf_arch, self.dense, self.experts, dense_type)

    def summary(self) -> Summary:
        parts: Counter[str] = Counter(experts=0, attention=0, ffn=0, embeddings=0)
        dtypes: Counter[str] = Counter()
        seen = set()
        stored = [(tensor.part, ref) for tensor in self.dense for ref in (tensor.source, tensor.scale) if ref]
        stored += [("experts", ref) for tensor in self.experts for ref in (*tensor.codes, *(tensor.scales or ()))]
        for part, ref in stored:
            if ref.name not in seen:  # one released matrix may be two GGUF tensors
                seen.add(ref.name)
                parts[part] += ref.n_bytes
                dtypes[ref.dtype] += ref.n_bytes
        fp8 = [(t.n_rows, t.k, t.block) for t in self.experts if t.block]
        fp8 += [(t.source.shape[0], t.source.shape[1], t.block) for t in self.dense if t.block]
        return Summary(
            architecture=self.family.hf_arch,
            n_layer=self.n_layer,
            n_expert=self.n_expert,
            n_expert_used=self.n_expert_used,
            part_bytes=dict(parts),
            dtype_bytes=dict(dtypes),
            block=fp8[0][2] if fp8 else None,
            scales=in_words(*fp8[0]) if fp8 else None,
            n_skipped=len(self.inventory.skipped),
        )


def is_checkpoint_dir(path: str | os.PathLike[str]) -> bool:
    """Whether a path is to be opened as a Hugging Face directory; a file is a GGUF."""
    return Path(path).is_dir()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads config, tokenizer and tensor headers and checks them against each other. Raises CheckpointError."""
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file, not a model directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory}: {what}: give a Hugging Face directory with config.json, or a GGUF file")
    config = Fields(directory / "config.json", read_json(directory / "config.json"))
    family = find_family(config)
    fp8 = read_quantization(config)
    hparams = family.read_hparams(config)
    inventory = take_inventory(directory, family, hparams, read_tensors(directory), fp8)
    vocabulary = read_vocabulary(directory, config, hparams.n_vocab)
    return Checkpoint(directory, config.values, family, hparams, inventory, vocabulary)
