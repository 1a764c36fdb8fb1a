"""The server's options, once: fields, defaults, ranges and help. The model's and the engine's are theirs."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Any

from ..engine.embed import POOLINGS
from ..errors import OptionError
from ..option_fields import check, choice, number


def _text(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


EMBEDDINGS = (*POOLINGS, "off")


@dataclass(frozen=True)
class ServerOptions:
    name: str = _text("", "what clients call the model; its file's or folder's name by default")
    api_key: str = _text("", "what clients must send as their key; none by default")
    allow_hosts: tuple[str, ...] = _text((), "names that clients may call this machine, besides localhost; *: any")
    cors_origins: tuple[str, ...] = _text((), "web pages of other origins that may call, such as https://chat.example")
    max_body_mib: float = number(8, 0.001, "longest request body, MiB")
    body_timeout_s: float = number(30, 0.01, "a request's headers must arrive within this time, and its body too")
    timeout_s: float = number(3600, 0.01, "a request that takes longer ends with an error")
    drain_s: float = number(30, 0, "at SIGTERM, running requests may take so long to finish")
    ping_s: float = number(15, 0.01, "a stream that is silent for so long gets an SSE comment, for proxies")
    embeddings: str = choice(
        "auto", EMBEDDINGS, "vector of a text: its last token's, the mean, or auto: what the model file says; or off"
    )
    unknown_fields: str = choice(
        "refuse", ("refuse", "ignore"), "what becomes of fields that nobody knows: refuse, or ignore them"
    )
    reasoning: str = choice(
        "auto",
        ("auto", "off"),
        "a model's reasoning: auto: apart from the answer; or off: in it, as the model wrote it",
    )
    embedding_ctx: int = number(2048, 16, "tokens of the longest text that gets an embedding")

    def __post_init__(self) -> None:
        check(self)
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise OptionError(f"cors_origins: {origin!r} is no origin: give one such as https://chat.example, or *")
        if not self.api_key.isascii():
            raise OptionError("api_key must be ASCII: HTTP headers are")

    def allows_host(self, header: str) -> bool:
        """Web pages can reach a server behind the user's browser by a name of their own that resolves to it, never by address."""
        name = _host_of(header)
        if "*" in self.allow_hosts or name in {"localhost", socket.gethostname().lower()}:
            return True
        return name in {allowed.lower() for allowed in self.allow_hosts} or _is_address(name)


def _host_of(header: str) -> str:
    """Without the port, lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
