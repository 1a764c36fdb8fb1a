"""What decoding can reach at best when attention runs on a GPU and experts on the CPU: computed, not measured. No tests.

A lane is a batch in a context of its own. Layer after layer it needs the GPU for its attention, then the CPU for its experts, and
each of the two does one thing at a time. One lane uses them in turn. Two lanes alternate, and then a round (a step of both) takes
at least what the GPU has to do for both, what the CPU has to do for both, and what each lane does by itself, whichever is most.
Strict alternation reaches that, up to the beginning and the end: test_engine_oracle.py tries all orders of small cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """Of one layer: microseconds for a batch of n sequences."""

    n_layers: int
    attention_us: Callable[[int], float]
    experts_us: Callable[[int], float]

    def single_us(self, n: int) -> float:
        """A step of one lane."""
        return self.n_layers * (self.attention_us(n) + self.experts_us(n))

    def dual_us(self, n: int, other: int) -> float:
        """A round: a step of a lane of n and one of a lane of `other`."""
        a, b, x, y = self.attention_us(n), self.attention_us(other), self.experts_us(n), self.experts_us(other)
        return self.n_layers * max(a + b, x + y, a + x, b + y)

    def single(self, n: int) -> float:
        """Tokens per second."""
        return n * 1e6 / self.single_us(n)

    def dual(self, n: int) -> float:
        """Tokens per second of n sequences that are divided as well as can be."""
        return max((n * 1e6 / self.dual_us(i, n - i) for i in range(1, n // 2 + 1)), default=0.0)

    def best(self, n: int) -> float:
        return max(self.single(n), self.dual(n))


def read_experts(n: int, n_expert: int = 256, n_used: int = 8) -> float:
    """Distinct experts that n tokens choose, when each choice is as likely as any other."""
    return n_expert * (1 - (1 - n_used / n_expert) ** n)


def stages(attention_us: float, experts_us: float, n_layers: int = 58, n_expert: int = 256, n_used: int = 8) -> Stages:
    """Given for one sequence. Attention is bound by its weights, which a batch reads once; experts by those that are read."""
    return Stages(
        n_layers,
        lambda n: attention_us,
        lambda n: experts_us * read_experts(n, n_expert, n_used) / n_used,
    )


# Of the paper: microseconds per layer, and its gains in total throughput over one sequence.
PAPER_US = (350.0, 450.0)
PAPER_GAINS = {2: 1.56, 4: 1.58, 6: 1.61}
