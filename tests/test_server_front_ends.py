"""What front ends send, replayed: bodies with fields beside OpenAI's, from general knowledge of them (docs/front-ends.md)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from pydantic import ValidationError

from hybrid_moe_ext.errors import OptionError
from hybrid_moe_ext.server import ServerOptions
from hybrid_moe_ext.server.schema import ChatBody
from server_host import MODEL, Host, serving

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]

BODIES = {
    "Open WebUI": {
        "stream": True, "temperature": 0, "stop": ["<|never|>"], "chat_id": "c", "session_id": "s", "id": "m",
        "features": {"web_search": False}, "background_tasks": {"title_generation": True}, "variables": {"{{USER_NAME}}": "a"},
    },
    "Open WebUI, usage on": {"stream": True, "stream_options": {"include_usage": True}, "metadata": {"chat_id": "c"}},
    "Open WebUI, a title": {"stream": False, "max_completion_tokens": 3},
    "LM Studio's examples": {"temperature": 0.7, "max_tokens": -1, "stream": True},
    "LM Studio's options": {"ttl": 300, "top_k": 40, "repeat_penalty": 1.1, "max_tokens": 3, "draft_model": None},
    "Jan, llama-server's page": {
        "stream": True, "cache_prompt": True, "reasoning_format": "auto", "samplers": "edkypmxt", "temperature": 0.8,
        "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typ_p": 1, "repeat_last_n": 64,
        "xtc_probability": 0, "xtc_threshold": 0.1, "max_tokens": -1, "dry_multiplier": 0, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_penalty_last_n": -1, "presence_penalty": 0, "frequency_penalty": 0, "repeat_penalty": 1,
        "timings_per_token": True, "return_progress": True,
    },
    "Continue": {"stream": True, "max_tokens": 3, "temperature": 0.1, "top_p": 1, "stop": [], "logprobs": False},
    "Cline": {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}, "max_tokens": None},
    "Ollama's fields": {"options": {"num_ctx": 8192}, "keep_alive": "5m", "stream": False, "max_tokens": 3},
    "vLLM's name": {"repetition_penalty": 1.05, "max_tokens": 3},
    "LangChain": {"n": 1, "stream": False, "temperature": 0, "max_completion_tokens": 3, "logprobs": None},
    "nulls": {"functions": None, "function_call": None, "tools": None, "response_format": None, "max_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with serving({"default_max_tokens": 3}) as started:
        yield started


@pytest.mark.parametrize("name", BODIES)
def test_what_front_ends_send(host: Host, name: str) -> None:
    answer = host.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES} | BODIES[name])
    assert answer.status_code == 200, answer.text
    if BODIES[name].get("stream"):
        assert answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text
        told = "usage" in answer.text.rstrip().splitlines()[-3] and '"completion_tokens"' in answer.text
        assert told == bool(BODIES[name].get("stream_options"))
    else:
        assert answer.json()["usage"]["completion_tokens"] <= 3


def test_no_limit_is_the_servers_default(host: Host) -> None:
    given = {"model": MODEL, "prompt": "Hello", "max_tokens": -1, "temperature": 0, "ignore_eos": True}
    assert host.post("/v1/completions", json=given).json()["usage"]["completion_tokens"] == 3


def test_the_list_of_models(host: Host) -> None:
    """OpenAI's keys, all of them: clients read them without looking."""
    told = httpx.get(f"{host.url}/v1/models").json()
    assert told["object"] == "list" and {"id", "object", "created", "owned_by"} <= set(told["data"][0])


@pytest.mark.parametrize(
    "wrong", [{"temprature": 1}, {"mirostat": 2}, {"typical_p": 0.5}, {"min_tokens": [1]}, {"top_a": "0"}]
)
def test_what_would_be_left_out_silently_is_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ChatBody.model_validate({"model": MODEL, "messages": MESSAGES} | wrong)


def test_one_name_is_enough() -> None:
    body = {"model": MODEL, "messages": MESSAGES, "repetition_penalty": 1.5}
    assert ChatBody.model_validate(body).repeat_penalty == 1.5
    with pytest.raises(ValidationError, match="repetition_penalty"):
        ChatBody.model_validate(body | {"repeat_penalty": 1.1})


def test_unknown_fields_can_be_ignored() -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "temprature": 1}
    with serving(unknown_fields="ignore") as host:
        assert host.post("/v1/chat/completions", json=body).status_code == 200
        assert host.post("/v1/chat/completions", json=body | {"temperature": 9}).status_code == 400
    with pytest.raises(OptionError, match="unknown_fields"):
        ServerOptions(unknown_fields="lenient")
