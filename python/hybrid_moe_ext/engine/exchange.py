"""What moves between a decode context and the store, between two steps: pieces of finished sequences go there, those of a new
prompt's prefix come back. For the decode worker's thread.

Nobody's token waits for it noticeably: writing takes a small share of the steps' time, saved up until it pays for a piece; and
neither it nor reading holds a step up for longer than a part of `tpot_ms`, but for one piece that is to be read. When no
sequence waits for a token, all that is there is read, and one piece after the other is written until something happens.
"""

from __future__ import annotations

import logging
import time

from ..errors import EngineError
from .cache import WORTH_SHARING, Sequence, SequenceCache
from .context import Context, State, Tokens
from .lanes import Lane
from .mailbox import Job
from .options import EngineOptions
from .running import Running
from .store import Store

_SHARE = 0.05  # of the time of steps, for writing: with the default tpot_ms, 2.5 ms per step
_MOST = 0.5  # of tpot_ms: what one step may be held up; a piece of DeepSeek-V3's, 36 MB, is to fit
_WEIGHT = 0.2  # of the newest measurement in a running mean
_FIRST_GUESS = 1e-9  # seconds per byte; fresh memory is slower than the copy itself


class Exchange:
    def __init__(self, context: Context, cache: SequenceCache, store: Store, lane: Lane, options: EngineOptions):
        self.n_hits = 0
        self.n_tokens = 0  # that came from the store
        self._context = context
        self._cache = cache
        self._store = store
        self._lane = lane
        self._spare = options.n_parallel + options.n_kept  # the sequence that pieces are cut in
        self._most_s = _MOST * options.tpot_ms / 1e3
        self._saved_s = 0.0
        self._left_s = self._most_s  # of this step
        self._per_byte = _FIRST_GUESS
        if store.is_on:
            cache.is_wanted, cache.before_dropping = self._is_unwritten, self._last_chance

    # --- reading

    def find(self, running: Running) -> int:
        """Tokens of its prompt that the store has; asked in every step while it waits."""
        if not self._store.is_on:
            return 0
        version = self._store.version
        if running.n_found[0] != version:
            running.n_found = version, self._store.find(running.prompt)
        return running.n_found[1]

    def begin(self, running: Running, is_long: bool) -> int:
        """Reserves what the store has, for a sequence that was just let in. Returns the tokens that it will begin with."""
        sequence = running.sequence
        assert sequence is not None
        lease = self._store.take(running.prompt) if self._store.is_on else None
        if lease is None:
            return sequence.n
        gain = lease.n - sequence.n
        if gain < WORTH_SHARING and not is_long:
            lease.give_back()
            return sequence.n
        running.lease = lease
        if gain < WORTH_SHARING:  # only the prefill worker may want it
            return sequence.n
        self.n_hits += 1
        running.metrics.n_stored = gain
        running.metrics.n_reused = lease.n
        if is_long and not self._store.in_pieces:  # the prefill worker goes on from it and sends everything
            self.n_tokens += gain
            return sequence.n
        running.is_restoring = True
        return lease.n

    def restore(self) -> list[Running]:
        """Installs pieces. Returns those that must go on with less than was promised."""
        self._left_s = self._most_s
        failed = []
        for one in tuple(self._lane.running):
            while one.is_restoring and (self._left_s > 0 or not self._lane.somebody_waits):
                started = time.monotonic()
                if not self._restore_piece(one):
                    failed.append(one)
                self._left_s -= time.monotonic() - started
        return failed

    def _restore_piece(self, running: Running) -> bool:
        sequence, lease = running.sequence, running.lease
        assert sequence is not None and lease is not None
        piece = lease.piece(sequence.n)
        assert piece is not None
        n = piece.end - sequence.n
        try:
            if not self._store.in_pieces:
                self._context.set_state(sequence.id, piece.state)
            elif piece.n_tokens > self._cache.n_empty():  # those that the prompt does not want need cells for a moment
                raise EngineError("no cells for a whole piece")
            else:
                self._context.set_state(self._spare, piece.state)
                self._context.copy(self._spare, sequence.id, sequence.n, piece.end)
                self._context.remove(self._spare)
        except EngineError:  # then the rest is computed
            running.metrics.n_stored -= lease.n - sequence.n
            running.metrics.n_reused -= lease.n - sequence.n
            running.is_restoring = False
            return False
        sequence.computed(n)
        self.n_tokens += n
        if sequence.n == lease.n:
            running.is_restoring = False
            if running.job is None:
                self.end(running)
        return True

    def end(self, running: Running) -> None:
        """It wants nothing more of the store."""
        running.is_restoring = False
        if running.lease is not None:
            running.lease.give_back()
            running.lease = None

    # --- writing

    def keep(self, job: Job, begin: int, end: int, state: State) -> None:
        """What came from the prefill worker lies in host memory already: if it is a whole piece, it stays there."""
        n = self._store.piece_tokens
        if self._store.is_on and (not self._store.in_pieces or (begin % n == 0 and end - begin == n)):
            self._add(job.tokens, begin, end, state)

    def after_step(self, seconds: float) -> None:
        """Writes as long as what steps have paid for lasts."""
        self._saved_s = min(self._saved_s + _SHARE * seconds, self._most_s)
        while (sequence := self._next_unwritten()) is not None and self._expected_s(sequence) <= self._saved_s:
            self._saved_s -= self._write_piece(sequence)
            self._cache.trim()

    def write_one(self) -> bool:
        """While nobody waits. False: there is nothing to write."""
        sequence = self._next_unwritten()
        if sequence is not None:
            self._write_piece(sequence)
            self._cache.trim()
        return sequence is not None

    def _last_chance(self, sequence: Sequence) -> None:
        """Its cells are given to others now."""
        while self._is_unwritten(sequence):
            if self._lane.somebody_waits and self._expected_s(sequence) > self._left_s:
                break
            self._left_s -= self._write_piece(sequence)

    def _next_unwritten(self) -> Sequence | None:
        """Who will be dropped first is written first."""
        return next((s for s in self._cache.kept if self._is_unwritten(s)), None)

    def _is_unwritten(self, sequence: Sequence) -> bool:
        if not self._store.is_on:
            return False
        if sequence.n_written is None:
            sequence.n_written = self._store.covers(sequence.history)
        return sequence.n_written < sequence.n

    def _piece_of(self, sequence: Sequence) -> tuple[int, int]:
        if not self._store.in_pieces:
            return 0, sequence.n
        assert sequence.n_written is not None
        n = self._store.piece_tokens
        begin = sequence.n_written // n * n
        return begin, min(begin + n, sequence.n)

    def _expected_s(self, sequence: Sequence) -> float:
        begin, end = self._piece_of(sequence)
        return self._per_byte * (self._cache.bytes_per_seq + (end - begin) * self._cache.bytes_per_token)

    def _write_piece(self, sequence: Sequence) -> float:
        """Returns its seconds. What could not be written is not tried again."""
        started = time.monotonic()
        begin, end = self._piece_of(sequence)
        state = self._read_out(sequence, begin, end)
        is_there = state is not None and self._add(sequence.history, begin, end, state)
        sequence.n_written = end if is_there else sequence.n
        seconds = time.monotonic() - started
        if state is not None:
            self._per_byte += _WEIGHT * (seconds / max(len(state), 1) - self._per_byte)
        return seconds

    def _read_out(self, sequence: Sequence, begin: int, end: int) -> State | None:
        if not self._store.in_pieces:
            return self._state(sequence.id)
        self._context.copy(sequence.id, self._spare, begin, end)
        state = self._state(self._spare)
        self._context.remove(self._spare)
        return state

    def _state(self, seq: int) -> State | None:
        try:
            return self._context.state(seq)
        except MemoryError:
            _no_memory()
            return None

    def _add(self, tokens: Tokens, begin: int, end: int, state: State) -> bool:
        try:
            return self._store.add(tokens, begin, end, state)
        except MemoryError:
            _no_memory()
            return False


def _no_memory() -> None:
    logging.getLogger("hybrid_moe_ext.engine").warning(
        "no memory for a finished sequence's keys and values: give a smaller store_mib"
    )
