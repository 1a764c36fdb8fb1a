"""Who reads the model outside of the workers: callers that tokenize or submit. The engine's end waits for them."""

from __future__ import annotations

import threading

from ..errors import EngineClosed


class Users:
    """`with users:` the model stays; it raises EngineClosed once close() was called. For any thread, and inside itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n = 0
        self._is_closed = False

    def __enter__(self) -> None:
        with self._changed:
            self.check_open()
            self._n += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._n -= 1
            self._changed.notify_all()

    def check_open(self) -> None:
        """For long work inside, now and then."""
        if self._is_closed:
            raise EngineClosed("the engine is closed: start another one")

    def close(self) -> None:
        """Waits for those there are."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._n == 0)
