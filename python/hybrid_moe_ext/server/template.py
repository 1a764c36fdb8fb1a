"""A chat template: a program in jinja, of the model's author, in a sandbox. It has what transformers' and llama.cpp's have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from llama_cpp.llama_chat_format import Jinja2ChatFormatter


class Template:
    """Raises jinja2's errors for what is no template."""

    def __init__(self, source: str, bos: str, eos: str):
        # Not the immutable sandbox, though both transformers and llama-cpp-python have it: Kimi K2's templates keep lists.
        environment = jinja2.sandbox.SandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Jinja2ChatFormatter.IgnoreGenerationTags, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.filters["from_json"] = json.loads  # llama.cpp's; its templates of DeepSeek V3.2 and V4 use it
        self._template = environment.from_string(source)
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: list[dict[str, Any]], tools: Any, more: Mapping[str, Any], answers: bool = True) -> str:
        """`more`: variables of the template's own; `answers`: up to where the model's answer begins. May raise anything."""
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=answers, raise_exception=_refuse, strftime_now=_now,
            **self._tokens, **more,
        )  # fmt: skip


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers', not as jinja's own, which is for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """What `map` and `select` give: DeepSeek R1's template prints tools so."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")
