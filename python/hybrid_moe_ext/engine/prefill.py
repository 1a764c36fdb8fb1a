"""The prefill worker: a long prompt at a time, in large batches, in a context of its own. Its keys and values leave in pieces."""

from __future__ import annotations

import time

from ..errors import EngineError
from .cache import common
from .context import NO_TOKENS, Context, NoRoom
from .cores import Cores
from .mailbox import Job, Mailbox, Piece
from .store import Lease

_MAIN, _PIECE = 0, 1  # sequences: the prompt, and what is being copied of it
N_SEQUENCES = 2


class PrefillWorker:
    def __init__(self, context: Context, mail: Mailbox, piece_tokens: int, cores: Cores):
        self.n_tokens = 0
        self.seconds = 0.0
        self._context = context
        self._mail = mail
        self._piece_tokens = piece_tokens
        self._cores = cores
        self._has = NO_TOKENS  # what the context holds, kept for the next prompt
        self._job: Job | None = None
        self._n_sent = 0
        self._lease: Lease | None = None
        self._is_borrowing = False

    def step(self) -> bool:
        """One batch of the prompt at hand. False: the engine closes."""
        if self._job is None:
            self._job = self._mail.wait_for_job()
            if self._job is None:
                return False
            self._begin(self._job)
        job = self._job
        try:
            if len(self._has) < max(job.begin, self._lease.n if self._lease else 0):
                self._receive(job)
            elif len(self._has) < len(job.tokens) and not job.stopped:
                self._compute(job)
            if not job.stopped:
                self._send(job)
        except (EngineError, NoRoom) as error:
            self._forget()
            if isinstance(error, NoRoom):
                error = EngineError("the prefill context has no room for its prompt")
            self._mail.deliver(Piece(job, 0, 0, None, error))
            self._job = None
        if job.stopped or self._n_sent == len(job.tokens):
            self._job = None
        return not self._mail.closing

    def end(self) -> None:
        """Nothing: whose prompts are here learns it from the decode worker."""

    def _begin(self, job: Job) -> None:
        """Goes on from the common prefix with the last prompt, if this memory can forget the rest."""
        assert job.begin < len(job.tokens), "a job without a piece to send never ends"
        n = common(self._has, job.tokens)
        if n and self._context.memory.goes_in_pieces and self._context.remove(_MAIN, n):
            self._has = job.tokens[:n]
        else:
            self._forget()
        self._n_sent = job.begin
        self._lease = job.stored
        self._is_borrowing = False

    def _receive(self, job: Job) -> None:
        """A piece of the prefix that only the store or the decode context has: moved sooner than computed."""
        if self._lease is not None and self._receive_stored(job, self._lease):
            return
        self._lease = None
        n = len(self._has)
        if n >= job.begin:
            return
        if not self._is_borrowing:
            self._mail.borrow(job, n)
            self._is_borrowing = True
        piece = self._mail.wait_for_prefix(job)
        if piece is not None and piece.state is not None:
            self._context.set_state(_PIECE, piece.state)
            self._context.copy(_PIECE, _MAIN)
            self._context.remove(_PIECE)
            self._has = job.tokens[: piece.end]

    def _receive_stored(self, job: Job, lease: Lease) -> bool:
        """False: nothing more comes from the store."""
        n = len(self._has)
        piece = lease.piece(n)
        if piece is None or n + piece.n_tokens > self._context.n_ctx:  # a piece needs cells for all it has
            return False
        try:
            if self._context.memory.goes_in_pieces:
                self._context.set_state(_PIECE, piece.state)
                self._context.copy(_PIECE, _MAIN, n, piece.end)
                self._context.remove(_PIECE)
            else:
                self._context.set_state(_MAIN, piece.state)
        except EngineError:  # then it is computed
            return False
        self._has = job.tokens[: piece.end]
        return True

    def _compute(self, job: Job) -> None:
        begin = len(self._has)
        end = min(begin + self._context.n_batch, len(job.tokens))
        self._context.add(job.tokens[begin:end], begin, _MAIN, logits=False)
        is_beside = self._mail.n_decoding > 0
        if is_beside:
            self._cores.begin_pass()
        started = time.monotonic()
        self._context.decode(self._cores.prefill if is_beside else self._cores.alone)
        seconds = time.monotonic() - started
        if is_beside:
            self._cores.end_pass(end - begin, seconds)
        self.seconds += seconds
        self.n_tokens += end - begin
        self._has = job.tokens[:end]

    def _send(self, job: Job) -> None:
        """All pieces that are computed and not sent; for a memory that cannot be cut, everything at the end."""
        is_done = len(self._has) == len(job.tokens)
        if not self._context.memory.goes_in_pieces:
            if is_done:
                self._mail.deliver(Piece(job, 0, len(job.tokens), self._context.state(_MAIN)))
                self._n_sent = len(job.tokens)
            return
        while self._n_sent < len(self._has) and not job.stopped and not self._mail.closing:
            end = min((self._n_sent // self._piece_tokens + 1) * self._piece_tokens, len(job.tokens))
            if end > len(self._has):  # pieces end where the store cuts: the rest leaves with the next batch's
                break
            self._context.copy(_MAIN, _PIECE, self._n_sent, end)
            state = self._context.state(_PIECE)
            self._context.remove(_PIECE)
            self._mail.deliver(Piece(job, self._n_sent, end, state))
            self._n_sent = end

    def _forget(self) -> None:
        self._context.clear()
        self._has = NO_TOKENS
