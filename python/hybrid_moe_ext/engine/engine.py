"""`Engine`: one model, one or two decode workers and a prefill worker, each on a thread and a llama_context of its own."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from .. import seam
from .._native import put_this_thread_first
from ..errors import EngineError, OptionError, RequestError
from ..placement import attention_on_gpu
from ..token_text import piece
from .agreement import agree
from .cache import SequenceCache
from .context import Context, Memory, NoRoom
from .cores import Cores
from .decode import DecodeWorker
from .dual import DualBatch, decide, why_single
from .lanes import Lanes
from .mailbox import Mailbox
from .measure import measure
from .metrics import EngineMetrics, RequestMetrics, StepReport
from .models import Models, with_threads
from .options import EngineOptions
from .prefill import PrefillWorker
from .priority import Priority
from .request import Request, check_prompt
from .running import Running
from .sampling import Sampler
from .store import Store
from .stream import Finish, Stream
from .users import Users

_MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
# Options of llama_cpp.Llama that mean something else here, and what to give instead.
_NOT_HERE = {
    "n_ubatch": "give n_batch (decode) and prefill_batch",
    "n_threads_batch": "give n_threads: what a worker has alone, and n_threads_decode",
    "logits_all": "give logprobs with a request",
    "embedding": "use Llama",
    "draft_model": "use Llama",
    "vocab_only": "use Llama",
}


class Engine:
    """Serves many requests from one model. `with Engine(path, n_ctx=32768) as engine: engine.submit(Request(...))`.

    Options: EngineOptions' and those of `hybrid_moe_ext.Llama` (`verbose` is False here). `on_step` gets a StepReport
    of every decode step, on the decode worker's thread: it must be quick and must not raise.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        on_step: Callable[[StepReport], None] | None = None,
        **options: Any,
    ):
        ours = {name: options.pop(name) for name in EngineOptions.names() if name in options}
        self.options = EngineOptions(**ours)
        for name, instead in _NOT_HERE.items():
            if name in options:
                raise OptionError(f"{name} is no option of the engine: {instead}")
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._users = Users()
        self._threads: list[threading.Thread] = []
        self._contexts: list[Context] = []
        self._decode_ctxs: list[Any] = []
        self.closers: list[Callable[[], None]] = []  # of what else uses the model, called before it goes
        self._models = Models(model_path, self.options, options)
        self.llama = self._models.prefill
        self.split_gpus = self._models.split
        self.options = with_threads(self.options, self._models.streams).resolved(
            attention_on_gpu(self._models.decode.placement)
        )
        try:
            self._start(on_step)
        except BaseException:
            self._free()
            raise
        atexit.register(self.close)

    # --- requests

    def submit(self, request: Request) -> Stream:
        """Raises RequestError, EngineBusy or EngineClosed at once; whatever comes later is the stream's to tell."""
        with self._users:
            return self._submit(request)

    def _submit(self, request: Request) -> Stream:
        self._mail.check_open()
        request.check(self.n_vocab)
        prompt = self._tokens_of(request.prompt)
        max_tokens = self.options.default_max_tokens if request.max_tokens is None else request.max_tokens
        max_tokens = min(max_tokens, self.n_ctx - len(prompt))
        stream = Stream(next(self._ids), self._mail.wake)
        sampler = Sampler(self._vocab, request.sampling, self._eog_tokens(request), prompt, self.n_ctx)
        if max_tokens == 0:
            sampler.free()
            stream.end(Finish("length", None, RequestMetrics(n_prompt=len(prompt), total_s=0.0)))
            return stream
        running = Running(request, np.array(prompt, np.int32), max_tokens, sampler, stream)
        try:
            self._mail.submit(running)
        except BaseException:
            sampler.free()
            raise
        return stream

    def cancel(self, stream: Stream) -> None:
        stream.cancel()

    def tokenize(self, text: str, add_bos: bool | None = None, special: bool = True) -> list[int]:
        """`add_bos` None: where the model wants it; `special`: its special tokens may be written out in the text."""
        if not isinstance(text, str):
            raise RequestError(f"a {type(text).__name__} cannot be tokenized: give text")
        with self._users:
            if C.llama_vocab_type(self._vocab) == C.LLAMA_VOCAB_TYPE_NONE:
                raise RequestError("this model has no tokenizer: give token ids")
            add = bool(C.llama_vocab_get_add_bos(self._vocab)) if add_bos is None else add_bos
            return self.llama.tokenize(text.encode("utf-8", "replace"), add, special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        check_prompt(tokens, self.n_vocab, len(tokens) + 1)
        with self._users:
            return b"".join(piece(self._vocab, token) for token in tokens)

    # --- state

    def metrics(self) -> EngineMetrics:
        m, mail = self._workers[0].metrics(), self._mail
        for worker in self._workers[1:]:
            m = m.plus(worker.metrics())
        m.lanes_now, m.dual_from_now, m.dual_gain_now = (
            len(self._workers),
            self.dual_batch.begins_at,
            self.dual_batch.best_gain,
        )
        with mail.changed:
            m.queued_now, m.submitted, m.refused = len(mail.waiting), mail.submitted, mail.refused
        m.prefill_tokens, m.prefill_seconds = self._prefill.n_tokens, self._prefill.seconds
        m.prompt_tokens += m.prefill_tokens
        m.store_bytes_now, m.store_written_bytes = self._store.n_bytes, self._store.n_bytes_written
        m.store_evictions = self._store.n_evicted
        return m

    def drain(self, timeout_s: float | None = None) -> bool:
        """Takes no more requests and waits for those there are. False: not all were done in time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._mail.changed:
            self._mail.draining = True
        while self._has_work():
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def _has_work(self) -> bool:
        with self._mail.changed:
            return bool(self._lanes.n_running or self._mail.waiting or self._mail.n_embeddings)

    def close(self) -> None:
        """Ends all streams with EngineClosed and frees the model. May be called again, from any thread but the workers'."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._users.close()
            for close in self.closers:
                close()
            self.close_threads()
            self._store.close()
            self._free()
            atexit.unregister(self.close)

    def close_threads(self) -> None:
        """The first half of close(): nothing runs any more, the model is still there."""
        self._mail.close()
        for thread in self._threads:
            thread.join()
        self._priority.end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    # --- construction

    def _start(self, on_step: Callable[[StepReport], None] | None) -> None:
        o, model = self.options, self.llama.model
        self.n_ctx = self._models.longest()  # of one sequence
        self._vocab = C.llama_model_get_vocab(model)
        self.n_vocab = C.llama_vocab_n_tokens(self._vocab)
        self._eog: list[int] | None = None
        if C.llama_model_has_encoder(model) or C.llama_get_memory(self.llama.ctx) is None:
            raise OptionError(f"{self.llama.model_path}: the engine runs decoder-only models: use Llama for this one")
        self.memory = Memory.of(model, self.llama.context_params)
        first = self._new_decode_context(o.n_ctx)
        if first is None:
            raise OptionError(
                f"llama.cpp cannot make a second context of n_ctx={o.n_ctx}, n_batch={o.n_batch}: choose a smaller n_ctx, "
                "prefill_batch or n_batch"
            )
        prefill = Context(self.llama.ctx, self.memory)
        self._contexts = [prefill, Context(first, self.memory)]
        self.dual_batch = self._choose_lanes()
        split = self.split_gpus
        others = [name for name in self.llama.placement.devices if name != split.decode] if split.is_on else None
        self._priority = Priority(self._models.streams, others)
        self._mail = Mailbox(o.queue, o.pieces_ahead, self._priority)
        decodes = self._contexts[1:]
        self._lanes = Lanes([context.n_ctx for context in decodes], o.n_parallel, self.dual_batch)
        self._store = Store(o.store_mib * 2**20, o.piece_tokens, self.memory.goes_in_pieces)
        self.cores = Cores(o.threads(), o.tpot_ms / 1e3, is_given=o.n_threads_decode > 0)
        self._workers = []
        for lane, decode in zip(self._lanes.all, decodes, strict=True):
            per_seq, per_token = agree(prefill, decode, o.n_parallel + o.n_kept, o.threads().alone)
            cache = SequenceCache(decode, o.n_parallel, o.n_kept, o.kept_mib * 2**20 / len(decodes), per_seq, per_token)
            self._workers.append(
                DecodeWorker(
                    decode, cache, lane, self._lanes, self._vocab, self._mail, self._store, o, self.cores, on_step
                )
            )
        self._prefill = PrefillWorker(prefill, self._mail, o.piece_tokens, self.cores)
        names = ["hybrid-moe-decode", "hybrid-moe-decode-2"][: len(decodes)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            for worker, name in zip((*self._workers, self._prefill), (*names, "hybrid-moe-prefill"), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _choose_lanes(self) -> DualBatch:
        """Whether there is a second decode context, which has room for half as many tokens."""
        o = self.options
        why = why_single(o, attention_on_gpu(self._models.decode.placement))
        if why:
            return DualBatch(False, why)
        second = self._new_decode_context(max(1, o.n_ctx // 2))
        if second is None:
            return DualBatch(False, f"no memory for a second decode context of {o.n_ctx // 2} tokens")
        self._contexts.append(Context(second, self.memory))
        if o.dual_batch == "on":
            return DualBatch(True, "as given")
        try:
            chosen = decide(measure(self._contexts[1:], o.n_parallel, o.threads().alone))
        except (EngineError, NoRoom) as error:
            chosen = DualBatch(False, f"two contexts at once failed: {error}")
        if not chosen.is_on:
            self._contexts.pop().free_batch()
            C.llama_free(self._decode_ctxs.pop())
        return chosen

    def _new_decode_context(self, n_ctx: int) -> Any:
        """None: there is no memory for it."""
        params = self._models.decode_params(n_ctx)
        if params.n_seq_max > _MAX_SEQUENCES:
            raise OptionError(
                f"n_parallel + n_kept = {params.n_seq_max - 1}: llama.cpp has {_MAX_SEQUENCES - 1} sequences"
            )
        context = seam.create_stock(self._models.decode.model, params)
        if context is not None:
            self._decode_ctxs.append(context)
        return context

    def _work(self, worker: DecodeWorker | PrefillWorker) -> None:
        """A thread's life. An error of ours ends the engine, with every stream told, instead of leaving them to wait."""
        if worker is not self._prefill:
            put_this_thread_first()
        try:
            while worker.step():
                pass
        except BaseException as error:
            self._mail.close(error)
            raise
        finally:
            worker.end()

    def _tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        check_prompt(tokens, self.n_vocab, self.n_ctx)
        return tokens

    def _eog_tokens(self, request: Request) -> list[int]:
        if not request.sampling.ignore_eos:
            return []
        if self._eog is None:
            self._eog = [t for t in range(self.n_vocab) if C.llama_vocab_is_eog(self._vocab, t)]
        return self._eog

    def _free(self) -> None:
        for context in self._contexts:
            context.free_batch()
        for ctx in self._decode_ctxs:
            C.llama_free(ctx)
        self._models.free()
