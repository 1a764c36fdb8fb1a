"""The engine's options, once: fields, defaults, ranges and help. What the model itself takes are Llama's options."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..errors import OptionError
from ..machine import default_threads
from ..option_fields import check, choice, number

# On the CPU llama.cpp's flash attention looks at a sequence's own cells only, its plain attention at those of all sequences, but
# at each of them about 3 times as fast for a single token. Prompts gain by it in any case (a third at 4096 tokens).
_FLASH_FROM = 4
# A step's least share of a prompt. llama.cpp's flash attention on the CPU takes up to 63 rows one by one, and more in tiles: a
# chunk of 16 beside 8 sequences took 428 ms at 1536 tokens, one of 64 took 336.
_CHUNK, _CHUNK_FLASH = 16, 64


@dataclass(frozen=True)
class Threads:
    """How the cores are shared. Two teams on the same cores wait for each other's threads at every operation."""

    alone: int
    decode: int  # while both workers compute
    prefill: int


@dataclass(frozen=True)
class EngineOptions:
    """Sizes are tokens unless the name says otherwise."""

    n_ctx: int = number(8192, 16, "tokens that all sequences together hold, and the longest one")
    n_parallel: int = number(8, 1, "sequences that are computed at a time")
    n_kept: int = number(8, 0, "finished sequences whose prefix later prompts can reuse; 0: none")
    kept_mib: float = number(1024, 0, "memory that finished sequences may hold; it is given up when live ones need it")
    store_mib: float = number(4096, 0, "host memory for finished sequences that the context has no cells for; 0: none")
    n_batch: int = number(512, 8, "most tokens of one decode step")
    min_chunk: int = number(
        0,
        0,
        "a prompt gets at least so many tokens per step, whatever tpot_ms says; 0: 16, with flash attention on the CPU 64",
    )
    prefill_from: int = number(2048, 2, "prompts with at least so many new tokens go to the prefill worker")
    prefill_batch: int = number(0, 0, "tokens per pass of the prefill worker; 0: what suits the devices")
    piece_tokens: int = number(512, 1, "a finished prompt moves to the decode worker in pieces of so many")
    pieces_ahead: int = number(8, 1, "pieces that may wait in memory")
    queue: int = number(64, 1, "requests that may wait; one more is EngineBusy")
    default_max_tokens: int = number(1024, 1, "of a request that names no max_tokens")
    ttft_s: float = number(30, 0.001, "service level: time to the first token")
    tpot_ms: float = number(50, 0.001, "service level: time per later token")
    n_threads: int = number(0, 0, "threads of a worker that computes alone; 0: one per core")
    n_threads_decode: int = number(0, 0, "of these, the decode worker's while both compute; 0: measured, half at first")

    flash_attn: str = choice(
        "auto",
        ("auto", "on", "off"),
        "flash attention; auto: where a GPU computes attention, and on the CPU from n_parallel 4 on",
    )
    dual_batch: str = choice(
        "auto",
        ("auto", "on", "off"),
        "two batches in alternation, one's attention on a GPU beside the other's experts; auto: where it measured faster",
    )

    split_gpus: str = choice(
        "auto",
        ("auto", "on", "off"),
        "with two GPUs the model is loaded twice, one for long prompts and one for decode, over one copy of the experts; auto: "
        "where both have room for the rest of it",
    )

    def __post_init__(self) -> None:
        check(self)
        least = self.min_chunk or 1
        if self.n_batch < self.n_parallel + least:
            raise OptionError(
                f"n_batch={self.n_batch} is less than n_parallel={self.n_parallel} + min_chunk={least}: a step has a "
                "token of every sequence and a piece of a prompt"
            )
        if self.dual_batch == "on" and self.n_parallel < 2:
            raise OptionError(
                f"dual_batch='on' with n_parallel={self.n_parallel}: it divides the running sequences between two batches, give "
                "n_parallel from 2 on"
            )

    def resolved(self, attention_on_gpu: bool) -> EngineOptions:
        """With what depends on where attention is computed."""
        if self.min_chunk:
            return self
        least = _CHUNK if attention_on_gpu or not self.wants_flash else _CHUNK_FLASH
        return replace(self, min_chunk=max(1, min(least, self.n_batch - self.n_parallel)))

    @property
    def wants_flash(self) -> bool:
        """`flash_attn` on a host whose CPU computes attention."""
        return self.flash_attn == "on" or (self.flash_attn == "auto" and self.n_parallel >= _FLASH_FROM)

    def threads(self) -> Threads:
        alone = self.n_threads or default_threads()
        decode = min(self.n_threads_decode or alone // 2, alone - 1)
        return Threads(alone, max(1, decode), max(1, alone - max(1, decode)))

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]
