"""Times a chain of MoE layers whose experts are streamed to the host's GPU devices, next to a copy-then-compute loop on the same
device and to the CPU alone. Before it times, it compares a layer with float64."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, PluginError
from ..options import Options
from . import stream_result as figures
from .graph import Shape
from .layer import OURS, TOLERANCE
from .stream_chain import Batch, Chain, Round, random_batch
from .stream_child import SLOW_S, CpuChain
from .stream_experts import StreamExperts, row_bytes
from .stream_ggml import GpuDevice
from .stream_link import Link, measure_link
from .stream_peer import CopyThenCompute
from .stream_report import FP8_ON_DEVICE, cpu_slowdown, device_uses, rates_of, report, threshold, wait_for_quiet
from .stream_result import StreamResult

# The routed experts of these models, whole.
SHAPES = {
    "deepseek": Shape(7168, 2048, 256, 8),
    "qwen3-235b": Shape(4096, 1536, 128, 8),
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "glm-4.5": Shape(5120, 1536, 160, 8),
}
STEP = 256  # n_embd is a multiple of it: blocks of all weight types
MOST_TOKENS = 65536
MOST_WIDE = 65536
MOST_ATTENTION_MS = 60_000
ROUTINGS = ("uniform", "skewed")
PEERS = ("pinned", "pageable")
CHECKED_TOKENS = 4
DEVICE_TOLERANCE = 1e-4  # GPUs may add up in F16 or TF32, where the CPU is exact: 2e-5 seen with Vulkan
WORST_TOKEN = 20  # times the tolerance: how far one token may be off between two engines that round differently


@dataclass(frozen=True)
class StreamRequest:
    shape: Shape
    kind: str
    tokens: list[int]
    n_layers: int
    attention_ms: float
    routing: str
    memory_mib: int
    rounds: int
    n_threads: int
    peers: list[str]
    with_cpu: bool
    checked: bool  # False: for devices that do not really compute
    options: Options

    def __post_init__(self) -> None:
        if self.kind not in OURS:
            raise OptionError(f"--type {self.kind}: choose among {', '.join(OURS)}")
        if not self.tokens or min(self.tokens) < 1 or max(self.tokens) > MOST_TOKENS:
            raise OptionError(f"--tokens: give numbers from 1 to {MOST_TOKENS}, separated by commas")
        if not 0 <= self.attention_ms <= MOST_ATTENTION_MS:
            raise OptionError(f"--attention-ms {self.attention_ms:g}: give 0 to {MOST_ATTENTION_MS} milliseconds")
        if self.routing not in ROUTINGS:
            raise OptionError(f"--routing {self.routing}: choose among {', '.join(ROUTINGS)}")
        for peer in self.peers:
            if peer not in PEERS:
                raise OptionError(f"--peers: there is no {peer!r}, choose among {', '.join(PEERS)}, or none")


def shape_named(text: str, scale: float) -> Shape:
    """A name of SHAPES or n_embd,n_ff,n_expert,n_used. `scale` divides n_embd: weights, activations and work of a layer shrink
    alike, and what they are to each other stays."""
    if text in SHAPES:
        shape = SHAPES[text]
    else:
        try:
            shape = Shape(*map(int, text.split(",")))
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"--shape {text!r}: choose among {', '.join(SHAPES)}, or give n_embd,n_ff,n_expert,n_used"
            ) from error
    if not 1 <= scale < float("inf"):
        raise OptionError(f"--scale {scale:g}: give a number from 1 on, which n_embd is divided by")
    n_embd = shape.n_embd if scale == 1 else max(STEP, round(shape.n_embd / scale / STEP) * STEP)
    shape = Shape(n_embd, shape.n_ff, shape.n_expert, shape.n_used)
    numbers = (shape.n_embd, shape.n_ff, shape.n_expert, shape.n_used)
    if min(numbers) < 1 or max(numbers) > MOST_WIDE or shape.n_used > shape.n_expert:
        raise OptionError(f"--shape {text!r}: all four are from 1 to {MOST_WIDE}, and n_used is at most n_expert")
    return shape


def bench_stream(r: StreamRequest, devices: list[GpuDevice]) -> Iterator[StreamResult]:
    """Yields a result per number of tokens. The plug-in is registered already."""
    links = {d.name: measure_link(d) for d in devices}
    experts = StreamExperts(r.shape, r.kind, r.n_layers, r.memory_mib << 20, r.options.experts_memory)
    try:
        for n_tokens in r.tokens:
            batch = random_batch(r.shape, r.n_layers, n_tokens, r.routing)
            with contextlib.ExitStack() as stack:
                yield _bench_tokens(r, devices, links, experts, batch, stack)
    finally:
        experts.close()


def _bench_tokens(
    r: StreamRequest,
    devices: list[GpuDevice],
    links: dict[str, Link],
    experts: StreamExperts,
    batch: Batch,
    stack: contextlib.ExitStack,
) -> StreamResult:
    peers = _start_peers(r, devices[0], experts, batch, stack)  # first: the ring takes of what is free then
    chain = Chain(experts, batch, r.n_threads)
    stack.callback(chain.close)
    check = _check(r, experts, batch, {"streaming": lambda: chain.run_one(0)} | _outputs_of(peers))
    cpu = None
    if r.with_cpu:
        shape = ",".join(str(n) for n in (r.shape.n_embd, r.shape.n_ff, r.shape.n_expert, r.shape.n_used))
        numbers = (r.n_layers, r.memory_mib << 20, batch.n_tokens)
        cpu = stack.enter_context(CpuChain([shape, r.kind, *numbers, r.routing, r.n_threads], r.options))
    attention_s = r.attention_ms / 1e3
    chain.run(attention_s)  # learns rates and the order of layers
    before, ours, of_peers, of_cpu = report(), [], {name: list[Round]() for name in peers}, list[float]()
    for _ in range(r.rounds):
        ours.append(chain.run(attention_s))
        wait_for_quiet()
        for name, peer in peers.items():
            if isinstance(peer, CopyThenCompute):
                of_peers[name].append(peer.run(attention_s))
        if cpu is not None and (not of_cpu or of_cpu[0] < SLOW_S):
            of_cpu.append(cpu.layer_s())
    after = report()
    peer_ms: dict[str, float | str] = {
        name: peer if isinstance(peer, str) else statistics.median(x.layer_s for x in of_peers[name]) * 1e3
        for name, peer in peers.items()
    }
    alone = [p.compute_s() * 1e3 for p in peers.values() if isinstance(p, CopyThenCompute)]
    cpu_ms = statistics.median(of_cpu) * 1e3 + r.attention_ms if of_cpu else None
    return _result(r, links, experts, batch, check, ours, before, after, cpu_ms, peer_ms, alone[0] if alone else None)


def _start_peers(
    r: StreamRequest, device: GpuDevice, experts: StreamExperts, batch: Batch, stack: contextlib.ExitStack
) -> dict[str, CopyThenCompute | str]:
    """Per name a peer, or why there is none."""
    peers: dict[str, CopyThenCompute | str] = {}
    for name in r.peers:
        try:
            peer = CopyThenCompute(device, experts, batch, name == "pinned")
            stack.callback(peer.close)
            peer.run_layer(0)  # devices compile what they compute at its first use
            peers[name] = peer
        except PluginError as error:
            peers[name] = str(error)
    return peers


def _outputs_of(peers: dict[str, CopyThenCompute | str]) -> dict[str, Callable[[], NDArray[np.float32]]]:
    """The peers that compute the real experts."""

    def output(peer: CopyThenCompute) -> NDArray[np.float32]:
        peer.run_layer(0)
        return peer.output()

    return {
        f"copy-then-compute ({name})": lambda peer=peer: output(peer)  # type: ignore[misc]
        for name, peer in peers.items()
        if isinstance(peer, CopyThenCompute) and peer.has_true_experts
    }


def _check(
    r: StreamRequest, experts: StreamExperts, batch: Batch, outputs: dict[str, Callable[[], NDArray[np.float32]]]
) -> str:
    if not r.checked:
        return "not checked"
    tokens = np.unique(np.linspace(0, batch.n_tokens - 1, CHECKED_TOKENS, dtype=int))
    want = _layer_0(experts, batch, tokens)
    limit = max(TOLERANCE[r.kind], DEVICE_TOLERANCE)
    told, ours = [], None
    for name, output in outputs.items():
        y = output()
        nmse = float(((y[tokens] - want) ** 2).sum() / (want**2).sum())
        if not nmse <= limit:
            raise _wrong(r, name, f"NMSE {nmse:.1e} > {limit:.0e}")
        told.append(f"{name} {nmse:.1e}")
        if ours is None:
            ours = y
            continue
        # All tokens, one by one: a single expert that went wrong shows in its tokens.
        worst = float((((y - ours) ** 2).sum(1) / (ours**2).sum(1)).max())
        if not worst <= WORST_TOKEN * limit:
            raise _wrong(
                r, "streaming", f"a token differs from {name} by an NMSE of {worst:.1e} > {WORST_TOKEN * limit:.0e}"
            )
    return "NMSE to float64: " + ", ".join(told)


def _wrong(r: StreamRequest, engine: str, how: str) -> PluginError:
    return PluginError(
        f"{r.kind}: the layer of {engine} is wrong ({how}), no use timing it; --unchecked is for simulated devices that compute "
        "nothing"
    )


def _layer_0(experts: StreamExperts, batch: Batch, tokens: NDArray[Any]) -> NDArray[np.float64]:
    """Values of some tokens, expert by expert."""
    y = np.zeros((len(tokens), experts.shape.n_embd))
    ids, x = batch.ids[0][tokens], batch.x[tokens].astype(np.float64)
    for e in np.unique(ids):
        rows, slots = np.nonzero(ids == e)
        gate, up, down = (experts.values(0, name, int(e)).astype(np.float64) for name in ("gate", "up", "down"))
        hidden = x[rows] @ gate.T
        hidden = hidden / (1 + np.exp(-hidden)) * (x[rows] @ up.T)
        y[rows] += batch.weights[0][tokens][rows, slots, None] * (hidden @ down.T)
    return y


def _expert_bytes(shape: Shape, kind: str) -> int:
    return sum(rows * row_bytes(kind, k) for rows, k in shape.weights().values())


def _where(n_streamed: int, n_on_cpu: int) -> str:
    if n_streamed and n_on_cpu:
        return f"devices, but {n_on_cpu} of {n_streamed + n_on_cpu} layers on the CPU"
    return "devices" if n_streamed else "CPU"


def _result(
    r: StreamRequest, links: dict[str, Link], experts: StreamExperts, batch: Batch, check: str, ours: list[Round],
    before: dict[str, Any], after: dict[str, Any], cpu_ms: float | None, peers: dict[str, float | str],
    peer_compute_ms: float | None,
) -> StreamResult:  # fmt: skip
    uses = device_uses(before, after)
    n_streamed = after["layers"] - before["layers"]
    n = max(1, n_streamed)
    stored_bytes = _expert_bytes(r.shape, r.kind)
    expert_bytes = _expert_bytes(r.shape, "BF16" if r.kind == "FP8" else r.kind)
    if r.kind == "FP8" and any(d.get("fp8") == FP8_ON_DEVICE for d in after["devices"]):
        expert_bytes = stored_bytes
    attention_s = statistics.median(x.attention_s for x in ours)
    layer_ms = [x.layer_s * 1e3 for x in ours]
    copy = figures.copy_s(uses, links, expert_bytes) / n if uses else 0.0
    compute = figures.compute_s(uses) / n
    seconds = statistics.mean(x.layer_s for x in ours) * n
    devices = [figures.device_figures(u, after, links[u.name], expert_bytes, seconds, n) for u in uses]
    ring_s = sum(d.ring_bytes for d in devices) / sum(d.link_gbps * 1e9 for d in devices) if devices else 0.0
    bound = figures.bound_s(copy, compute, attention_s, ring_s)
    rates = rates_of(after)
    slowdown = cpu_slowdown(r.n_threads, len(links)) if r.options.cpu_help == "auto" else None
    from_tokens = threshold(rates, r.shape, stored_bytes, slowdown) if rates else None
    ms = statistics.median(layer_ms)
    return StreamResult(
        r.shape, r.kind, r.routing, r.n_layers, batch.n_tokens, attention_s * 1e3, check,
        _where(n_streamed, after["layers_on_cpu"] - before["layers_on_cpu"]), ms, min(layer_ms), max(layer_ms), expert_bytes,
        sum(u.in_bytes for u in uses) / n, sum(u.out_bytes for u in uses) / n,
        copy * 1e3, compute * 1e3, bound * 1e3, ms / bound / 1e3 if bound and n_streamed else 0.0,
        figures.hidden_share(uses), figures.balance(uses), (after["cpu_experts"] - before["cpu_experts"]) / n,
        cpu_ms, peers, peer_compute_ms, from_tokens,
        after["plan"], after["rates"], devices, after["troubles"],
    )  # fmt: skip
