"""The naive path in PyTorch, for comparison: weights become BF16 at every use, and are multiplied then. Where torch is
installed; nothing else needs it."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import Shape
from .values import Experts

KINDS = ("FP8", "BF16", "F16", "F32", "Q8_0")  # those that a few operations of torch decode
REST_S = 0.02  # torch's threads spin on for a while after a run; the next engine shall not meet them


def is_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


class _Weights:
    """The weights of one projection as torch sees them."""

    def __init__(self, torch: Any, experts: Experts):
        self._torch, self._kind = torch, experts.kind
        self._codes = torch.from_numpy(experts.codes)
        scales = experts.scales()
        self._scales: Any = None if scales is None else torch.from_numpy(scales)
        self._block: Any = experts.in_files.block if experts.in_files is not None else None

    def bf16(self, i_expert: int) -> Any:
        """[rows, k]"""
        torch, codes = self._torch, self._codes[i_expert]
        if self._kind == "FP8":
            values = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
            rows, k = values.shape
            wide = self._scales.repeat_interleave(self._block[0], 0)[:rows].repeat_interleave(self._block[1], 1)[:, :k]
            return values * wide.to(torch.bfloat16)
        if self._kind == "Q8_0":  # blocks of an F16 scale and 32 int8
            blocks = codes.view(len(codes), -1, 34)
            scale = blocks[..., :2].contiguous().view(torch.float16).to(torch.bfloat16)
            return (blocks[..., 2:].contiguous().view(torch.int8).to(torch.bfloat16) * scale).view(len(codes), -1)
        stored = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[self._kind]
        return codes.view(stored).to(torch.bfloat16)


class TorchLayer:
    """A gated layer, or with the projection `up` alone one product. Used like graph.LayerGraph."""

    def __init__(self, shape: Shape, experts: dict[str, Experts], n_threads: int):
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(n_threads)
        self._shape = shape
        self._weights = {name: _Weights(self._torch, e) for name, e in experts.items()}

    def set(self, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        torch = self._torch
        self._x = torch.from_numpy(x).to(torch.bfloat16)
        self._ids, self._router = torch.from_numpy(ids), torch.from_numpy(weights)

    def set_ids(self, ids: NDArray[np.int32]) -> None:
        self._ids = self._torch.from_numpy(ids)

    def run(self) -> float:
        start = time.perf_counter()
        with self._torch.inference_mode():
            self._y = self._compute()
        seconds = time.perf_counter() - start
        time.sleep(REST_S)
        return seconds

    def _compute(self) -> Any:
        torch = self._torch
        y = torch.zeros(len(self._x), self._shape.n_out)
        for i_expert in self._ids.unique().tolist():
            token, slot = (self._ids == i_expert).nonzero(as_tuple=True)
            up = self._x[token] @ self._weights["up"].bf16(i_expert).T
            if "down" not in self._weights:
                y[token] = up.float()
                continue
            hidden = torch.nn.functional.silu(self._x[token] @ self._weights["gate"].bf16(i_expert).T) * up
            down = hidden @ self._weights["down"].bf16(i_expert).T
            y.index_add_(0, token, down.float() * self._router[token, slot, None])
        return y

    def output(self) -> NDArray[np.float32]:
        return np.asarray(self._y.numpy())

    def close(self) -> None:
        """Nothing of its own to free."""
