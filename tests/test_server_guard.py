"""What stands before every route: paths, keys, hosts, origins, long and slow bodies."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from engine_solo import DEADLOCK_S
from hybrid_moe_ext.server import ServerOptions
from server_host import KEY, MODEL, PROMPTS, Host, error, headers, neighbour_of, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with serving(api_key=KEY, max_body_mib=0.5, body_timeout_s=DEADLOCK_S) as started:
        yield started


@pytest.fixture
def neighbour(host: Host) -> Iterator[None]:
    with neighbour_of(host):
        yield


def test_wrong_paths_and_methods(host: Host) -> None:
    error(host.post("/v1/images", json={}, headers=headers()), 404)
    assert "POST" in httpx.get(host.url + CHAT, headers=headers()).headers["allow"]
    error(httpx.get(host.url + CHAT, headers=headers()), 405)


def test_keys(host: Host, neighbour: None) -> None:
    for wrong in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer \xe9"},
    ):
        for path in ("/v1/models", "/metrics", "/nothing", "/openapi.json"):
            raw = {name: value.encode("latin-1") for name, value in wrong.items()}
            told = error(httpx.get(host.url + path, headers=raw), 401)
            assert (told["type"], told["code"]) == ("authentication_error", "invalid_api_key")
    assert httpx.get(host.url + "/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        host.openai(api_key="wrong").models.list()


def test_the_page_needs_no_key_and_nothing_from_elsewhere(host: Host) -> None:
    page = httpx.get(host.url + "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(/[^"]*)"', page.text)
    assert len(files) == 5
    for file in files:
        told = httpx.get(host.url + file)
        assert told.status_code == 200 and not re.search(r"https?://", told.text)
    assert not re.search(r"https?://", page.text)
    error(httpx.get(host.url + "/static/../app.py"), 401)
    for outside in ("/static/no.js", "/static/%2e%2e/app.py", "/static/..%2fapp.py"):
        error(httpx.get(host.url + outside), 404)


def test_hosts(host: Host) -> None:
    """A web page whose name resolves to this machine cannot call it."""
    port = host.url.rpartition(":")[2]
    for name in ("evil.example", f"evil.example:{port}", "", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert error(httpx.get(host.url + "/health", headers={"host": name}), 403)["code"] == "host_not_allowed"
    for name in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", "[::1]:80", "192.0.2.1"):
        assert httpx.get(host.url + "/health", headers={"host": name}).status_code == 200
    assert ServerOptions(allow_hosts=("llm.example",)).allows_host("LLM.example:8080")
    assert ServerOptions(allow_hosts=("*",)).allows_host("any.example")


def test_other_origins(host: Host) -> None:
    """They can neither send JSON nor read an answer; other types, which they may send unasked, are refused."""
    origin = headers(origin="https://evil.example")
    asked = httpx.options(host.url + CHAT, headers=origin | {"access-control-request-method": "POST"})
    assert asked.status_code >= 400 and "access-control-allow-origin" not in asked.headers
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        told = error(host.post(CHAT, content=b"{}", headers=origin | {"content-type": kind}), 415)
        assert told["code"] == "not_json"


def test_long_bodies(host: Host, neighbour: None) -> None:
    """100 MB, with its length told and in chunks."""
    part = b" " * 2**20
    for length in ({"content-length": str(100 * 2**20)}, {}):
        answer = host.post(CHAT, content=(part for _ in range(100)), headers=headers() | length)
        assert error(answer, 413)["code"] == "body_too_large"


def test_slow_clients() -> None:
    """Neither half a request line nor half a body holds a connection for ever, trickling or not."""
    with serving(body_timeout_s=1) as host, neighbour_of(host):
        address = ("127.0.0.1", int(host.url.rpartition(":")[2]))
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
        )
        for sent, answer in ((b"", b""), (b"GET / HT", b""), (head.encode(), b"HTTP/1.1 408")):
            with socket.create_connection(address, DEADLOCK_S) as slow:
                slow.sendall(sent)
                trickle = threading.Thread(target=trickling, args=(slow if sent.startswith(b"GET") else None,))
                trickle.start()
                got = b""
                with contextlib.suppress(ConnectionResetError):  # what trickled in last was not read
                    while part := slow.recv(4096):
                        got += part
                assert got.startswith(answer) and bool(got) == bool(answer)
            trickle.join()


def trickling(slow: socket.socket | None) -> None:
    try:
        while slow is not None:
            slow.sendall(b"x")
            time.sleep(0.1)
    except OSError:
        return


def test_options_that_admit_more() -> None:
    """A page of another origin, and signs of life while a stream is silent."""
    with serving(cors_origins=("https://chat.example",), allow_hosts=("llm.example",), ping_s=0.05) as host:
        page = {"origin": "https://chat.example", "host": "llm.example"}
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        asked = httpx.options(host.url + CHAT, headers=page | preflight)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://chat.example"
        read = httpx.get(host.url + "/v1/models", headers=page)
        assert read.status_code == 200 and read.headers["access-control-allow-origin"] == "https://chat.example"
        other = httpx.get(host.url + "/v1/models", headers=page | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        host.gate.shut()
        body = {
            "model": MODEL,
            "prompt": PROMPTS[0],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", host.url + TEXT, json=body, timeout=DEADLOCK_S) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                if line.startswith(":"):
                    host.gate.open()
        assert any(line.startswith(":") for line in lines) and lines[-2] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == host.expected(PROMPTS[0], 8)
