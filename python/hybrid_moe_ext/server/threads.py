"""What threads do with the engine for a request: templates, tokenizing, grammars. The engine's end waits for it, since the model
must not go while it is read; a client that leaves ends the request's task, but no thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from ..engine.users import Users

Result = TypeVar("Result")


class Threads(Users):
    async def run(self, work: Callable[[], Result]) -> Result:
        """Raises EngineClosed once close() was called."""

        def counted() -> Result:
            with self:
                return work()

        return await run_in_threadpool(counted)
