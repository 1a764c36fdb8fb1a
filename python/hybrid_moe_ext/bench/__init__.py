"""Benchmarks: validate, then time, side by side with the peers in one run. graph.py builds a MoE layer in ggml,
layer.py times it on us, on stock ggml and in PyTorch (torch_peer.py), kernels.py one product of it, model.py a whole model;
limits.py measures what this machine can do at most. stream*.py time layers whose experts are streamed to GPU devices, and
trace*.py read and draw what happened when; engine*.py play requests to the engine and to llama-server."""

from .kernels import bench_kernels
from .layer import bench_layer
from .limits import Limits, measure_limits
from .model import ModelResult, bench_model
from .timing import Result

__all__ = ["Limits", "ModelResult", "Result", "bench_kernels", "bench_layer", "bench_model", "measure_limits"]
