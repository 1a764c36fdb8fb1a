"""What stands before every route, as ASGI middleware: host allow-list, API key, content type, length and speed of bodies."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..errors import EngineClosed
from .options import ServerOptions
from .replies import NO_RETRY, ApiError, of_error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health")  # without a key, as is what lies under /static/


class ClientGone(Exception):
    """The client left before its request was complete."""


class Guard:
    def __init__(self, app: App, options: ServerOptions):
        self._app = app
        self._options = options

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            if scope["method"] in {"POST", "PUT", "PATCH"}:
                receive = await self._whole_body(headers, receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        except ClientGone:
            return
        await self._run(scope, receive, send)

    async def _run(self, scope: Any, receive: Receive, send: Send) -> None:
        """The application. What is cut when the server's time to end is over is told so, if nothing was told yet."""
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if has_begun:
                raise
            await of_error(EngineClosed()).response()(scope, receive, send)

    def _check_host(self, headers: dict[bytes, str]) -> None:
        host = headers.get(b"host", "")
        if not self._options.allows_host(host):
            raise ApiError(
                403, f"this server is not called {host!r}: use its address or localhost, or start it with --allow-host NAME",
                "host_not_allowed",
            )  # fmt: skip

    def _check_key(self, path: str, headers: dict[bytes, str]) -> None:
        key = self._options.api_key
        if not key or path in OPEN_PATHS or path.startswith("/static/"):
            return
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise ApiError(
                401, "wrong or missing API key: send it as `Authorization: Bearer KEY`", "invalid_api_key",
                headers={"www-authenticate": "Bearer"} | NO_RETRY,
            )  # fmt: skip

    async def _whole_body(self, headers: dict[bytes, str], receive: Receive) -> Receive:
        """Reads it, and returns what gives it to the application, then the client's disconnection."""
        try:
            body = await asyncio.wait_for(
                _read(receive, int(self._options.max_body_mib * 2**20)), self._options.body_timeout_s
            )
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._options.body_timeout_s:g} s", "body_timeout",
                headers={"connection": "close"} | NO_RETRY,
            ) from None  # fmt: skip
        if body is None:
            raise ApiError(
                413, f"the body is longer than {self._options.max_body_mib:g} MiB: send less, or start the server with a larger "
                "--max-body-mib", "body_too_large", headers={"connection": "close"},
            )  # fmt: skip
        # Web pages of other origins can send other types without asking.
        if headers.get(b"content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON, with the header `Content-Type: application/json`", "not_json")
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


async def _read(receive: Receive, limit: int) -> bytes | None:
    """None when it is longer; it is read to its end all the same, or the client would still send and not see the answer."""
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        length += len(part)
        if length <= limit:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body"):
            return b"".join(parts) if length <= limit else None
