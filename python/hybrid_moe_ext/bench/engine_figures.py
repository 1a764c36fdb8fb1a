"""What the engine benchmark tells of a round, from the moments at which requests were due and tokens came. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median

import numpy as np


@dataclass
class Served:
    """One request: moments in seconds since the round's start."""

    due_s: float  # when it was to come
    sent_s: float = 0.0  # when the client sent it
    token_s: list[float] = field(default_factory=list)  # of each event, as the client saw it
    n_prompt: int = 0
    n_generated: int = 0  # as the engine counts
    n_reused: int = 0
    queue_s: float | None = None  # None: the engine does not tell
    via: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due: a client or an engine that takes it late does not look better."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclass(frozen=True)
class Figures:
    """Of one round; None: there is nothing to tell. TPOT is over all tokens of all requests."""

    ttft_s_p50: float | None
    ttft_s_p95: float | None
    ttft_s_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    tpot_ms_p99: float | None
    stall_ms: float | None  # the longest gap between two tokens of a stream
    stall_by_tpot: float | None  # the largest of longest gap / median gap, per stream
    queue_s_p50: float | None
    queue_s_p95: float | None
    prompt_tps: float  # tokens that were computed for prompts, by the whole time
    generated_tps: float
    total_tps: float
    request_tps: float  # finished requests per second
    goodput: float  # share of the requests within ttft_s and, by the median of their gaps, tpot_ms
    goodput_tps: float  # those per second
    seconds: float  # from the first that was due to the last token
    late_ms: float  # the latest that the client sent a request
    n_failed: int
    n_reused: int

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


def figures(served: Sequence[Served], ttft_s: float, tpot_ms: float) -> Figures:
    done = [s for s in served if s.token_s and not s.error]
    ttft = [s.token_s[0] - s.due_s for s in done]
    gaps = [gap for s in done for gap in s.gaps_ms]
    queues = [s.queue_s for s in done if s.queue_s is not None]
    stalls = [max(s.gaps_ms) / median(s.gaps_ms) for s in done if s.gaps_ms and median(s.gaps_ms) > 0]
    seconds = max((s.token_s[-1] for s in done), default=0.0) - min((s.due_s for s in served), default=0.0)
    per_s = 1 / seconds if seconds > 0 else 0.0
    n_prompt, n_generated = sum(s.n_prompt - s.n_reused for s in done), sum(s.n_generated for s in done)
    n_good = sum(is_good(s, ttft_s, tpot_ms) for s in served)
    return Figures(
        *_quantiles(ttft), *_quantiles(gaps), max(gaps, default=None), max(stalls, default=None), *_quantiles(queues)[:2],
        n_prompt * per_s, n_generated * per_s, (n_prompt + n_generated) * per_s, len(done) * per_s,
        n_good / max(1, len(served)), n_good * per_s, seconds, max((s.sent_s - s.due_s for s in served), default=0.0) * 1e3,
        sum(bool(s.error) for s in served), sum(s.n_reused for s in done),
    )  # fmt: skip


def is_good(s: Served, ttft_s: float, tpot_ms: float) -> bool:
    if s.error or s.ttft_s is None or s.ttft_s > ttft_s:
        return False
    return not s.gaps_ms or median(s.gaps_ms) <= tpot_ms


def _quantiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    if not values:
        return None, None, None
    p50, p95, p99 = np.quantile(values, [0.5, 0.95, 0.99])
    return float(p50), float(p95), float(p99)


def medians(rounds: Sequence[Figures]) -> Figures:
    """Per figure over the rounds that have it."""

    def of(name: str) -> float | None:
        values = [value for r in rounds if (value := getattr(r, name)) is not None]
        return median(values) if values else None

    return Figures(**{name: of(name) for name in Figures.names()})  # type: ignore[arg-type]
