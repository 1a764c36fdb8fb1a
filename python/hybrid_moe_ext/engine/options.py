"""The engine's options, once: fields, defaults, ranges and help. What the model itself takes are Llama's options."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import OptionError
from ..machine import default_threads


def _number(default: float, least: float, help: str) -> Any:
    return field(default=default, metadata={"least": least, "help": help})


def _choice(default: str, choices: tuple[str, ...], help: str) -> Any:
    return field(default=default, metadata={"choices": choices, "help": help})


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

    n_ctx: int = _number(8192, 16, "tokens that all sequences together hold, and the longest one")
    n_parallel: int = _number(8, 1, "sequences that are computed at a time")
    n_kept: int = _number(8, 0, "finished sequences whose prefix later prompts can reuse; 0: none")
    kept_mib: float = _number(1024, 0, "memory that finished sequences may hold; it is given up when live ones need it")
    store_mib: float = _number(4096, 0, "host memory for finished sequences that the context has no cells for; 0: none")
    n_batch: int = _number(512, 8, "most tokens of one decode step")
    min_chunk: int = _number(
        0,
        0,
        "a prompt gets at least so many tokens per step, whatever tpot_ms says; 0: 16, with flash attention on the CPU 64",
    )
    prefill_from: int = _number(2048, 2, "prompts with at least so many new tokens go to the prefill worker")
    prefill_batch: int = _number(0, 0, "tokens per pass of the prefill worker; 0: what suits the devices")
    piece_tokens: int = _number(512, 1, "a finished prompt moves to the decode worker in pieces of so many")
    pieces_ahead: int = _number(8, 1, "pieces that may wait in memory")
    queue: int = _number(64, 1, "requests that may wait; one more is EngineBusy")
    default_max_tokens: int = _number(1024, 1, "of a request that names no max_tokens")
    ttft_s: float = _number(30, 0.001, "service level: time to the first token")
    tpot_ms: float = _number(50, 0.001, "service level: time per later token")
    n_threads: int = _number(0, 0, "threads of a worker that computes alone; 0: one per core")
    n_threads_decode: int = _number(
        0, 0, "of these, the decode worker's while both compute; 0: measured, half at first"
    )

    flash_attn: str = _choice(
        "auto",
        ("auto", "on", "off"),
        "flash attention; auto: where a GPU computes attention, and on the CPU from n_parallel 4 on",
    )
    dual_batch: str = _choice(
        "auto",
        ("auto", "on", "off"),
        "two batches in alternation, one's attention on a GPU beside the other's experts; auto: where it measured faster",
    )

    split_gpus: str = _choice(
        "auto",
        ("auto", "on", "off"),
        "with two GPUs the model is loaded twice, one for long prompts and one for decode, over one copy of the experts; auto: "
        "where both have room for the rest of it",
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            if "choices" in f.metadata:
                self._check_choice(f.name, f.metadata["choices"])
                continue
            value, least = getattr(self, f.name), f.metadata["least"]
            is_number = isinstance(value, int) or (f.type == "float" and isinstance(value, float))
            if not is_number or isinstance(value, bool) or not least <= value < 1e9:
                kind = "a number" if f.type == "float" else "an integer"
                raise OptionError(
                    f"{f.name}={value!r} is not possible: give {kind} from {least} on ({f.metadata['help']})"
                )
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

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise OptionError(f"{name}={getattr(self, name)!r} is not possible: choose one of {', '.join(choices)}")

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
