"""What a caller gets back: tokens as they are made, from any thread or in asyncio, then how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from .metrics import RequestMetrics


@dataclass(frozen=True)
class Token:
    """One event. `text` may be empty (a part of a character, or of a stop string that may yet come)."""

    token: int | None  # None: only text that was held back until the end
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, log probability), likeliest first
    control: str = ""  # of a control token, its own text, which comes after `text`; only where the request asks for it


@dataclass(frozen=True)
class Finish:
    """`reason`: "stop" (end of text, or the stop string `stop`), "length", "cancelled" or "deadline"."""

    reason: str
    stop: str | None
    metrics: RequestMetrics


@dataclass(frozen=True)
class Result:
    """A whole stream."""

    text: str
    tokens: list[int]
    events: list[Token] = field(repr=False)
    finish: Finish


class Stream:
    """Iterate (or `async for`) over its Token events; then `finish` is there. One consumer. `with` cancels on the way out.

    Iteration raises an EngineError when the request failed; a cancelled one just ends.
    """

    def __init__(self, id: int, wake: Callable[[], None]):
        self.id = id
        self.cancelled = False
        self.finish: Finish | None = None
        self.n_tokens = 0  # so far, whether they were taken or not
        self.first_at: float | None = None  # time.monotonic() of the first
        self._error: BaseException | None = None
        self._wake = wake
        self._events: deque[Token] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # --- the consumer's side

    def cancel(self) -> None:
        """At any time, from any thread; the sequence is freed at the engine's next step."""
        self.cancelled = True
        self._wake()

    @property
    def is_done(self) -> bool:
        return self.finish is not None or self._error is not None

    def next(self, timeout_s: float | None = None) -> Token | None:
        """The next event, None at the end. Raises TimeoutError when none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._events or self.is_done, timeout_s):
                raise TimeoutError(f"request {self.id}: no token within {timeout_s} s")
            return self._take()

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the end. Raises TimeoutError after `timeout_s` in all, and goes on in the engine."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        events = []
        while (event := self.next(None if end is None else max(0.0, end - time.monotonic()))) is not None:
            events.append(event)
        return self._result(events)

    def __iter__(self) -> Iterator[Token]:
        while (event := self.next()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[Token]:
        while (event := await self._next_async()) is not None:
            yield event

    def __await__(self) -> Generator[Any, None, Result]:
        async def collect() -> Result:
            return self._result([event async for event in self])

        return collect().__await__()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_done:
            self.cancel()

    async def _next_async(self) -> Token | None:
        while True:
            with self._changed:
                if self._events or self.is_done:
                    return self._take()
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def _take(self) -> Token | None:
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            # Its twin: the kept one would hold the frames of all who were told, and they hold the stream.
            raise type(self._error)(*self._error.args) from self._error.__cause__
        return None

    def _result(self, events: list[Token]) -> Result:
        assert self.finish is not None
        tokens = [event.token for event in events if event.token is not None]
        return Result("".join(event.text for event in events), tokens, events, self.finish)

    # --- the engine's side

    def put(self, event: Token) -> None:
        with self._changed:
            if event.token is not None:
                self.n_tokens += 1
                self.first_at = self.first_at or time.monotonic()
            self._events.append(event)
            self._notify()

    def end(self, finish: Finish) -> None:
        with self._changed:
            if not self.is_done:
                self.finish = finish
            self._notify()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if not self.is_done:
                self._error = error
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._waiter is not None:
            loop, future = self._waiter
            self._waiter = None
            with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
                loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # a cancelled one is
        future.set_result(None)
