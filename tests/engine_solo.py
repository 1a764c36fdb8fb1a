"""What engine tests share: models, the reference (a plain Llama that serves one request), and a watchdog. No tests."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as C
import numpy as np

import models
from conftest import DEMO
from hybrid_moe_ext import Llama
from hybrid_moe_ext.engine import Engine, Request, Result, Sampling, Stream
from tiny_families import tiny, write_model

# Latent attention (FP8 experts), attention, attention with sliding windows, recurrent.
MODELS = ["demo", "qwen3-30b", "gpt-oss-120b", "mamba"]
GREEDY = Sampling(temperature=0)
# Seconds after which a test that has not ended is taken for a deadlock. Generous: nothing here measures time.
DEADLOCK_S = 300
# Keys and values as F32 and dense weights too: then the batch around a sequence moves its logits by 1e-5 at most.
EXACT = {"type_k": models.GGML_F32, "type_v": models.GGML_F32, "verbose": False}
# Two tokens whose logits are closer may change places.
TIE = 2e-3


@cache
def model(name: str) -> tuple[str, dict]:
    """A path, and the options that make it exact."""
    if name == "demo":
        return str(DEMO), EXACT | {"dense_type": "f32"}
    if name == "fp8":
        return str(models.fp8_directory()), EXACT | {"dense_type": "f32"}
    path = models.FOLDER / f"engine-{name}.gguf"
    if name == "mamba":
        _write_mamba(path)
    else:
        write_model(path, tiny(name))
    return str(path), dict(EXACT)


def engine(name: str = "demo", **options: object) -> Engine:
    path, exact = model(name)
    small = {"n_ctx": 512, "n_batch": 48, "n_parallel": 4, "n_threads": 1, "queue": 1000}
    # No service level in the way: what is computed beside what shall not depend on this machine's speed.
    lenient = {"tpot_ms": 1e6, "ttft_s": 1e6}
    # Flash attention on the CPU rounds by how many rows come at once, up to 5e-3 of a logit: enough to flip a router.
    small["flash_attn"] = "off"
    return Engine(path, **{**exact, **small, **lenient, "prefill_from": 64, "piece_tokens": 16, **options})


@cache
def _plain(name: str) -> Llama:
    path, exact = model(name)
    return Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=True, **exact)


@cache
def _ends(name: str) -> list[int]:
    vocab = C.llama_model_get_vocab(_plain(name).model)
    return [t for t in range(C.llama_vocab_n_tokens(vocab)) if C.llama_vocab_is_eog(vocab, t)]


@cache
def solo(name: str, prompt: tuple[int, ...], n: int) -> tuple[list[int], list[float]]:
    """The greedy continuation without ends of text, and by how much each token won."""
    llm = _plain(name)
    llm.reset()
    tokens, margins = [], []
    feed = list(prompt)
    for _ in range(n):
        llm.eval(feed)
        row = llm.scores[llm.n_tokens - 1].copy()
        row[_ends(name)] = -np.inf
        second, first = np.partition(row, -2)[-2:]
        tokens.append(int(np.argmax(row)))
        margins.append(float(first - second))
        feed = [tokens[-1]]
    return tokens, margins


def solo_logprobs(name: str, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """[len(tokens)], of these tokens after the prompt, computed alone in one piece."""
    llm = _plain(name)
    llm.reset()
    llm.eval([*prompt, *tokens[:-1]])
    rows = llm.scores[len(prompt) - 1 : llm.n_tokens].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows[np.arange(len(tokens)), tokens] - np.log(np.exp(rows).sum(axis=1))


def assert_solo(name: str, prompt: list[int], tokens: list[int], is_whole: int | None = None) -> int:
    """The tokens are those of the request alone, up to a tie. Returns how many were compared."""
    if is_whole is not None:
        assert len(tokens) == is_whole
    expected, margins = solo(name, tuple(prompt), min(max(32, len(tokens)), 512 - len(prompt)))
    for i, (token, wanted, margin) in enumerate(zip(tokens, expected, margins, strict=False)):
        if token != wanted:
            assert margin < TIE, f"token {i} is {token}, alone it is {wanted}, by {margin}"
            return i
    return len(tokens)


def greedy(prompt: list[int], n: int = 24, **more: object) -> Request:
    return Request(prompt, max_tokens=n, sampling=Sampling(temperature=0, ignore_eos=True), **more)


def prompt(n: int, seed: int = 0, n_vocab: int = 60) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, n_vocab, n)]


def result(stream: Stream) -> Result:
    return stream.result(DEADLOCK_S)


@contextlib.contextmanager
def watchdog() -> Iterator[None]:
    """Raises in the main thread, wherever it waits, with what the other threads do."""

    def bark(*_: object) -> None:
        stacks = []
        for thread in threading.enumerate():
            frame = sys._current_frames().get(thread.ident)
            stacks.append(f"{thread.name}:\n{''.join(traceback.format_stack(frame)[-4:])}")
        raise TimeoutError("deadlock?\n" + "\n".join(stacks))

    previous = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, DEADLOCK_S, DEADLOCK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class Gate:
    """Holds the decode worker after a step, so that a test decides what comes before the next one."""

    def __init__(self) -> None:
        self.reports: list = []
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Semaphore(0)
        self._next = threading.Semaphore(0)

    def __call__(self, report: object) -> None:
        self.reports.append(report)
        if not self._open.is_set():
            self._held.release()
            assert self._next.acquire(timeout=DEADLOCK_S)

    def shut(self) -> None:
        while self._next.acquire(blocking=False):
            pass
        self._open.clear()

    def wait_until_held(self) -> None:
        assert self._held.acquire(timeout=DEADLOCK_S)

    def step(self) -> None:
        """One more, and holds again."""
        self._next.release()
        self.wait_until_held()

    def open(self) -> None:
        self._open.set()
        self._next.release()


def assert_nothing_leaked(engine: Engine) -> None:
    """When all is done: no cells but those of kept sequences, in our count and in llama.cpp's."""
    assert engine.drain(DEADLOCK_S)
    engine.close_threads()
    for worker in engine._workers:
        cache, ctx = worker._cache, worker._context.ctx
        assert worker._running == [] and cache.live == []
        kept = {s.id: s for s in cache.kept}
        for seq in range(C.llama_n_seq_max(ctx)):
            last = C.llama_memory_seq_pos_max(C.llama_get_memory(ctx), seq)
            assert last == (kept[seq].n - 1 if seq in kept else -1), f"sequence {seq}"
        assert len(cache._ids) + len(kept) == engine.options.n_parallel + engine.options.n_kept
        held = np.unique(np.concatenate([s.cells for s in cache.kept])) if cache.kept else []
        assert cache.cells.n - cache.cells.n_free == len(held)
    assert all(entry.n_pins == 0 for entry in engine._store._entries)
    assert engine._store.n_bytes == sum(entry.n_bytes for entry in engine._store._entries) <= engine._store.limit_bytes
    assert not engine._mail.jobs and not engine._mail.pieces and not engine._mail.waiting


