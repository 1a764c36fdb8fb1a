"""Requests of the engine benchmark over HTTP, streamed: to llama-server and to our own server. Just enough of HTTP/1.1 for these
two, in one asyncio loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from .engine_figures import Served
from .engine_load import Arrival
from .engine_play import Clock, Send

MOST_ERROR_BYTES = 1 << 16


async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a streamed answer. Raises OSError when it breaks off, ValueError with the answer when it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status, headers = await _head(reader)
        if status != 200:
            told = await reader.read(MOST_ERROR_BYTES)
            raise ValueError(f"status {status}: {told.decode('utf-8', 'replace').strip()[:300]}")
        pieces = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader)
        async for line in _lines(pieces):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the server closed the connection without an answer") from error
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while n := int((await reader.readline()).split(b";")[0] or b"-1", 16):
            if n < 0:
                raise ConnectionError("the server broke off its answer")
            yield (await reader.readexactly(n + 2))[:n]
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the server broke off its answer") from error


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held = b""
    async for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


def to_llama_server(port: int, reuse: bool) -> Send:
    """`reuse`: it may take prefixes from what it computed before."""

    def body(arrival: Arrival) -> dict[str, Any]:
        # top_k 1 is greedy, and the cheapest of its samplers.
        return {
            "prompt": list(arrival.tokens), "n_predict": arrival.max_tokens, "stream": True, "ignore_eos": True,
            "cache_prompt": reuse, "samplers": ["top_k"], "top_k": 1,
        }  # fmt: skip

    def read(event: dict[str, Any], served: Served) -> bool:
        if event.get("stop"):
            served.n_generated = int(event["tokens_predicted"])
            served.n_reused = int(event.get("timings", {}).get("cache_n", 0))
        return not event.get("stop") and bool(event.get("tokens"))

    return _sender(port, "/completion", body, read)


def to_our_server(port: int, model: str) -> Send:
    def body(arrival: Arrival) -> dict[str, Any]:
        return {
            "model": model, "prompt": list(arrival.tokens), "max_tokens": arrival.max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip

    def read(event: dict[str, Any], served: Served) -> bool:
        if usage := event.get("usage"):
            served.n_generated = int(usage["completion_tokens"])
            served.n_reused = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        choices = event.get("choices") or []
        return bool(choices) and choices[0].get("finish_reason") is None

    return _sender(port, "/v1/completions", body, read)


def _sender(
    port: int,
    path: str,
    body: Callable[[Arrival], dict[str, Any]],
    read: Callable[[dict[str, Any], Served], bool],
) -> Send:
    """`read`: takes what an event tells into the Served, and says whether it is a token."""

    async def send(arrival: Arrival, served: Served, now: Clock) -> None:
        async for event in events(port, path, body(arrival)):
            at = now()
            if "error" in event:
                raise ValueError(str(event["error"])[:300])
            if read(event, served):
                served.token_s.append(at)
        if not served.n_generated:
            raise ValueError("the answer ended before its end")

    return send
