"""The load of the engine benchmark: when which prompt comes and how many tokens it wants. From chance, or from a trace file; a
round plays it as it is. Driving engines with it is engine_play.py's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError

MOST_REQUESTS = 100_000
SHARED = 32  # tokens: prompts that begin alike for so long are meant to share them
_CLASS = re.compile(r"(\d+)(?:-(\d+))?:(\d+)(?:-(\d+))?(?:@([\d.]+))?")
_KEYS = {"at_s", "prompt_tokens", "prompt", "max_tokens"}


@dataclass(frozen=True)
class Kind:
    """One sort of request: tokens from..to, both included, and how often it comes in proportion to the others."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    weight: float


@dataclass(frozen=True)
class Entry:
    """A request before anything is loaded. `prompt`: token ids, text, or a number of tokens that are drawn at random."""

    at_s: float
    prompt: tuple[int, ...] | str | int
    max_tokens: int


@dataclass(frozen=True)
class Arrival:
    """A request as it is sent: `at_s` seconds after the start of the round."""

    at_s: float
    tokens: tuple[int, ...]
    max_tokens: int


def kinds(text: str) -> list[Kind]:
    """`100-400:64-128@9,8000:16` -> nine of ten have 100 to 400 tokens and want 64 to 128. Raises OptionError."""
    found = []
    for part in text.split(","):
        match = _CLASS.fullmatch(part.strip())
        if not match:
            raise OptionError(
                f"--mix {text!r}: {part.strip()!r} is not PROMPT:OUTPUT or PROMPT:OUTPUT@WEIGHT, with a number of tokens or "
                "FROM-TO for each, as in 100-400:64@9,8000:16"
            )
        p, p_to, o, o_to, weight = match.groups()
        kind = Kind((int(p), int(p_to or p)), (int(o), int(o_to or o)), float(weight or 1))
        for what, (low, high) in (("prompt", kind.prompt), ("output", kind.output)):
            if not 1 <= low <= high:
                raise OptionError(
                    f"--mix {text!r}: {what} of {low} to {high} tokens: give from 1 on, the smaller first"
                )
        if not 0 < kind.weight < 1e6:
            raise OptionError(f"--mix {text!r}: weight {weight}: give a number above 0")
        found.append(kind)
    return found


def poisson(n: int, rate: float, mix: Sequence[Kind], seed: int) -> list[Entry]:
    """`n` requests, `rate` per second on average with independent gaps; rate inf: all at once. The same for the same seed."""
    if not 1 <= n <= MOST_REQUESTS:
        raise OptionError(f"--requests {n}: give from 1 to {MOST_REQUESTS}")
    if math.isnan(rate) or rate <= 0:
        raise OptionError(f"--rate {rate}: give requests per second, above 0; inf sends all at once")
    rng = np.random.default_rng(seed)
    gaps = np.zeros(n) if math.isinf(rate) else rng.exponential(1 / rate, n)
    times = np.cumsum(gaps) - gaps[0]  # the first comes at once
    weights = np.array([kind.weight for kind in mix])
    chosen = rng.choice(len(mix), n, p=weights / weights.sum())
    return [
        Entry(round(float(at), 6), _drawn(rng, mix[i].prompt), _drawn(rng, mix[i].output))
        for at, i in zip(times, chosen, strict=True)
    ]


def _drawn(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def read_trace(path: Path) -> list[Entry]:
    """By time. Raises OptionError with the file, the line and the rule."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(f"--trace {path} cannot be read ({reason}): give a JSONL file, a request per line") from error
    entries = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            entries.append(_entry(line, f"--trace {path}, line {i}"))
    if not entries:
        raise OptionError(f"--trace {path} has no requests: give a line such as "
                          '{"at_s": 0, "prompt_tokens": 512, "max_tokens": 64}')  # fmt: skip
    if len(entries) > MOST_REQUESTS:
        raise OptionError(f"--trace {path} has {len(entries)} requests: give at most {MOST_REQUESTS}")
    return sorted(entries, key=lambda e: e.at_s)


def _entry(line: str, where: str) -> Entry:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where} is no JSON ({error}): give one object per line") from error
    if not isinstance(told, dict):
        raise OptionError(
            f"{where} is a {type(told).__name__}: give an object with at_s, max_tokens and prompt_tokens or prompt"
        )
    if unknown := sorted(set(told) - _KEYS):
        raise OptionError(f"{where}: unknown key {unknown[0]!r}: there are at_s, max_tokens, prompt_tokens and prompt")
    if ("prompt" in told) == ("prompt_tokens" in told):
        raise OptionError(f"{where}: give either prompt (token ids, or text) or prompt_tokens (how many)")
    at = told.get("at_s")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e7:
        raise OptionError(f"{where}: at_s is {at!r}: give seconds after the start, 0 or more")
    max_tokens = _count(told.get("max_tokens"), f"{where}: max_tokens")
    if "prompt_tokens" in told:
        return Entry(float(at), _count(told["prompt_tokens"], f"{where}: prompt_tokens"), max_tokens)
    prompt = told["prompt"]
    if isinstance(prompt, str) and prompt:
        return Entry(float(at), prompt, max_tokens)
    is_ids = isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < 2**31 for t in prompt)
    if not is_ids:
        raise OptionError(f"{where}: prompt is {str(prompt)[:60]!r}: give a text or a list of token ids, not empty")
    return Entry(float(at), tuple(prompt), max_tokens)


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise OptionError(f"{what} is {value!r}: give a whole number of tokens, 1 or more")
    return value


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    """With every token, so that another machine plays the same."""
    lines = [{"at_s": a.at_s, "prompt": list(a.tokens), "max_tokens": a.max_tokens} for a in arrivals]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def write_entries(path: Path, entries: Sequence[Entry]) -> None:
    """As a trace that still wants tokens."""
    lines: list[dict[str, object]] = []
    for e in entries:
        prompt = {"prompt_tokens": e.prompt} if isinstance(e.prompt, int) else {"prompt": e.prompt}
        lines.append({"at_s": e.at_s, **prompt, "max_tokens": e.max_tokens})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def arrivals(
    entries: Sequence[Entry], ordinary: Sequence[int], tokenize: Callable[[str], list[int]], n_vocab: int, n_ctx: int, seed: int
) -> list[Arrival]:  # fmt: skip
    """`ordinary`: the ids that random prompts are drawn from. Raises OptionError for what no engine could serve."""
    rng = np.random.default_rng(seed)
    found = []
    for i, e in enumerate(entries, 1):
        if isinstance(e.prompt, int):
            tokens = [int(t) for t in rng.choice(ordinary, e.prompt)]
        else:
            tokens = tokenize(e.prompt) if isinstance(e.prompt, str) else list(e.prompt)
        if len(tokens) + e.max_tokens > n_ctx:
            raise OptionError(
                f"request {i} has {len(tokens)} + {e.max_tokens} tokens, the context holds {n_ctx}: ask for more with --ctx"
            )
        if max(tokens) >= n_vocab:
            raise OptionError(
                f"request {i} has token {max(tokens)}, the model has {n_vocab}: the trace is another model's"
            )
        found.append(Arrival(e.at_s, tuple(tokens), e.max_tokens))
    return found


def share_prefixes(load: Sequence[Arrival]) -> bool:
    """Whether some prompts begin alike: only then may an engine reuse what it has computed."""
    beginnings = [a.tokens[:SHARED] for a in load if len(a.tokens) >= SHARED]
    return len(set(beginnings)) < len(beginnings)
