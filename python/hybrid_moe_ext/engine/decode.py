"""A decode worker: continuous batching in one context. `step()` is the whole of it; the other workers and callers only send.

Who is let in is admission.py's business, what the prefill worker sends arrivals.py's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..errors import EngineClosed, EngineError
from .admission import Admission
from .arrivals import Arrivals
from .cache import SequenceCache
from .context import Context, NoRoom
from .cores import Cores
from .exchange import Exchange
from .lanes import Lane, Lanes
from .mailbox import Mailbox
from .metrics import EngineMetrics, StepReport
from .options import EngineOptions
from .pace import Pace
from .running import Running
from .sampling import GrammarExhausted
from .store import Store


@dataclass
class Plan:
    """One batch: who gets a token, and whose prompt gets how many."""

    decoding: list[Running] = field(default_factory=list)
    chunks: list[tuple[Running, int]] = field(default_factory=list)
    chunk_limit: int = 0

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


class DecodeWorker:
    """`lane`: what the others see of it; `lanes`: all there are."""

    def __init__(
        self,
        context: Context,
        cache: SequenceCache,
        lane: Lane,
        lanes: Lanes,
        vocab: object,
        mail: Mailbox,
        store: Store,
        options: EngineOptions,
        cores: Cores,
        on_step: Callable[[StepReport], None] | None,
    ):
        self._context = context
        self._cache = cache
        self._lane = lane
        self._lanes = lanes
        self._vocab = vocab
        self._mail = mail
        self._options = options
        self._on_step = on_step
        self._cores = cores
        self._exchange = Exchange(context, cache, store, lane, options)
        self._admission = Admission(cache, context.memory, self._exchange, lane, lanes, mail, options)
        self._arrivals = Arrivals(context, self._exchange, lane, mail, options)
        # Alone, and while another lane decodes: its steps take longer then.
        self._paces = [
            Pace(options.tpot_ms / 1e3, options.ttft_s, options.min_chunk, context.n_batch) for _ in range(2)
        ]
        self._running = lane.running
        self._seen = 0
        self._metrics = EngineMetrics(cells=context.n_ctx)

    def step(self) -> bool:
        """One batch. False: the engine closes."""
        self._sweep()
        installed = self._arrivals.install(self._fail)
        self._arrivals.lend()
        for running in self._admission.admit(self._pace):
            self._leave(running)
        self._arrivals.restore()
        plan = self._plan()
        self._note_state()
        if plan:
            self._compute(plan, installed)
        elif not self._exchange.write_one():
            self._seen = self._mail.wait_for_news(self._seen, until=self._next_deadline())
        self._note_state()
        return not self._mail.closing

    @property
    def _pace(self) -> Pace:
        return self._paces[self._lanes.beside(self._lane)]

    # --- requests leave

    def _sweep(self) -> None:
        """Cancelled requests, and those whose deadline has passed."""
        now = time.monotonic()
        for running in [r for r in self._running if r.stream.cancelled or r.deadline <= now]:
            self._release(running)
            self._leave(running)

    def _leave(self, running: Running) -> None:
        if running.stream.cancelled:
            running.end("cancelled")
            self._count(running, "cancelled")
        else:
            running.expire()
            self._count(running, "deadline")

    # --- a batch

    def _plan(self) -> Plan:
        plan = Plan([r for r in self._running if r.next_token is not None])
        prompts = [r for r in self._running if r.next_token is None and r.job is None and not r.is_restoring]
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
        is_beside = self._lanes.beside(self._lane)
        pace = self._paces[is_beside]
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
        if self._lanes.n_jobs:
            self._cores.step(len(plan.decoding), seconds)
        pace.learn(len(plan.decoding), sum(n for _, n in plan.chunks), seconds)
        self._metrics.dual_steps += is_beside
        self._note(plan, installed, seconds)
        for running, place in places:
            self._choose(running, place)
        self._exchange.after_step(seconds)

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
        others_compute = self._lanes.n_jobs or self._mail.n_embedding
        self._context.decode(self._cores.decode if others_compute else self._cores.alone)
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
        self._exchange.end(running)
        if running.sequence is not None:
            self._running.remove(running)
            self._cache.close(running.sequence, keep)
            running.sequence = None
            self._note_state()
            if len(self._lanes.all) > 1 and self._mail.waiting:
                self._mail.wake()  # somebody may have waited for this place, in another lane

    def _fail(self, running: Running, error: EngineError) -> None:
        self._release(running, keep=False)
        running.fail(error)
        self._count(running, "error")

    def end(self) -> None:
        """After the last step: every stream is told."""
        # Whom the other worker lets in just now is its own to tell.
        with self._lanes.nobody_admits(), self._mail.changed:
            self._mail.closing = True
            unfinished = [*self._running, *self._mail.waiting]
            self._mail.waiting.clear()
            self._mail.changed.notify_all()
        failure = self._mail.failure
        error = EngineError(f"the engine stopped after an error of its own: {failure!r}") if failure else None
        for running in unfinished:
            self._fail(running, error or EngineClosed("the engine was closed before this request was done"))
        self._note_state()

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
        self._mail.note_decoding(self._lanes)
        m.running_now = len(self._running)
        m.prefilling_now = self._lane.n_jobs
        m.kept_now, m.kept_bytes_now = len(cache.kept), cache.bytes_kept
        m.cells_now = cache.cells.n - cache.cells.n_free
        m.moved_bytes = self._arrivals.moved_bytes
        m.store_hits, m.store_tokens = self._exchange.n_hits, self._exchange.n_tokens
        if len(self._lanes.all) > 1:
            self._lane.prefixes = tuple(s.history for s in (*cache.live, *cache.kept))

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
            lane = self._lane.number
            self._on_step(StepReport(decoding, chunks, plan.chunk_limit, installed, prefilling, seconds, lane))

    def _count(self, running: Running, reason: str) -> None:
        self._metrics.count(running.metrics, reason, self._options.ttft_s, self._options.tpot_ms)
