"""The decode worker: continuous batching in one context. `step()` is the whole of it; the other workers and callers only send."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import EngineClosed, EngineError
from .cache import SequenceCache
from .context import Context, NoRoom
from .mailbox import Job, Mailbox, Piece
from .metrics import EngineMetrics, StepReport
from .options import EngineOptions
from .pace import Pace
from .running import Running
from .sampling import GrammarExhausted

# Long prompts that hold their place in the decode context: the prefill worker's, and the one that it takes next.
_MOST_JOBS = 2


@dataclass
class Plan:
    """One batch: who gets a token, and whose prompt gets how many."""

    decoding: list[Running] = field(default_factory=list)
    chunks: list[tuple[Running, int]] = field(default_factory=list)
    chunk_limit: int = 0

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


class DecodeWorker:
    def __init__(
        self,
        context: Context,
        cache: SequenceCache,
        vocab: object,
        mail: Mailbox,
        options: EngineOptions,
        on_step: Callable[[StepReport], None] | None,
    ):
        self._context = context
        self._cache = cache
        self._vocab = vocab
        self._mail = mail
        self._options = options
        self._on_step = on_step
        self._moving = options.n_parallel + options.n_kept  # the sequence that pieces arrive in
        self._threads = options.threads()
        self._pace = Pace(options.tpot_ms / 1e3, options.ttft_s, options.min_chunk, context.n_batch)
        self._running: list[Running] = []  # in the order in which they were admitted
        self._metrics = EngineMetrics(cells=context.n_ctx)

    def step(self) -> bool:
        """One batch. False: the engine closes."""
        self._sweep()
        installed = self._install()
        self._lend()
        self._admit()
        plan = self._plan()
        self._note_state()
        if plan:
            self._compute(plan, installed)
        else:
            self._mail.wait_for_news(until=self._next_deadline())
        self._note_state()
        return not self._mail.closing

    # --- requests come and go

    def _sweep(self) -> None:
        """Cancelled requests, and those whose deadline has passed."""
        now = time.monotonic()
        with self._mail.changed:
            gone = [r for r in self._mail.waiting if r.stream.cancelled or r.deadline <= now]
            for running in gone:
                self._mail.waiting.remove(running)
        gone += [r for r in self._running if r.stream.cancelled or r.deadline <= now]
        for running in gone:
            self._release(running)
            if running.stream.cancelled:
                running.end("cancelled")
                self._count(running, "cancelled")
            else:
                running.expire()
                self._count(running, "deadline")

    def _install(self) -> int:
        """Takes a piece of a long prompt, or all there are when nobody waits for a token. Returns their tokens."""
        n = 0
        while (piece := self._mail.take_piece()) is not None:
            running = piece.job.running
            if piece.error is None:
                try:
                    self._put(piece.job, piece.begin, piece.end, piece.state)
                except EngineError as error:
                    piece = replace(piece, error=error)
            if piece.error is not None:
                self._fail(running, piece.error)
                continue
            n += piece.end - piece.begin
            if piece.end == len(piece.job.tokens):
                running.job = None
            if any(r.next_token is not None for r in self._running):
                break
        return n

    def _lend(self) -> None:
        """Gives the prefill worker a piece of a prefix that only this context has."""
        for running in self._running:
            job, sequence = running.job, running.sequence
            if job is None or sequence is None or job.lacks is None or len(job.prefix) >= self._options.pieces_ahead:
                continue
            begin, end = job.lacks, min(job.lacks + self._options.piece_tokens, job.begin)
            self._context.copy(sequence.id, self._moving, begin, end)
            state = self._context.state(self._moving)
            self._context.remove(self._moving)
            self._mail.lend(Piece(job, begin, end, state))
            self._metrics.moved_bytes += len(state)

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
        self._metrics.moved_bytes += len(state)

    def _admit(self) -> None:
        """First come, first served, but for short prompts that pass long ones which wait for the prefill worker."""
        with self._mail.changed:
            waiting = list(self._mail.waiting)
        for running in waiting:
            if len(self._running) >= self._options.n_parallel:
                return
            if not self._pace.admits(len(self._running), time.monotonic() - running.submitted_at):
                return
            n_shared = self._cache.shareable(running.prompt)[1]
            is_long = len(running.prompt) - n_shared >= self._options.prefill_from
            if is_long and sum(r.job is not None for r in self._running) >= _MOST_JOBS:
                continue
            share = self._context.memory.goes_in_pieces or not is_long
            sequence = self._cache.open(running.prompt, running.max_tokens, share)
            if sequence is None:  # it is the next to get room: who came later waits
                return
            with self._mail.changed:
                self._mail.waiting.remove(running)
                self._running.append(running)
            running.admitted(sequence, "prefill" if is_long else "decode")
            if is_long:
                running.job = Job(running, running.prompt[:-1], sequence.n)
                self._mail.send(running.job)

    # --- a batch

    def _plan(self) -> Plan:
        plan = Plan([r for r in self._running if r.next_token is not None])
        prompts = [r for r in self._running if r.next_token is None and r.job is None]
        if prompts:
            left_s = prompts[0].submitted_at + self._options.ttft_s - time.monotonic()
            plan.chunk_limit = self._pace.chunk(len(plan.decoding), sum(r.n_left for r in prompts), left_s)
        n = plan.chunk_limit
        for running in prompts:
            if n > 0:
                plan.chunks.append((running, min(n, running.n_left)))
                n -= plan.chunks[-1][1]
        return plan

    def _compute(self, plan: Plan, installed: int) -> None:
        started = time.monotonic()
        try:
            try:
                places = self._run_batch(plan)
            except NoRoom:  # our count of cells is wrong then; what is kept can go
                self._cache.forget_all_kept()
                places = self._run_batch(plan)
        except (EngineError, NoRoom) as error:
            reason = (
                error if isinstance(error, EngineError) else EngineError("the decode context has no room for a batch")
            )
            for running in self._members(plan):
                self._fail(running, reason)
            return
        seconds = time.monotonic() - started
        self._pace.learn(len(plan.decoding), sum(n for _, n in plan.chunks), seconds)
        self._note(plan, installed, seconds)
        for running, place in places:
            self._choose(running, place)

    def _run_batch(self, plan: Plan) -> list[tuple[Running, int]]:
        """Computes it. Returns whose logits are where."""
        places = []
        for running in plan.decoding:
            sequence = running.sequence
            assert sequence is not None and running.next_token is not None
            sequence.tokens[sequence.n] = running.next_token
            places.append((running, self._context.add([running.next_token], sequence.n, sequence.id, logits=True)))
        for running, n in plan.chunks:
            sequence = running.sequence
            assert sequence is not None
            is_last = n == running.n_left
            part = running.prompt[sequence.n : sequence.n + n]
            place = self._context.add(part, sequence.n, sequence.id, logits=is_last)
            if is_last:
                places.append((running, place))
        others_compute = self._mail.n_embedding > 0 or any(r.job for r in self._running)
        self._context.decode(self._threads.decode if others_compute else self._threads.alone)
        for running, n in [*((r, 1) for r in plan.decoding), *plan.chunks]:
            assert running.sequence is not None
            running.sequence.computed(n)
        return places

    def _choose(self, running: Running, place: int) -> None:
        try:
            reason = running.choose(self._context.ctx, place, self._context.logits(place), self._vocab)
        except GrammarExhausted:
            reason = "stop"
        except EngineError as error:
            self._fail(running, error)
            return
        if reason is not None:
            self._release(running)
            running.end(reason)
            self._count(running, reason)

    # --- ends

    def _members(self, plan: Plan) -> list[Running]:
        return plan.decoding + [running for running, _ in plan.chunks]

    def _release(self, running: Running, keep: bool = True) -> None:
        """Frees its sequence; the prefill worker's work on it stops."""
        if running.job is not None:
            self._mail.stop(running.job)
            running.job = None
        if running.sequence is not None:
            self._running.remove(running)
            self._cache.close(running.sequence, keep)
            running.sequence = None
            self._note_state()

    def _fail(self, running: Running, error: EngineError) -> None:
        self._release(running, keep=False)
        running.fail(error)
        self._count(running, "error")

    def end(self) -> None:
        """After the last step: every stream is told."""
        with self._mail.changed:
            self._mail.closing = True
            unfinished = [*self._running, *self._mail.waiting]
            self._mail.waiting.clear()
            self._mail.changed.notify_all()
        failure = self._mail.failure
        error = EngineError(f"the engine stopped after an error of its own: {failure!r}") if failure else None
        for running in unfinished:
            self._fail(running, error or EngineClosed("the engine was closed before this request was done"))
        self._note_state()

    def has_work(self) -> bool:
        with self._mail.changed:
            return bool(self._running or self._mail.waiting)

    def _next_deadline(self) -> float | None:
        with self._mail.changed:
            nearest = min((r.deadline for r in (*self._running, *self._mail.waiting)), default=float("inf"))
        return None if nearest == float("inf") else nearest

    # --- metrics

    def metrics(self) -> EngineMetrics:
        """A copy, from any thread: what is `now` is that of the end of the last step."""
        return replace(self._metrics, finished=dict(self._metrics.finished))

    def _note_state(self) -> None:
        m, cache = self._metrics, self._cache
        self._mail.n_decoding = sum(r.job is None for r in self._running)
        m.running_now = len(self._running)
        m.prefilling_now = sum(r.job is not None for r in self._running)
        m.kept_now, m.kept_bytes_now = len(cache.kept), cache.bytes_kept
        m.cells_now = cache.cells.n - cache.cells.n_free

    def _note(self, plan: Plan, installed: int, seconds: float) -> None:
        m = self._metrics
        m.steps += 1
        m.decode_seconds += seconds
        m.prompt_tokens += sum(n for _, n in plan.chunks)
        m.chunk_now = plan.chunk_limit
        prefilling = tuple(r.id for r in self._running if r.job is not None)
        if self._on_step is not None:
            chunks = tuple((r.id, n) for r, n in plan.chunks)
            decoding = tuple(r.id for r in plan.decoding)
            self._on_step(StepReport(decoding, chunks, plan.chunk_limit, installed, prefilling, seconds))

    def _count(self, running: Running, reason: str) -> None:
        self._metrics.count(running.metrics, reason, self._options.ttft_s, self._options.tpot_ms)
