"""Opens a checkpoint directory in a fresh process and prints, as JSON, what that read and what it committed. A script."""

import ctypes
import json
import mmap
import sys
from pathlib import Path

import numpy as np

from hybrid_moe_ext import Llama
from hybrid_moe_ext.checkpoint import open_checkpoint

PAGE = mmap.PAGESIZE


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def resident(checkpoint) -> float:
    """Share of the experts' whole pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    refs = [ref for tensor in checkpoint.experts for ref in tensor.codes]
    path = refs[0].path
    n_pages = -(-path.stat().st_size // PAGE)
    state = (ctypes.c_ubyte * n_pages)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        address = np.frombuffer(view, np.uint8)
        result = libc.mincore(ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(n_pages * PAGE), state)
        del address
    assert result == 0
    pages = np.frombuffer(state, np.uint8) & 1
    inside = [pages[-(-ref.offset // PAGE) : (ref.offset + ref.n_bytes) // PAGE] for ref in refs]
    return float(np.concatenate(inside).mean())


def main() -> None:
    directory = sys.argv[1]
    checkpoint = open_checkpoint(directory)
    out = {"resident_before": resident(checkpoint)}
    Llama(directory, n_ctx=64, verbose=False, vocab_only=True)  # libraries and tables that any model needs
    before = rss()
    llm = Llama(directory, n_ctx=64, verbose=False, n_threads=2, n_threads_batch=2)
    out |= {"resident_opened": resident(checkpoint), "grown_opened": rss() - before}
    llm.eval(list(range(3, 60)))
    print(json.dumps(out | {"resident_used": resident(checkpoint)}))


if __name__ == "__main__":
    main()
