"""What the threads share, all of it, under one condition: requests that come in, long prompts that go to the prefill worker, and
the pieces that come back. Whoever changes something wakes everybody; each worker looks at its own part."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import EngineBusy, EngineClosed, EngineError
from .context import State, Tokens
from .priority import Priority
from .running import Running
from .store import Lease

if TYPE_CHECKING:
    from .lanes import Lanes


@dataclass(eq=False)
class Job:
    """A long prompt on its way through the prefill worker. What changes is changed under the mailbox's condition."""

    running: Running
    lane: int  # the decode worker that the pieces go to
    tokens: Tokens  # without the last one, whose logits the decode worker wants to compute itself
    begin: int  # the decode context has what is before
    stored: Lease | None = None  # a prefix that the prefill worker can have from the store
    stopped: bool = False
    lacks: int | None = None  # the prefill context wants tokens [lacks, begin) from the decode context
    prefix: deque[Piece] = field(default_factory=deque)  # which come here


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys and values of tokens [begin, end), or why there are none."""

    job: Job
    begin: int
    end: int
    state: State | None
    error: EngineError | None = None


@dataclass
class Mailbox:
    queue_limit: int
    pieces_limit: int
    priority: Priority | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[Running] = field(default_factory=deque)
    jobs: deque[Job] = field(default_factory=deque)
    pieces: deque[Piece] = field(default_factory=deque)
    closing: bool = False
    draining: bool = False
    failure: BaseException | None = None  # of a worker: our bug
    n_decoding: int = 0  # sequences that the decode workers compute; read without waiting for them
    n_embedding: int = 0  # batches that the embedding worker computes now; likewise
    n_embeddings: int = 0  # requests for embeddings that are not answered
    refused: int = 0
    submitted: int = 0
    _n_news: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, running: Running) -> None:
        with self.changed:
            self.check_open()
            if len(self.waiting) >= self.queue_limit:
                self.refused += 1
                raise EngineBusy(
                    f"{len(self.waiting)} requests wait already: try again later, or start with a larger queue"
                )
            self.submitted += 1
            self.waiting.append(running)
            self._tell()

    def embedding_comes(self) -> None:
        with self.changed:
            self.check_open()
            self.n_embeddings += 1

    def embedding_ends(self) -> None:
        with self.changed:
            self.n_embeddings -= 1

    def check_open(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine has stopped after an error of its own: {self.failure!r}") from self.failure
        if self.closing or self.draining:
            raise EngineClosed("the engine is closed: start another one")

    def close(self, failure: BaseException | None = None) -> None:
        with self.changed:
            self.failure = self.failure or failure
            self.closing = True
            self.changed.notify_all()

    def wake(self) -> None:
        with self.changed:
            self._tell()

    def _tell(self) -> None:
        self._n_news += 1
        self.changed.notify_all()

    # --- the decode workers'

    def note_decoding(self, lanes: Lanes) -> None:
        """How many sequences decode now, which decides what long prompts may use."""
        with self._counting:
            self.n_decoding = lanes.n_decoding
            if self.priority is not None:
                self.priority.decoding(self.n_decoding)

    def wait_for_news(self, seen: int, until: float | None) -> int:
        """Until something happened since `seen`, or a moment of time.monotonic(). Returns what to give the next time."""
        with self.changed:
            timeout = None if until is None else max(0.0, until - time.monotonic())
            self.changed.wait_for(lambda: self._n_news != seen or self.closing, timeout)
            return self._n_news

    def send(self, job: Job) -> None:
        with self.changed:
            self.jobs.append(job)
            self.changed.notify_all()

    def stop(self, job: Job) -> None:
        """Nothing more comes of it."""
        with self.changed:
            job.stopped = True
            if job in self.jobs:
                self.jobs.remove(job)
            self.pieces = deque(piece for piece in self.pieces if piece.job is not job)
            self.changed.notify_all()

    def take_piece(self, lane: int) -> Piece | None:
        """The next one for this decode worker."""
        with self.changed:
            piece = next((piece for piece in self.pieces if piece.job.lane == lane), None)
            if piece is not None:
                self.pieces.remove(piece)
                self.changed.notify_all()
            return piece

    def lend(self, piece: Piece) -> None:
        with self.changed:
            piece.job.prefix.append(piece)
            piece.job.lacks = piece.end if piece.end < piece.job.begin else None
            self.changed.notify_all()

    # --- the prefill worker's

    def borrow(self, job: Job, begin: int) -> None:
        with self.changed:
            job.lacks = begin
            self._tell()

    def wait_for_prefix(self, job: Job) -> Piece | None:
        """None: nobody wants it any more."""
        with self.changed:
            self.changed.wait_for(lambda: job.prefix or job.stopped or self.closing)
            if job.stopped or self.closing:
                return None
            self._tell()
            return job.prefix.popleft()

    def wait_for_job(self) -> Job | None:
        """None: the engine closes."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.closing)
            return None if self.closing else self.jobs.popleft()

    def deliver(self, piece: Piece) -> None:
        """Waits while as many pieces lie there as may; drops it when nobody wants it any more."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.pieces) < self.pieces_limit or piece.job.stopped or self.closing)
            if not piece.job.stopped:
                self.pieces.append(piece)
                self._tell()
