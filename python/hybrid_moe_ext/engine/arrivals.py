"""What comes to a decode worker from the prefill worker and the store, and what it lends the former; on its own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..errors import EngineError
from .context import Context
from .exchange import Exchange
from .lanes import Lane
from .mailbox import Job, Mailbox, Piece
from .options import EngineOptions
from .running import Running

# Of the time in which somebody waits for tokens, what pieces that arrive may take.
SHARE = 0.08


class TimeShare:
    """Lets something begin so seldom that it takes no more than a share of the time."""

    def __init__(self, share: float):
        self._share = share
        self._not_before = 0.0

    def may_begin(self, now: float) -> bool:
        return now >= self._not_before

    def took(self, began: float, ended: float) -> None:
        self._not_before = ended + (ended - began) * (1 / self._share - 1)


class Arrivals:
    def __init__(self, context: Context, exchange: Exchange, lane: Lane, mail: Mailbox, options: EngineOptions):
        self.moved_bytes = 0
        self._time = TimeShare(SHARE)
        self._context = context
        self._exchange = exchange
        self._lane = lane
        self._mail = mail
        self._options = options
        self._moving = options.n_parallel + options.n_kept  # the sequence that pieces arrive in

    def install(self, fail: Callable[[Running, EngineError], None]) -> int:
        """Takes a piece of a long prompt, or all there are when nobody waits for a token. Returns their tokens.
        Pieces that take long are not taken in every step that somebody waits for."""
        n = 0
        if self._lane.somebody_waits and not self._time.may_begin(time.monotonic()):
            return n
        if any(r.is_restoring and r.job for r in self._lane.running):  # what comes first comes from the store
            if self._lane.somebody_waits:
                return n
            self.restore()
        while (piece := self._mail.take_piece(self._lane.number)) is not None:
            running, began = piece.job.running, time.monotonic()
            if piece.error is None:
                try:
                    self._put(piece.job, piece.begin, piece.end, piece.state)
                except EngineError as error:
                    piece = replace(piece, error=error)
            if piece.error is not None:
                fail(running, piece.error)
                continue
            self._time.took(began, time.monotonic())
            n += piece.end - piece.begin
            if piece.end == len(piece.job.tokens):
                running.job = None
                self._exchange.end(running)
                if self._mail.waiting:
                    self._mail.wake()  # a long prompt in another lane may have waited for the prefill worker
            if self._lane.somebody_waits:
                break
        return n

    def restore(self) -> None:
        """Takes pieces from the store. Where that fails, the prefill worker has to send more, if it was asked at all."""
        for running in self._exchange.restore():
            if running.job is None or running.sequence is None:
                self._exchange.end(running)
                continue
            self._mail.stop(running.job)
            running.job = Job(running, self._lane.number, running.job.tokens, running.sequence.n, running.lease)
            self._mail.send(running.job)

    def lend(self) -> None:
        """Gives the prefill worker a piece of a prefix that only this context has."""
        for running in self._lane.running:
            job, sequence = running.job, running.sequence
            if job is None or sequence is None or job.lacks is None or len(job.prefix) >= self._options.pieces_ahead:
                continue
            begin, end = job.lacks, min(job.lacks + self._options.piece_tokens, job.begin)
            if end > sequence.n:  # still on its way from the store
                continue
            self._context.copy(sequence.id, self._moving, begin, end)
            state = self._context.state(self._moving)
            self._context.remove(self._moving)
            self._mail.lend(Piece(job, begin, end, state))
            self.moved_bytes += len(state)

    def _put(self, job: Job, begin: int, end: int, state: object) -> None:
        sequence = job.running.sequence
        assert sequence is not None and isinstance(state, np.ndarray) and sequence.n == begin
        if self._context.memory.goes_in_pieces:
            self._context.set_state(self._moving, state)
            self._context.copy(self._moving, sequence.id)
            self._context.remove(self._moving)
        else:
            self._context.set_state(sequence.id, state)
        sequence.computed(end - begin)
        self._exchange.keep(job, begin, end, state)
        self.moved_bytes += len(state)
