"""The requests that run, and how far each is: its answer by its stream, its prompt by what the engine tells of its steps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ..engine import StepReport, Stream


@dataclass
class _Seen:
    stream: Stream
    n_prompt: int
    max_tokens: int
    began: float = field(default_factory=time.monotonic)
    n_read: int = 0  # of its prompt, by the decode workers since it is seen here
    in_prefill: bool = False

    def told(self, now: float) -> dict[str, Any]:
        first_at, n_generated = self.stream.first_at, self.stream.n_tokens
        writing = first_at is not None
        reading = "prefill" if self.in_prefill else "prompt" if self.n_read else "waiting"
        seconds = now - first_at if first_at is not None else 0.0
        return {
            "id": self.stream.id,
            "state": "writing" if writing else reading,
            "prompt_tokens": self.n_prompt,
            "prompt_done": self.n_prompt if writing else min(self.n_read, self.n_prompt),
            "generated_tokens": n_generated,
            "max_tokens": self.max_tokens,
            "seconds": round(now - self.began, 3),
            "ttft_s": round(max(0.0, first_at - self.began), 3) if first_at is not None else None,
            "tokens_per_s": round((n_generated - 1) / seconds, 2) if n_generated > 1 and seconds > 0 else None,
        }


class Requests:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, _Seen] = {}

    def add(self, stream: Stream, n_prompt: int, max_tokens: int) -> None:
        with self._lock:
            self._seen = {i: seen for i, seen in self._seen.items() if not seen.stream.is_done}
            if not stream.is_done:
                self._seen[stream.id] = _Seen(stream, n_prompt, max_tokens)

    def on_step(self, report: StepReport) -> None:
        """On a decode worker's thread."""
        with self._lock:
            for i, n in report.chunks:
                if (seen := self._seen.get(i)) is not None:
                    seen.n_read += n
            for i in report.prefilling:
                if (seen := self._seen.get(i)) is not None:
                    seen.in_prefill = True

    def told(self) -> list[dict[str, Any]]:
        """In the order in which they came."""
        now = time.monotonic()
        with self._lock:
            return [seen.told(now) for seen in self._seen.values() if not seen.stream.is_done]
