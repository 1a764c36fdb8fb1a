"""Which decode worker takes which request, when there are two of them (dual batch). Nothing is computed here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cache import common
from .context import Tokens
from .dual import DualBatch
from .running import Running

# Sequences that a lane may have more than the other one, for the sake of a prefix that lives there.
_MOST_AHEAD = 2
_WORTH_FOLLOWING = 8  # tokens of a prefix
_WORTH_A_BATCH = 256  # so many are computed in longer than a batch of its own costs, when few sequences run


@dataclass(eq=False)
class Lane:
    """A decode worker, as far as others see it. Its own thread changes it, any thread reads it."""

    number: int
    n_cells: int
    running: list[Running] = field(default_factory=list)  # in the order in which they were admitted
    prefixes: tuple[Tokens, ...] = ()  # of the sequences that it holds, at the end of its last step

    @property
    def n_decoding(self) -> int:
        return sum(r.job is None for r in tuple(self.running))

    @property
    def n_jobs(self) -> int:
        """Long prompts that the prefill worker has or gets next."""
        return sum(r.job is not None for r in tuple(self.running))

    @property
    def somebody_waits(self) -> bool:
        """For a token that is not the first one."""
        return any(r.next_token is not None for r in tuple(self.running))

    def shared_with(self, prompt: Tokens) -> int:
        return max((common(tokens, prompt) for tokens in self.prefixes), default=0)


class Lanes:
    """All decode workers. One at a time lets requests in, so that it knows of all."""

    def __init__(self, cells: Sequence[int], n_parallel: int, dual: DualBatch):
        self.all = [Lane(number, n) for number, n in enumerate(cells)]
        self._admitting = threading.Lock()  # before the mailbox's condition, where both are held
        self._has_missed = False
        self._n_parallel = n_parallel
        self._dual = dual

    @property
    def n_running(self) -> int:
        return sum(len(lane.running) for lane in self.all)

    @property
    def n_decoding(self) -> int:
        return sum(lane.n_decoding for lane in self.all)

    @property
    def n_jobs(self) -> int:
        return sum(lane.n_jobs for lane in self.all)

    def beside(self, lane: Lane) -> bool:
        """Whether another lane decodes as well."""
        return any(other.n_decoding for other in self.all if other is not lane)

    def begin_admitting(self) -> bool:
        """False: another worker is at it, and its end_admitting() will say that somebody came in between."""
        if self._admitting.acquire(blocking=False):
            return True
        self._has_missed = True
        return self._admitting.acquire(blocking=False)  # it may have ended before it could see that

    def end_admitting(self) -> bool:
        """Whether another worker came in between: it must be woken."""
        self._admitting.release()
        has_missed, self._has_missed = self._has_missed, False
        return has_missed

    def nobody_admits(self) -> threading.Lock:
        """Waits for who does, `with` it."""
        return self._admitting

    def assign(self, running: Running, waiting: Sequence[Running]) -> None:
        """Chooses a request's lane, once. `waiting`: all that wait, this one and those that have a lane already included."""
        running.is_assigned = True
        able = [lane for lane in self.all if lane.n_cells >= len(running.prompt) + running.max_tokens]
        if len(able) < 2:  # the first has room for the longest sequence
            running.lane = 0
            return
        coming = [other.lane for other in waiting if other.is_assigned and other is not running]
        load = {lane.number: len(lane.running) + coming.count(lane.number) for lane in able}
        shared = {lane.number: lane.shared_with(running.prompt) for lane in able}
        knows = max(shared, key=lambda number: (shared[number], -load[number], -number))
        if self._dual.uses_both(min(self._n_parallel, self.n_running + len(waiting))):
            wanted = min(load, key=lambda number: (load[number], number))
            follows = load[knows] + 1 - load[wanted] <= _MOST_AHEAD
            least = _WORTH_FOLLOWING
        else:  # one batch: where most are already
            wanted = max(load, key=lambda number: (load[number], -number))
            follows = True
            least = _WORTH_A_BATCH if load[wanted] else _WORTH_FOLLOWING
        running.lane = knows if follows and shared[knows] - shared[wanted] >= least else wanted
