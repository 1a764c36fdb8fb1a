"""What was measured: per request, per step and of the engine as a whole. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from statistics import median


@dataclass
class RequestMetrics:
    n_prompt: int = 0
    n_reused: int = 0  # tokens of the prompt that were in memory already
    n_stored: int = 0  # of these, from the store in host memory; the others were in the decode context
    n_generated: int = 0
    via: str = ""  # "decode": chunked into the decode batch; "prefill": by the prefill worker; "": never computed
    queue_s: float | None = None  # until it was admitted
    ttft_s: float | None = None  # submit() to the first token
    tpot_ms: list[float] = field(default_factory=list)  # one per later token
    total_s: float | None = None

    @property
    def median_tpot_ms(self) -> float | None:
        return median(self.tpot_ms) if self.tpot_ms else None


@dataclass(frozen=True)
class StepReport:
    """One step of a decode worker, for `Engine(on_step=...)`."""

    decoding: tuple[int, ...]  # ids of requests that got a token
    chunks: tuple[tuple[int, int], ...]  # (id, tokens of its prompt)
    chunk_limit: int  # tokens of prompts that this step might have
    installed: int  # tokens whose keys and values arrived from the prefill worker before this step
    prefilling: tuple[int, ...]  # ids of requests that the prefill worker works on or has before it
    seconds: float  # of llama_decode
    lane: int = 0  # of the decode worker; 1: the second one's, with dual batch


@dataclass
class EngineMetrics:
    """Counts since the start, unless the name says `now`."""

    queued_now: int = 0
    running_now: int = 0
    prefilling_now: int = 0
    kept_now: int = 0
    kept_bytes_now: int = 0
    cells: int = 0  # tokens that the decode contexts can hold
    cells_now: int = 0  # held or promised
    submitted: int = 0
    refused: int = 0  # EngineBusy
    finished: dict[str, int] = field(default_factory=dict)  # by reason; "error" for those that failed
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    decode_seconds: float = 0.0  # in llama_decode, decode workers; of two, the sum of both
    prefill_tokens: int = 0  # by the prefill worker
    prefill_seconds: float = 0.0  # in llama_decode, prefill worker
    store_hits: int = 0  # requests that began with tokens from the store
    store_tokens: int = 0  # that came from it
    store_bytes_now: int = 0
    store_written_bytes: int = 0
    store_evictions: int = 0  # pieces, or whole sequences, that gave way to others
    moved_bytes: int = 0  # from the prefill to the decode context
    chunk_now: int = 0  # tokens of prompts that the last step might have
    ttft_met: int = 0  # requests within the service levels, and those that missed them
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    lanes_now: int = 1  # decode contexts: 2 with dual batch
    dual_from_now: int = 0  # running sequences from which on both are used; 0: never
    dual_gain_now: float = 0.0  # throughput of two by that of one, the best measured at the start; 0: not measured
    dual_steps: int = 0  # beside one of the other context

    def plus(self, other: EngineMetrics) -> EngineMetrics:
        """Of two decode workers together."""
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in _NOT_ADDED
        }
        reasons = {r: self.finished.get(r, 0) + other.finished.get(r, 0) for r in {*self.finished, *other.finished}}
        return replace(self, **sums, finished=reasons, chunk_now=max(self.chunk_now, other.chunk_now))

    def count(self, request: RequestMetrics, reason: str, ttft_s: float, tpot_ms: float) -> None:
        """A request that has ended, and whether it was within the service levels."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.generated_tokens += request.n_generated
        self.reused_tokens += request.n_reused
        if request.ttft_s is not None:
            met = request.ttft_s <= ttft_s
            self.ttft_met += met
            self.ttft_missed += not met
        if request.median_tpot_ms is not None:
            met = request.median_tpot_ms <= tpot_ms
            self.tpot_met += met
            self.tpot_missed += not met


# Of the engine and not of a worker, or no sums.
_NOT_ADDED = {"finished", "chunk_now", "lanes_now", "dual_from_now", "dual_gain_now"}
