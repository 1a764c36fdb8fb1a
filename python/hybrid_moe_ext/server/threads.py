"""What threads do with the engine for a request: templates, tokenizing, grammars. The engine's end waits for it, since the model
must not go while it is read; a client that leaves ends the request's task, but no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from ..errors import EngineClosed

Result = TypeVar("Result")


class Threads:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n = 0
        self._closing = False

    async def run(self, work: Callable[[], Result]) -> Result:
        """Raises EngineClosed once close() was called."""
        return await run_in_threadpool(self._counted, work)

    def check_open(self) -> None:
        """For long work, now and then."""
        if self._closing:
            raise EngineClosed("the engine is closed: start another one")

    def close(self) -> None:
        """Waits for what runs."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: self._n == 0)

    def _counted(self, work: Callable[[], Result]) -> Result:
        with self._changed:
            self.check_open()
            self._n += 1
        try:
            return work()
        finally:
            with self._changed:
                self._n -= 1
                self._changed.notify_all()
