"""Benchmarks: validate, then time, side by side with the peers in one run. graph.py builds a MoE layer in ggml,
layer.py times it on us, on stock ggml and in PyTorch, limits.py measures what this machine can do at most."""

from .layer import Result, bench_layer
from .limits import Limits, measure_limits

__all__ = ["Limits", "Result", "bench_layer", "measure_limits"]
