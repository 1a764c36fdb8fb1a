"""The embedding worker: vectors of texts, in a small llama_context of its own over the engine's model. It sits beside the two
workers of engine.py, and is made at the first use: who asks for no embeddings pays nothing for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from .. import seam
from ..errors import DeadlinePassed, EngineBusy, EngineClosed, EngineError, HybridMoeError, OptionError, RequestError
from .context import Context, NoRoom
from .request import check_prompt

if TYPE_CHECKING:
    from .engine import Engine

Vectors = npt.NDArray[np.float32]

POOLINGS = ("auto", "last", "mean")
_OF_MODEL = {C.LLAMA_POOLING_TYPE_MEAN: "mean", C.LLAMA_POOLING_TYPE_CLS: "first", C.LLAMA_POOLING_TYPE_LAST: "last"}
# llama.cpp computes logits of every token of an embedding context, [n_batch, n_vocab]: larger batches cost memory, and time
# in which the decode worker's steps are slower.
_N_BATCH = 128
_N_SEQUENCES = 32  # short texts per batch


@dataclass(eq=False)
class Embedding:
    """Texts that wait for their vectors. `future` gets them: float32 [n_texts, n_embd], each of length 1."""

    tokens: list[list[int]]
    deadline: float  # of time.monotonic()
    future: Future[Vectors] = field(default_factory=Future)
    cancelled: bool = False

    def cancel(self) -> None:
        """At any time, from any thread: the worker stops after the batch at hand."""
        self.cancelled = True

    @property
    def n_tokens(self) -> int:
        return sum(len(text) for text in self.tokens)


class Embedder:
    """`pooling`: which tokens of a text its vector is made of: "last", "mean", or "auto": what the model file says
    (pooling_type), else the last one, which is the only token of a decoder that has seen the whole text. `n_ctx`: tokens of
    the longest text. Raises OptionError or EngineClosed. Closed with its engine.
    """

    def __init__(self, engine: Engine, pooling: str = "auto", n_ctx: int = 2048):
        if pooling not in POOLINGS:
            raise OptionError(f"pooling={pooling!r} is not possible: choose {', '.join(POOLINGS)}")
        if n_ctx < 16:
            raise OptionError(f"n_ctx={n_ctx} is not possible for embeddings: give 16 tokens at least")
        self._engine = engine
        with engine._users:
            self.pooling = _pooling_of(engine) if pooling == "auto" else pooling
            self.n_embd = int(C.llama_model_n_embd_out(engine.llama.model))
        self.n_ctx = min(n_ctx, engine.n_ctx)
        self.thread_id: int | None = None  # the system's, of the worker
        self._changed = threading.Condition()
        self._waiting: deque[Embedding] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        engine.closers.append(self.close)

    def submit(self, texts: Sequence[Sequence[int]], deadline_s: float | None = None) -> Embedding:
        """`texts`: token ids of each. Raises RequestError, EngineBusy, EngineClosed (while the engine drains, too), or
        EngineError when the engine has stopped."""
        for i, tokens in enumerate(texts):
            if len(tokens) > self.n_ctx:
                raise RequestError(
                    f"text {i} has {len(tokens)} tokens, the context for embeddings holds {self.n_ctx}: shorten the text, or "
                    "give a larger n_ctx"
                )
            check_prompt(tokens, self._engine.n_vocab, self.n_ctx + 1)
        deadline = float("inf") if deadline_s is None else time.monotonic() + deadline_s
        made = Embedding([list(tokens) for tokens in texts], deadline)
        if not texts:
            raise RequestError("there is no text: give at least one")
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed: start another one")
            if len(self._waiting) >= self._engine.options.queue:
                raise EngineBusy(f"{len(self._waiting)} requests for embeddings wait already: try again later")
            self._engine._mail.embedding_comes()
            made.future.add_done_callback(lambda _: self._engine._mail.embedding_ends())
            self._waiting.append(made)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hybrid-moe-embed", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return made

    def close(self) -> None:
        """Before the engine frees the model. What waits ends with EngineClosed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the worker's

    def _work(self) -> None:
        self.thread_id = threading.get_native_id()
        context: Context | None = None
        try:
            while (job := self._next()) is not None:
                if not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    if context is None:
                        context = Context(self._new_context(), self._engine.memory)
                    job.future.set_result(self._compute(context, job))
                except Exception as error:
                    is_ours = isinstance(error, HybridMoeError)
                    job.future.set_exception(error if is_ours else EngineError(f"no embeddings: {error!r}"))
        finally:
            if context is not None:
                context.free_batch()
                C.llama_free(context.ctx)
            for job in self._waiting:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(EngineClosed("the engine was closed before this request was done"))

    def _next(self) -> Embedding | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return None if self._closing else self._waiting.popleft()

    def _new_context(self) -> Any:
        params = C.llama_context_params.from_buffer_copy(self._engine.llama.context_params)
        params.n_ctx = self.n_ctx
        params.n_batch = params.n_ubatch = params.n_outputs_max = min(_N_BATCH, self.n_ctx)
        params.n_seq_max = _N_SEQUENCES
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = C.LLAMA_POOLING_TYPE_NONE  # tokens' own: texts that take several batches are pooled here
        context = seam.create_stock(self._engine.llama.model, params)
        if context is None:
            raise EngineError(
                f"llama.cpp cannot make a context of {self.n_ctx} tokens for embeddings: give it a smaller one, or the engine a "
                "smaller n_ctx"
            )
        return context

    def _compute(self, context: Context, job: Embedding) -> Vectors:
        out = np.zeros((len(job.tokens), self.n_embd), np.float32)
        i = 0
        while i < len(job.tokens):
            end = _as_many_as_fit(job.tokens, i, context.n_batch)
            context.clear()
            pooled = self._pooled(context, job, i, end)
            out[i:end] = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-30)
            i = end
        return out

    def _pooled(self, context: Context, job: Embedding, begin: int, end: int) -> npt.NDArray[np.float64]:
        """Texts [begin, end), which fit one batch, or one text in several."""
        sums = np.zeros((end - begin, self.n_embd))
        texts = job.tokens[begin:end]
        for at in range(0, max(len(text) for text in texts), context.n_batch):
            if job.cancelled or self._closing:
                raise EngineClosed("the client has left, or the engine was closed")
            if time.monotonic() >= job.deadline:
                raise DeadlinePassed("not all embeddings were there within the deadline: give more time, or send less")
            parts = [text[at : at + context.n_batch] for text in texts]
            for seq, part in enumerate(parts):
                context.add(part, at, seq, logits=True)
            with self._beside_decode() as n_threads:
                try:
                    context.decode(n_threads)
                except NoRoom:
                    raise EngineError("the context for embeddings has no room for its texts") from None
            rows = self._rows(context, sum(len(part) for part in parts))
            first = 0
            for seq, part in enumerate(parts):
                if self.pooling == "mean":
                    sums[seq] += rows[first : first + len(part)].sum(axis=0, dtype=np.float64) / len(texts[seq])
                elif self.pooling == "last":
                    sums[seq] = rows[first + len(part) - 1]
                elif at == 0:
                    sums[seq] = rows[first]
                first += len(part)
        return sums

    def _rows(self, context: Context, n: int) -> Vectors:
        """[n, n_embd], valid until the next batch."""
        return np.ctypeslib.as_array(C.llama_get_embeddings(context.ctx), (n, self.n_embd))

    @contextlib.contextmanager
    def _beside_decode(self) -> Iterator[int]:
        """As the prefill worker does: threads of its own while others compute, all of them else."""
        mail, cores = self._engine._mail, self._engine.cores
        mail.n_embedding += 1
        try:
            yield cores.prefill if mail.n_decoding else cores.alone
        finally:
            mail.n_embedding -= 1


def _pooling_of(engine: Engine) -> str:
    """llama.cpp resolves a context's pooling type from the file."""
    kind = C.llama_pooling_type(engine.llama.ctx)
    if kind == C.LLAMA_POOLING_TYPE_RANK:
        raise OptionError(
            f"{engine.llama.model_path}: a reranker gives scores, no embeddings: choose pooling last or mean"
        )
    return _OF_MODEL.get(kind, "last")


def _as_many_as_fit(texts: list[list[int]], begin: int, n_batch: int) -> int:
    """Texts from `begin` on for one batch; at least one."""
    end, n = begin, 0
    while end < len(texts) and end - begin < _N_SEQUENCES and n + len(texts[end]) <= n_batch:
        n += len(texts[end])
        end += 1
    return max(end, begin + 1)
