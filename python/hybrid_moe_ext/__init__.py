"""Runs Mixture-of-Experts models in llama.cpp: experts on our back end, FP8 checkpoints as they were released.

from hybrid_moe_ext import Llama
llm = Llama("DeepSeek-V3/", n_ctx=4096)      # or a GGUF
print(llm("The licence", max_tokens=32)["choices"][0]["text"])
"""

from . import patched  # first: it decides which llama.cpp is loaded, and the others load it
from ._native import Counters, Status, counters, library_path, register
from .errors import BuildError, CheckpointError, HybridMoeError, OptionError, PluginError, UnsupportedModelError
from .fits import fits
from .llama import Llama
from .options import Options
from .placement import Placement

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "CheckpointError",
    "Counters",
    "HybridMoeError",
    "Llama",
    "OptionError",
    "Options",
    "Placement",
    "PluginError",
    "Status",
    "UnsupportedModelError",
    "counters",
    "fits",
    "library_path",
    "patched",
    "register",
]
