"""One request through the engine: as a whole answer or as a stream, ended in the engine as soon as its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response

from ..engine import Finish, Stream, Token
from .answers import Shape
from .replies import ApiError, Json, of_error, timed_out

SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
Done = Callable[[Finish], None]


class UntilGone(Response):
    """Everything after submit() happens in __call__, so that there is no way out that leaves work in the engine."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._cancel()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _work(self, scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    def _cancel(self) -> None:
        """What still runs."""
        raise NotImplementedError


class Answer(UntilGone):
    """Of the tokens of a stream."""

    def __init__(self, stream: Stream, shape: Shape, done: Done):
        super().__init__()
        self._stream = stream
        self._shape = shape
        self._done = done

    def _cancel(self) -> None:
        if not self._stream.is_done:
            self._stream.cancel()

    def _end(self) -> Finish:
        """How it ended. Raises ApiError when that is no answer."""
        finish = self._stream.finish
        assert finish is not None
        self._done(finish)
        if finish.reason == "deadline":
            raise timed_out()
        if finish.reason not in ("stop", "length"):
            raise ApiError(500, f"the request was {finish.reason}", finish.reason)
        return finish


class WholeAnswer(Answer):
    async def _work(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            events = [event async for event in self._stream]
            finish = self._end()
            reply: Response = Json(self._shape.whole(events, finish))
        except Exception as error:
            reply = told(error).response()
        await reply(scope, receive, send)


class StreamedAnswer(Answer):
    def __init__(self, stream: Stream, shape: Shape, done: Done, include_usage: bool, ping_s: float):
        super().__init__(stream, shape, done)
        self._include_usage = include_usage
        self._ping_s = ping_s

    async def _work(self, scope: Any, receive: Any, send: Any) -> None:
        async def say(data: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        try:
            async for data in self._chunks():
                await say(data)
            await say("data: [DONE]\n\n", more=False)
        except Exception as error:  # the status is sent already
            await say(_event(told(error).body), more=False)

    async def _chunks(self) -> AsyncIterator[str]:
        if (first := self._shape.first()) is not None:
            yield self._event(first)
        async with contextlib.aclosing(_with_pings(self._stream, self._ping_s)) as events:
            async for event in events:
                if event is None:
                    yield ": still working\n\n"
                else:
                    for chunk in self._shape.chunks(event):
                        yield self._event(chunk)
        finish = self._end()
        for chunk in self._shape.last(finish):
            yield self._event(chunk)
        if self._include_usage:
            yield _event(self._shape.usage_chunk(finish))

    def _event(self, chunk: dict[str, Any]) -> str:
        return _event(chunk | {"usage": None} if self._include_usage else chunk)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _with_pings(stream: Stream, ping_s: float) -> AsyncGenerator[Token | None, None]:
    """Its events, and None whenever none came for `ping_s`."""
    events = stream.__aiter__()
    while True:
        following: asyncio.Future[Token] = asyncio.ensure_future(_next(events))
        try:
            while not (await asyncio.wait({following}, timeout=ping_s))[0]:
                yield None
            yield following.result()
        except _Ended:
            return
        finally:
            following.cancel()


class _Ended(Exception):
    """StopAsyncIteration cannot leave a task."""


async def _next(events: AsyncIterator[Token]) -> Token:
    try:
        return await events.__anext__()
    except StopAsyncIteration:
        raise _Ended from None


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def told(error: Exception) -> ApiError:
    """What the client is told; the log has more when it is our fault."""
    known = of_error(error)
    if known.status == 500:
        logging.getLogger("hybrid_moe_ext.server").error("a request failed", exc_info=error)
    return known