def _write_mamba(path: Path) -> None:
    """A random recurrent model: its memory knows the state after the last token only."""
    n_embd, d_inner, d_state, d_conv, rank, n_layer, n_vocab = 64, 128, 16, 4, 8, 2, 64
    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(path, "mamba")
    w.add_vocab_size(n_vocab)
    w.add_tokenizer_model("no_vocab")
    w.add_context_length(256)
    w.add_block_count(n_layer)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_ssm_conv_kernel(d_conv)
    w.add_ssm_inner_size(d_inner)
    w.add_ssm_state_size(d_state)
    w.add_ssm_time_step_rank(rank)

    def add(name: str, *shape: int, scale: float = 0.2, mean: float = 0.0) -> None:
        w.add_tensor(name, (rng.standard_normal(shape) * scale + mean).astype(np.float32))

    add("token_embd.weight", n_vocab, n_embd, scale=1.0)
    add("output_norm.weight", n_embd, scale=0.0, mean=1.0)
    add("output.weight", n_vocab, n_embd)
    for i in range(n_layer):
        b = f"blk.{i}."
        add(b + "attn_norm.weight", n_embd, scale=0.0, mean=1.0)
        add(b + "ssm_in.weight", 2 * d_inner, n_embd)
        add(b + "ssm_conv1d.weight", d_inner, d_conv, scale=0.5)
        add(b + "ssm_conv1d.bias", d_inner)
        add(b + "ssm_x.weight", rank + 2 * d_state, d_inner)
        add(b + "ssm_dt.weight", d_inner, rank)
        add(b + "ssm_dt.bias", d_inner)
        w.add_tensor(b + "ssm_a", -np.exp(rng.standard_normal((d_inner, d_state)) * 0.5).astype(np.float32))
        add(b + "ssm_d", d_inner, scale=0.1, mean=1.0)
        add(b + "ssm_out.weight", n_embd, d_inner)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
