"""Dual batch: two decode contexts in alternation, one's attention on a GPU beside the other's experts on the CPU.

Here: whether there are two, and from how many sequences on both are used. How that is measured is in measure.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from .options import EngineOptions

# Two contexts cost memory and divide the prefixes, and measurements scatter: a smaller gain is none.
LEAST_GAIN = 1.03


@dataclass(frozen=True)
class Measured:
    """One batch size: seconds of a step with all sequences in one context, and of one step of both with half of them each."""

    n: int
    single_s: float
    dual_s: float

    @property
    def gain(self) -> float:
        return self.single_s / self.dual_s

    @property
    def wins(self) -> bool:
        return self.gain >= LEAST_GAIN

    def __str__(self) -> str:
        return f"{self.n} sequences: {1e3 * self.single_s:.1f} ms in one, {1e3 * self.dual_s:.1f} ms in two"


@dataclass(frozen=True)
class DualBatch:
    """What the engine does. `measured`: by batch size, ascending; empty where nothing was measured."""

    is_on: bool
    why: str
    measured: tuple[Measured, ...] = ()

    def uses_both(self, n: int) -> bool:
        """Whether `n` running sequences are divided. Measured, else as the nearest smaller size that was; one never is."""
        if not self.is_on or n < 2:
            return False
        smaller = [m for m in self.measured if m.n <= n]
        return smaller[-1].wins if smaller else not self.measured

    @property
    def begins_at(self) -> int:
        """The least number of running sequences that are divided; 0: none is."""
        sizes = [2, *(m.n for m in self.measured)]
        return next((n for n in sizes if self.uses_both(n)), 0)

    @property
    def best_gain(self) -> float:
        """Of those measured; 0: none was."""
        return max((m.gain for m in self.measured), default=0.0)

    def __str__(self) -> str:
        table = "; ".join(str(m) for m in self.measured)
        state = f"on from {self.begins_at} sequences" if self.is_on else "off"
        return f"dual batch: {state} ({self.why}{': ' if table else ''}{table})"


def decide(measured: tuple[Measured, ...]) -> DualBatch:
    """By what was measured: on, if it is faster for any size."""
    measured = tuple(sorted(measured, key=lambda m: m.n))
    if any(m.wins for m in measured):
        return DualBatch(True, "measured faster", measured)
    return DualBatch(False, "not measured faster" if measured else "nothing was measured", measured)


def why_single(options: EngineOptions, has_gpu_attention: bool) -> str:
    """Why there is no second decode context, without measuring; empty: there may be one."""
    if options.dual_batch == "off":
        return "as given"
    if options.n_parallel < 2:
        return "n_parallel=1"
    if options.dual_batch == "auto" and not has_gpu_attention:
        return "attention is not on a GPU, so there is nothing to compute beside the experts"
    return ""
