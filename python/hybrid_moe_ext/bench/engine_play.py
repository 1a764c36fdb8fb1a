"""Plays a load: sends every request when it is due, whatever became of those before, and notes when its tokens come. One
asyncio loop and no thread per request: the client must not be what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from ..engine import Engine, Request, Sampling
from ..errors import EngineError
from .engine_figures import Served
from .engine_load import Arrival

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
# Sends one request and fills what it gets back into the Served; the clock tells seconds since the round's start.
Send = Callable[[Arrival, Served, Clock], Awaitable[None]]


def play(
    load: Sequence[Arrival], send: Send, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep
) -> list[Served]:
    """All of it, by the time when it is due. A request that fails has an `error`; the others go on."""
    return asyncio.run(_play(load, send, clock, sleep))


async def _play(load: Sequence[Arrival], send: Send, clock: Clock, sleep: Sleep) -> list[Served]:
    began = clock()

    def now() -> float:
        return clock() - began

    async def one(arrival: Arrival, served: Served) -> None:
        served.sent_s = now()
        try:
            await send(arrival, served, now)
        except (EngineError, OSError, EOFError, ValueError) as error:
            served.error = served.error or f"{type(error).__name__}: {error}"

    told, tasks = [], []
    for arrival in sorted(load, key=lambda a: a.at_s):
        while (wait := arrival.at_s - now()) > 0:
            await sleep(wait)
        told.append(Served(arrival.at_s, n_prompt=len(arrival.tokens)))
        tasks.append(asyncio.ensure_future(one(arrival, told[-1])))
    await asyncio.gather(*tasks)
    return told


def to_engine(engine: Engine) -> Send:
    """Straight to an engine of this process, as a server of it would."""

    async def send(arrival: Arrival, served: Served, now: Clock) -> None:
        sampling = Sampling(temperature=0, ignore_eos=True)
        stream = engine.submit(Request(arrival.tokens, max_tokens=arrival.max_tokens, sampling=sampling))
        async for event in stream:
            if event.token is not None:
                served.token_s.append(now())
        assert stream.finish is not None
        m = stream.finish.metrics
        served.n_generated, served.n_reused, served.queue_s, served.via = m.n_generated, m.n_reused, m.queue_s, m.via

    return send
