"""uvicorn around the application: sockets, slow clients, and the end at SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import OptionError
from .options import ServerOptions


def bind(host: str, port: int) -> socket.socket:
    """Before the model is loaded, so that a port that is taken is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"cannot listen on {host}: {error.strerror}: give another --host") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OptionError(
            f"cannot listen on {host}, port {port}: {error.strerror}: give another --host or --port"
        ) from error
    return bound


class Server(uvicorn.Server):
    """`serve(bound)` returns after SIGTERM or SIGINT: no new connections, running requests end, at most `drain_s` long."""

    def __init__(self, app: FastAPI, options: ServerOptions, on_ready: Callable[[], None] = lambda: None):
        protocol = type("Protocol", (_PromptProtocol,), {"headers_s": options.body_timeout_s})
        config = uvicorn.Config(
            app, http=protocol, ws="none", log_level="warning", access_log=False, server_header=False, lifespan="on",
            h11_max_incomplete_event_size=64 * 1024,
        )  # fmt: skip
        config.timeout_graceful_shutdown = options.drain_s  # type: ignore[assignment]  # parts of a second work too
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def run_on(self, bound: socket.socket) -> None:
        """In the main thread, signals included."""
        with contextlib.suppress(ValueError):  # another thread's server has no signals
            # uvicorn sends itself the signal again when all is done; a drained server is no killed one.
            signal.signal(signal.SIGTERM, lambda *_: None)
        with bound:
            self.run(sockets=[bound])


class _PromptProtocol(H11Protocol):
    """A client that sends its headers too slowly is hung up on; uvicorn waits for ever."""

    headers_s = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """From the moment on at which a request's headers are due; what trickles in does not start it again."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.headers_s, self._hang_up)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()
