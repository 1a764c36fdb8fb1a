"""Hugging Face MoE checkpoints as they are: opened, checked, and shown to llama.cpp as a GGUF. Public names only.

checkpoint.py    open_checkpoint: the order of the steps      inventory.py     which tensor is which, all checks
config.py        JSON fields with rules                       dense.py, fp8.py conversion of the dense tensors
quantization.py  how FP8 weights share scales                 trailer.py       the scales at the end of an FP8 GGUF
shards.py        index -> files                               tokenizer.py, pretokenizers.py  vocabulary
safetensors.py   one file's header                            virtual_gguf.py  the bytes of the GGUF
family.py, families/  what an architecture declares           stream.py        the same as a FILE *
"""

from .checkpoint import Checkpoint, Summary, is_checkpoint_dir, open_checkpoint
from .family import Family
from .inventory import ExpertTensor
from .safetensors import TensorRef
from .stream import GgufStream
from .virtual_gguf import VirtualGguf

__all__ = [
    "Checkpoint",
    "ExpertTensor",
    "Family",
    "GgufStream",
    "Summary",
    "TensorRef",
    "VirtualGguf",
    "is_checkpoint_dir",
    "open_checkpoint",
]
