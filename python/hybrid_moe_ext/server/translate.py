"""A client's request to the engine's. Raises ApiError for what this server does not do; nothing is quietly left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..engine import Engine, Request, Sampling
from .chat import ChatTemplate
from .output import grammars
from .output.formats import OutputFormat
from .output.reader import Reader, Thinking
from .replies import ApiError
from .schema import ChatBody, SamplingFields, TextBody
from .tool_choice import Offer, offer

DEFAULT_TEXT_TOKENS = 16  # OpenAI's, of /v1/completions


@dataclass(frozen=True)
class Chat:
    request: Request
    reader: Reader | None  # None: the text is the content
    offer: Offer


def chat_request(
    body: ChatBody, engine: Engine, template: ChatTemplate, timeout_s: float, reasoning_apart: bool = True
) -> Chat:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs': true", "invalid_value", "top_logprobs")
    if body.modalities and body.modalities != ["text"]:
        raise ApiError(400, "this model answers with text only", "invalid_value", "modalities")
    tools = offer(body, template)
    prompt = template.render(body, tools.given)
    thinking = template.format.thinking(prompt.text)
    grammar = _grammar(body, template.format, tools, thinking, reasoning_apart)
    sampling = _sampling(body, engine, grammar)
    # What a client's own grammar makes is not reasoning, unless it has the reasoning's end in it.
    tags = template.format.tags
    if thinking == "open" and body.grammar is not None and tags is not None and tags.end not in body.grammar:
        thinking = "free"
    reader = template.format.reader(tools.tools, thinking, reasoning_apart, bool(tools.forced))
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    given = None if given == -1 else given
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = _request(body, engine, prompt.tokens, given, logprobs, timeout_s, sampling)
    return Chat(replace(request, control_tokens=reader is not None), reader, tools)


def _grammar(
    body: ChatBody, format: OutputFormat, tools: Offer, thinking: Thinking, reasoning_apart: bool
) -> str | None:
    """That of a call that is forced, which has no place for an answer's format, or of an answer behind its reasoning."""
    if tools.forced:
        if body.grammar is not None:
            raise ApiError(400, "'grammar' and a forced call are both given: choose one", "invalid_value", "grammar")
        return grammars.of_calls(format, list(tools.forced), tools.many, thinking)
    schema = _schema(body)
    return grammars.of_schema(format, schema, thinking) if schema is not None and reasoning_apart else None


def text_request(body: TextBody, engine: Engine, timeout_s: float) -> Request:
    for name, default in (("echo", False), ("best_of", 1), ("suffix", None)):
        if getattr(body, name) not in (None, default):
            raise ApiError(400, f"'{name}' is not supported: leave it out", "unsupported_parameter", name)
    given = DEFAULT_TEXT_TOKENS if body.max_tokens is None else body.max_tokens
    given = engine.options.default_max_tokens if given == -1 else given
    prompt = engine.tokenize(body.prompt) if isinstance(body.prompt, str) else body.prompt
    return _request(body, engine, prompt, given, body.logprobs, timeout_s, _sampling(body, engine))


def _request(
    body: SamplingFields,
    engine: Engine,
    prompt: list[int],
    max_tokens: int | None,
    logprobs: int | None,
    timeout_s: float,
    sampling: Sampling,
) -> Request:
    if body.n not in (None, 1):
        raise ApiError(400, "'n' can only be 1 here: send a request for each answer", "unsupported_parameter", "n")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "'stream_options' needs 'stream': true", "invalid_value", "stream_options")
    if len(prompt) >= engine.n_ctx:
        raise ApiError(
            400,
            f"This model's maximum context length is {engine.n_ctx} tokens, but the prompt has {len(prompt)}: shorten it, or "
            "start the server with a larger --ctx",
            "context_length_exceeded",
            "prompt" if isinstance(body, TextBody) else "messages",
        )
    return Request(
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=_stops(body),
        logprobs=logprobs,
        deadline_s=timeout_s,
    )


def _stops(body: SamplingFields) -> list[str]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops):
        raise ApiError(400, "'stop' cannot be an empty text", "invalid_value", "stop")
    return stops


def _sampling(body: SamplingFields, engine: Engine, grammar: str | None = None) -> Sampling:
    """`grammar`: instead of what the body asks for."""
    schema = _schema(body)
    if schema is not None and body.grammar is not None:
        raise ApiError(400, "'grammar' and 'response_format' are both given: choose one", "invalid_value", "grammar")
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repeat_penalty": body.repeat_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "ignore_eos": body.ignore_eos,
    }
    return Sampling(
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        # OpenAI's penalties look at the whole text.
        penalty_last_n=-1 if body.repeat_last_n is None else body.repeat_last_n,
        seed=body.seed,
        logit_bias=_bias(body, engine.n_vocab),
        grammar=grammar or body.grammar,
        json_schema=None if grammar else schema,
    )


def _bias(body: SamplingFields, n_vocab: int) -> dict[int, float]:
    biases = {}
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10 or int(name) >= n_vocab:
            raise ApiError(
                400,
                f"{name!r} in 'logit_bias' is no token of this model: they are 0 to {n_vocab - 1}",
                "invalid_value",
                "logit_bias",
            )
        if not -100 <= value <= 100:
            raise ApiError(
                400, f"'logit_bias' of {name} is {value}: give -100 (never) to 100", "invalid_value", "logit_bias"
            )
        biases[int(name)] = -math.inf if value == -100 else value
    return biases


def _schema(body: SamplingFields) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ApiError(
            400,
            "Missing required parameter: 'response_format.json_schema.schema'.",
            "missing_required_parameter",
            "response_format",
        )
    return wanted.json_schema.schema_
