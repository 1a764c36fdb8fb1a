"""The decode context's sequences: who holds which cells, which finished ones are kept, and whose prefix a prompt can share.

llama.cpp's unified cache has one cell per token; a copied prefix shares its cells. `Cells` counts as it does, so that a
sequence is let in only when everything it may ever need is there: nothing running is ever thrown out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .context import Context, Tokens

WORTH_SHARING = 8  # tokens; a shorter prefix (a BOS, a role marker) is computed sooner than it is found


class Cells:
    """Tickets for cells, with reference counts. Which ticket is which cell only llama.cpp knows."""

    def __init__(self, n: int):
        self.n = n
        self._refs = np.zeros(n, np.int32)

    @property
    def n_free(self) -> int:
        return int((self._refs == 0).sum())

    def take(self, n: int) -> npt.NDArray[np.intp]:
        tickets = np.flatnonzero(self._refs == 0)[:n]
        assert len(tickets) == n, "cells are counted before they are taken"
        self._refs[tickets] = 1
        return tickets

    def share(self, tickets: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        self._refs[tickets] += 1
        return tickets

    def drop(self, tickets: npt.NDArray[np.intp]) -> None:
        self._refs[tickets] -= 1
        assert (self._refs[tickets] >= 0).all()


@dataclass(eq=False)
class Sequence:
    """`tokens[:n]` have keys and values; `cells` are promised for all of `tokens`."""

    id: int
    tokens: Tokens  # room for all that may come
    cells: npt.NDArray[np.intp]  # one per token
    n: int = 0
    n_shared: int = 0
    n_written: int | None = None  # finished: tokens that the store has; None: not looked up
    history: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self.history = self.tokens[: self.n]

    def computed(self, n: int) -> None:
        self.n += n
        self.history = self.tokens[: self.n]


class SequenceCache:
    """For the decode worker's thread."""

    def __init__(
        self, context: Context, n_seq: int, n_kept: int, kept_bytes: float, bytes_per_seq: int, bytes_per_token: int
    ):
        self.cells = Cells(context.n_ctx)
        self.live: list[Sequence] = []
        self.kept: list[Sequence] = []  # the longest unused first
        self.bytes_kept = 0
        self.bytes_per_seq = bytes_per_seq
        self.bytes_per_token = bytes_per_token
        # The store's, about kept sequences: whether it wants one that it has not, and its last chance to get it.
        self.is_wanted: Callable[[Sequence], bool] = lambda sequence: False
        self.before_dropping: Callable[[Sequence], None] = lambda sequence: None
        self._context = context
        self._ids = list(range(n_seq + n_kept))
        self._n_kept = n_kept
        self._kept_bytes = kept_bytes if context.memory.has_prefixes else 0

    def shareable(self, prompt: Tokens) -> tuple[Sequence | None, int]:
        """The sequence with the longest usable common prefix. At least one token of a prompt is left to compute."""
        best, n_best = None, WORTH_SHARING - 1
        for sequence in (*self.live, *self.kept):
            n = self._usable(sequence, prompt)
            if n > n_best:
                best, n_best = sequence, n
        return best, n_best if best else 0

    def open(self, prompt: Tokens, n_more: int, share: bool) -> Sequence | None:
        """A sequence with the shared prefix in it and cells for the rest and `n_more` tokens. None: no room now."""
        donor, n_shared = self.shareable(prompt) if share else (None, 0)
        n_new = len(prompt) + n_more - n_shared
        shared = donor.cells[:n_shared] if donor else np.empty(0, np.intp)
        if self._room_without_kept(shared) < n_new:
            return None
        sequence = Sequence(self._ids.pop(), np.empty(len(prompt) + n_more, np.int32), self.cells.share(shared))
        sequence.tokens[: len(prompt)] = prompt
        if donor is not None:
            if donor in self.kept:  # used again
                self.kept.remove(donor)
                self.kept.append(donor)
            if self._context.memory.recurrent:
                self._context.copy(donor.id, sequence.id)
            else:
                self._context.copy(donor.id, sequence.id, 0, n_shared)
            sequence.computed(n_shared)
            sequence.n_shared = n_shared
        while self.cells.n_free < n_new:
            self._drop(self._next_to_go())
        sequence.cells = np.concatenate([shared, self.cells.take(n_new)])
        self.live.append(sequence)
        return sequence

    def close(self, sequence: Sequence, keep: bool) -> None:
        self.live.remove(sequence)
        self.cells.drop(sequence.cells[sequence.n :])
        sequence.cells = sequence.cells[: sequence.n]
        self.kept.append(sequence)
        if not keep or sequence.n < WORTH_SHARING:
            self._forget(sequence)
            return
        for other in self.kept[:-1]:  # what the new one has as well
            if not self._context.memory.recurrent and common(other.history, sequence.history) == other.n:
                self._forget(other)
        self._count_kept()
        self.trim()

    def trim(self) -> None:
        """Drops what is too much. Over the limit of bytes, the store's wishes stay: the cells are nobody's for now."""
        while len(self.kept) > self._n_kept:
            self._drop(self._next_to_go())
        while self.bytes_kept > self._kept_bytes and not self.is_wanted(sequence := self._next_to_go()):
            self._drop(sequence)

    def n_empty(self) -> int:
        """Cells that have no keys and values now, promised or not."""
        taken = np.zeros(self.cells.n, np.bool_)
        for sequence in (*self.live, *self.kept):
            taken[sequence.cells[: sequence.n]] = True
        return self.cells.n - int(taken.sum())

    def forget_all_kept(self) -> None:
        while self.kept:
            self._forget(self.kept[0])

    def _count_kept(self) -> None:
        taken = np.zeros(self.cells.n, np.bool_)
        for sequence in self.kept:
            taken[sequence.cells] = True
        self.bytes_kept = int(taken.sum()) * self.bytes_per_token + len(self.kept) * self.bytes_per_seq

    def _next_to_go(self) -> Sequence:
        """The longest unused one of those that the store has or does not want, else of all."""
        return next((s for s in self.kept if not self.is_wanted(s)), self.kept[0])

    def _drop(self, sequence: Sequence) -> None:
        self.before_dropping(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.kept.remove(sequence)
        self._context.remove(sequence.id)
        self.cells.drop(sequence.cells)
        self._ids.append(sequence.id)
        self._count_kept()

    def _room_without_kept(self, shared: npt.NDArray[np.intp]) -> int:
        taken = np.zeros(self.cells.n, np.bool_)
        for tickets in (shared, *(s.cells for s in self.live)):
            taken[tickets] = True
        return self.cells.n - int(taken.sum())

    def _usable(self, sequence: Sequence, prompt: Tokens) -> int:
        memory = self._context.memory
        if not memory.has_prefixes:
            return 0
        n = min(common(sequence.history, prompt), len(prompt) - 1)
        if memory.recurrent:
            return n if n == sequence.n else 0
        # Sliding-window layers give the cells of old tokens to new ones when there are no others.
        if memory.window and n and self._context.first(sequence.id) > max(0, n - memory.window):
            return 0
        return n


def common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
