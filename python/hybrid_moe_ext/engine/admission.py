"""Who is let into a decode worker's context, and when: first come, first served, as far as there are places and cells."""

from __future__ import annotations

import time

from .cache import WORTH_SHARING, Sequence, SequenceCache
from .context import Memory
from .exchange import Exchange
from .lanes import Lane, Lanes
from .mailbox import Job, Mailbox
from .options import EngineOptions
from .pace import Pace
from .running import Running

# Long prompts that hold their place in a decode context: the prefill worker's, and the one that it takes next.
_MOST_JOBS = 2


class Admission:
    """For one decode worker's thread. Of several workers one admits at a time, and the others do not wait for it."""

    def __init__(
        self,
        cache: SequenceCache,
        memory: Memory,
        exchange: Exchange,
        lane: Lane,
        lanes: Lanes,
        mail: Mailbox,
        options: EngineOptions,
    ):
        self._cache = cache
        self._memory = memory
        self._exchange = exchange
        self._lane = lane
        self._lanes = lanes
        self._mail = mail
        self._options = options

    def admit(self, pace: Pace) -> list[Running]:
        """Lets in who is for this worker. Returns those that left the queue: cancelled, or past their deadline.

        `pace`: how fast this worker's steps are as things stand.
        """
        if not self._mail.waiting or not self._lanes.begin_admitting():
            return []  # who admits now wakes us when it is done
        has_news = False
        try:
            gone = self._sweep()
            has_news = self._admit(pace)
        finally:
            if self._lanes.end_admitting() or has_news:
                self._mail.wake()
        return gone

    def _sweep(self) -> list[Running]:
        now = time.monotonic()
        with self._mail.changed:
            gone = [r for r in self._mail.waiting if r.stream.cancelled or r.deadline <= now]
            for running in gone:
                self._mail.waiting.remove(running)
        return gone

    def _admit(self, pace: Pace) -> bool:
        """Returns whether others have something new to do."""
        with self._mail.changed:
            waiting = list(self._mail.waiting)
        n_passed, n_assigned = 0, 0
        for running in list(waiting):
            if self._lanes.n_running + n_passed >= self._options.n_parallel:
                break
            if not running.is_assigned:
                self._lanes.assign(running, waiting)
                n_assigned += running.lane != self._lane.number
            if running.lane not in (None, self._lane.number):
                n_passed += 1  # its place is kept
                continue
            if not pace.admits(len(self._lane.running), time.monotonic() - running.submitted_at):
                n_assigned += self._free(running)
                break
            n_shared = self._cache.shareable(running.prompt)[1]
            n_stored = self._exchange.find(running)
            is_long = len(running.prompt) - max(n_shared, n_stored) >= self._options.prefill_from
            if is_long and self._lanes.n_jobs >= _MOST_JOBS:
                continue  # short ones may pass it
            share = self._memory.goes_in_pieces or not (is_long or n_stored >= n_shared + WORTH_SHARING)
            sequence = self._cache.open(running.prompt, running.max_tokens, share)
            if sequence is None:  # it is the next to get room: who came later waits
                n_assigned += self._free(running)
                break
            self._enter(running, sequence, is_long)
            waiting.remove(running)
        return n_assigned > 0

    def _free(self, running: Running) -> bool:
        """Its own lane has no room, so any may take it, and none may pass it. Returns whether that is news."""
        is_new = running.lane is not None and len(self._lanes.all) > 1
        if len(running.prompt) + running.max_tokens <= min(lane.n_cells for lane in self._lanes.all):
            running.lane = None
        return is_new and running.lane is None

    def _enter(self, running: Running, sequence: Sequence, is_long: bool) -> None:
        with self._mail.changed:
            self._mail.waiting.remove(running)
            self._lane.running.append(running)
        running.lane = self._lane.number
        running.admitted(sequence)
        begin = self._exchange.begin(running, is_long)
        # What the store has can have grown since find(), by another lane's sequences: what is left may be short, or nothing, of
        # which no piece would ever come back.
        if is_long and len(running.prompt) - begin >= self._options.prefill_from:
            running.metrics.via = "prefill"
            running.job = Job(running, self._lane.number, running.prompt[:-1], begin, running.lease)
            self._mail.send(running.job)
