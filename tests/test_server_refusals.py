"""What the server refuses: the right status, an error in OpenAI's shape, and the streams of others go on unharmed."""

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
from pydantic import ValidationError

from engine_solo import DEADLOCK_S
from hybrid_moe_ext.errors import OptionError
from hybrid_moe_ext.server import ServerOptions
from hybrid_moe_ext.server.schema import ChatBody, DetokenizeBody, TextBody
from server_host import MODEL, PROMPTS, Host, serving, wait_for

KEY = "a secret"
USER = [{"role": "user", "content": "Hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with serving(api_key=KEY, max_body_mib=0.5, body_timeout_s=DEADLOCK_S) as started:
        yield started


@pytest.fixture
def neighbour(host: Host) -> Iterator[None]:
    with neighbour_of(host):
        yield


@contextlib.contextmanager
def neighbour_of(host: Host) -> Iterator[None]:
    """A stream that runs during the test, and is what it is alone."""
    n, got = 24, []
    request = {
        "model": MODEL,
        "prompt": PROMPTS[0],
        "max_tokens": n,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    chunks = host.openai(api_key=KEY).completions.create(**request, stream=True)
    got.append(next(chunks).choices[0].text)
    yield
    got += [c.choices[0].text for c in chunks]
    assert "".join(got) == host.expected(PROMPTS[0], n)


def headers(**more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in more.items()
    }


def error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error"]
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"} and told["message"]
    return told


BAD_CHAT = [
    ({"n": 2}, 400, "unsupported_parameter", "n"),
    ({"temperature": "0.5"}, 400, "invalid_type", "temperature"),
    ({"temperature": True}, 400, "invalid_type", "temperature"),
    ({"temperature": -1}, 400, "invalid_value", "temperature"),
    ({"temperature": 2.1}, 400, "invalid_value", "temperature"),
    ({"top_p": 2}, 400, "invalid_value", "top_p"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": -2}, 400, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 1.5}, 400, "invalid_type", "max_completion_tokens"),
    ({"max_tokens": 2**40}, 400, None, None),
    ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    ({"seed": 2**70}, 400, "invalid_value", "seed"),
    ({"stop": [""]}, 400, "invalid_value", "stop"),
    ({"stop": ["a"] * 17}, 400, "invalid_value", "stop"),
    ({"stop": 5}, 400, "invalid_type", "stop"),
    ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"logit_bias": {"two": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
    ({"response_format": {"type": "yaml"}}, 400, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "missing_required_parameter", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}},
        400,
        None,
        None,
    ),
    ({"grammar": "root ::= ("}, 400, None, None),
    ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, 400, "invalid_value", "grammar"),
    ({"temprature": 1}, 400, "unknown_parameter", "temprature"),
    ({"model": "gpt-4o"}, 404, "model_not_found", "model"),
    ({"model": None}, 400, "invalid_type", "model"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "Hello"}, 400, "invalid_type", "messages"),
    ({"messages": [{"content": "Hello"}]}, 400, "missing_required_parameter", "messages.0.role"),
    ({"messages": [{"role": "wizard", "content": "Hello"}]}, 400, "invalid_value", "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_type", "messages.0.content"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "missing_required_parameter", "messages.0"),
    ({"messages": [{"role": "user", "content": "free " * 2000}]}, 400, "context_length_exceeded", "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    ({"modalities": ["audio"]}, 400, "invalid_value", "modalities"),
    ({"functions": []}, 400, "unknown_parameter", "functions"),
]


@pytest.mark.parametrize("wrong, status, code, param", BAD_CHAT)
def test_wrong_chat(host: Host, wrong: dict, status: int, code: str | None, param: str | None) -> None:
    body = {"model": MODEL, "messages": USER, "max_tokens": 2} | wrong
    told = error(host.post(CHAT, json=body, headers=headers()), status)
    assert (told["code"], told["param"]) == (code, param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_images_and_sound(host: Host, kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    told = error(host.post(CHAT, json=body, headers=headers()), 400)
    assert (told["code"], told["param"]) == ("unsupported_content", "messages.0.content.1")


BAD_TEXT = [
    ({"prompt": ""}, 400, None),
    ({"prompt": []}, 400, None),
    ({"prompt": ["a", "b"]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, None),
    ({"prompt": [10**9]}, 400, None),
    ({"prompt": 7}, 400, "prompt"),
    ({"echo": True}, 400, "echo"),
    ({"best_of": 3}, 400, "best_of"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"prompt": "free " * 2000}, 400, "prompt"),
]


@pytest.mark.parametrize("wrong, status, param", BAD_TEXT)
def test_wrong_completion(host: Host, wrong: dict, status: int, param: str | None) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2} | wrong
    answer = host.post(TEXT, json=body, headers=headers())
    if wrong == {"prompt": ""}:  # this model begins every text with a token of its own
        assert answer.status_code == 200
        return
    assert error(answer, status)["param"] == param


@pytest.mark.parametrize(
    "body, code",
    [
        (b"", "missing_body"),
        (b"{", "invalid_json"),
        (b"{'model': 1}", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, None),
        (b'{"model": ' + b"9" * 10_000 + b"}", None),
        (b"null", "invalid_type missing_body"),  # releases of FastAPI differ
        (b"[]", "invalid_type"),
        (b'"text"', "invalid_type"),
        (json.dumps({"model": MODEL, "prompt": "a", "temperature": float("nan")}).encode(), "invalid_value"),
        (b'{"model": "demo", "prompt": "a", "\\udfff": 1}', "invalid_value"),
    ],
)
def test_bodies_that_are_no_request(host: Host, neighbour: None, body: bytes, code: str | None) -> None:
    told = error(host.post(TEXT, content=body, headers=headers()), 400)["code"]
    assert told in code.split() if code else told is None


N_WRONG = 10_000


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (TextBody, {f"unknown_{i}": 1 for i in range(N_WRONG)}),
        (TextBody, {"prompt": [[]] * N_WRONG + ["a"]}),
        (TextBody, {"prompt": [1] * N_WRONG + ["a"] * N_WRONG}),
        (TextBody, {"prompt": [["a"] * N_WRONG]}),
        (TextBody, {"logit_bias": {str(i): "a" for i in range(N_WRONG)}}),
        (TextBody, {"stop": [1] * N_WRONG}),
        (ChatBody, {"messages": [{}] * N_WRONG}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * N_WRONG}]}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * N_WRONG}]}),
        (ChatBody, {"tools": [1] * N_WRONG}),
        (DetokenizeBody, {"tokens": ["a"] * N_WRONG}),
    ],
)
def test_a_body_that_is_wrong_many_times_makes_few_errors(kind: type, wrong: dict) -> None:
    """Their cost is the server's: a body of 16 MB had it busy for 18 s and 2 GB."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(wrong)
    assert found.value.error_count() < 10


def test_half_a_surrogate_pair_is_some_character(host: Host) -> None:
    """In a prompt, a stop string, and in what comes back of it in an error."""
    body = b'{"model": "demo", "prompt": "a\\ud800", "stop": "\\udfff", "max_tokens": 1}'
    assert host.post(TEXT, content=body, headers=headers()).status_code == 200
    told = error(host.post(TEXT, content=body.replace(b"demo", b"\\ud800"), headers=headers()), 404)
    assert "`\ud800`" in told["message"]


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


def test_full_queue_and_deadlines() -> None:
    with serving({"n_parallel": 1, "queue": 1}, timeout_s=3) as host:
        client, rest = host.openai(), {"model": MODEL, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 400}
        host.gate.shut()
        results: list[object] = []

        def one(stream: bool) -> None:
            try:
                answer = client.completions.create(**rest, stream=stream, extra_body={"ignore_eos": True})
                results.append([c.choices[0].text for c in answer] if stream else answer)
            except openai.APIError as refused:
                results.append(refused)

        running = threading.Thread(target=one, args=(True,))
        running.start()
        host.gate.wait_until_held()
        waiting = threading.Thread(target=one, args=(False,))
        waiting.start()
        wait_for(lambda: host.engine.metrics().queued_now == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**rest)
        assert refused.value.code == "queue_full" and int(refused.value.response.headers["retry-after"]) > 0
        time.sleep(3)  # past timeout_s, which the engine sees when it goes on
        host.gate.open()
        running.join(DEADLOCK_S)
        waiting.join(DEADLOCK_S)
        assert {getattr(result, "code", None) for result in results} == {"timeout"}, results
        assert {getattr(result, "status_code", None) for result in results} == {504, None}  # the stream had begun
        host.wait_until_idle()


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


def test_an_engine_that_failed_is_told() -> None:
    with serving() as host:
        host.engine._mail.close(RuntimeError("broken for this test"))
        assert httpx.get(host.url + "/health").status_code == 503
        told = error(host.post(TEXT, json={"model": MODEL, "prompt": "Hello"}), 500)
        assert (told["type"], told["code"]) == ("server_error", "engine_error")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_mib": -1},
        {"timeout_s": "long"},
        {"cors_origins": ("chat.example",)},
        {"api_key": "schlüssel"},
        {"embedding_ctx": 64.5},
        {"embeddings": "first"},
        {"unknown_fields": "lenient"},
    ],
)
def test_wrong_options(wrong: dict) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        ServerOptions(**wrong)
