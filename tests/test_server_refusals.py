"""What the server refuses: the right status, an error in OpenAI's shape, and the streams of others go on unharmed."""

from __future__ import annotations

import json
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
from server_host import KEY, MODEL, PROMPTS, Host, error, headers, neighbour_of, serving, wait_for

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
