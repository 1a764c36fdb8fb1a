"""A llama.cpp with this package's patches: built by `hybrid-moe build-llama`, found and used here. docs/build-llama.md.

Importing this imports llama_cpp with the library that suits (choice.py); it imports nothing else of this package but errors.
"""

from .choice import Choice, check, in_use, library_file, load_llama_cpp, patched_with, stock_backends, why_not
from .patch_files import Patch
from .switches import set_switches, switched_on

__all__ = [
    "Choice",
    "Patch",
    "check",
    "in_use",
    "library_file",
    "patched_with",
    "set_switches",
    "stock_backends",
    "switched_on",
    "why_not",
]

load_llama_cpp()
