"""The chat templates of llama.cpp's archive, which are their models' own, and what a model wrote that they show. No tests."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass, field
from functools import cache

import pytest

from hybrid_moe_ext.server.chat import wants_parsed_arguments
from hybrid_moe_ext.server.template import Template

needs_archive = pytest.mark.skipif(
    not os.environ.get("LLAMA_CPP_SDIST"), reason="set LLAMA_CPP_SDIST to llama-cpp-python's source archive"
)
_FOLDER = "/vendor/llama.cpp/models/templates/"


@cache
def all_templates() -> dict[str, str]:
    """By name; none without the archive."""
    path = os.environ.get("LLAMA_CPP_SDIST")
    if not path:
        return {}
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if _FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[member.name.rpartition("/")[2].removesuffix(".jinja")] = file.read().decode()
    return found


@cache
def template(name: str) -> Template:
    return Template(all_templates()[name], "<s>", "</s>")


# What calls are of, and cases of conversations.
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "at": {"type": "number"},
        "exact": {"type": "boolean"},
        "places": {"type": "array"},
        "more": {"$ref": "#/$defs/more"},
        "unit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "a", "parameters": SCHEMA}}
    for name in ("weather", "get.forecast-2")
]
USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True)
class Case:
    template: str
    end: str  # of the text, which no model's text has
    cut: str = ""  # what the model's text comes after, where that is not the prompt
    more: dict = field(default_factory=dict)
    content: bool = True  # may come before calls
    reasoning: bool = False
    n_calls: int = 2
    not_in_values: str = ""  # what this format cannot have in a value


IM_END, SENTENCE_END = "<|im_end|>\n", "<｜end▁of▁sentence｜>"
OF_DSML = {"end": SENTENCE_END, "not_in_values": "</｜DSML｜parameter>"}
CASES = [
    Case("Qwen-Qwen3-0.6B", IM_END, reasoning=True),
    Case("Qwen-Qwen3-0.6B", IM_END, cut="<|im_start|>assistant\n<think>\n\n</think>\n\n", more={"enable_thinking": False}),
    Case("Qwen-QwQ-32B", IM_END, cut="<|im_start|>assistant\n", content=False),
    Case("Qwen-Qwen2.5-7B-Instruct", IM_END),
    Case("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "<|im_end|>\n", content=False),
    Case("ibm-granite-granite-4.0", "<|end_of_text|>\n"),
    Case("Qwen3-Coder", IM_END, cut="<|im_start|>assistant\n", not_in_values="</parameter>"),
    Case("Qwen3.5-4B", IM_END, reasoning=True, not_in_values="</parameter>"),
    Case("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", IM_END, reasoning=True, not_in_values="</parameter>"),
    Case("StepFun3.5-Flash", IM_END, reasoning=True, not_in_values="</parameter>"),
    Case("GLM-4.6", "", reasoning=True, not_in_values="</arg_value>"),
    Case("GLM-4.6", "", more={"enable_thinking": False}, not_in_values="</arg_value>"),
    Case("GLM-4.7-Flash", "", reasoning=True, not_in_values="</arg_value>"),
    Case("GLM-4.7-Flash", "", more={"enable_thinking": False}, not_in_values="</arg_value>"),
    Case("Spark2.5", SENTENCE_END, reasoning=True, not_in_values="</arg_value>"),
    Case("inclusionai-ling-3.0-flash", "<|role_end|>", reasoning=True, not_in_values="</arg_value>"),
    Case("poolside-Laguna-S-2.1", "</assistant>\n", reasoning=True, not_in_values="</arg_value>"),
    Case("deepseek-ai-DeepSeek-V3.1", SENTENCE_END),
    Case("llama-cpp-deepseek-r1", SENTENCE_END, cut="<｜Assistant｜>", content=False),
    Case("deepseek-ai-DeepSeek-V3.2", more={"thinking": True}, reasoning=True, **OF_DSML),
    Case("deepseek-ai-DeepSeek-V3.2", cut="<｜Assistant｜></think>", **OF_DSML),
    Case("deepseek-ai-DeepSeek-V4", more={"thinking": True}, reasoning=True, **OF_DSML),
    Case("moonshotai-Kimi-K2", "<|im_end|>"),
    Case("Kimi-K2-Instruct", "<|im_end|>"),
    Case("Kimi-K2-Thinking", "<|im_end|>", reasoning=True),
    Case("MiniMax-M2", "[e~[\n", reasoning=True, not_in_values="</parameter>"),
    Case("openai-gpt-oss-120b", "<|call|>", content=False, reasoning=True, n_calls=1),
]  # fmt: skip


def written(case: Case, reasoning: str, content: str, calls: list[tuple[str, dict]]) -> tuple[str, str]:
    """The prompt, and what a model wrote after it that its template shows like this."""
    wants_parsed = wants_parsed_arguments(template(case.template))
    told = [
        {"id": f"functions.{name}:{i}", "type": "function",
         "function": {"name": name, "arguments": arguments if wants_parsed else json.dumps(arguments, ensure_ascii=False)}}
        for i, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    answer: dict = {"role": "assistant", "content": content}
    if told:
        answer["tool_calls"] = told
    if reasoning:
        answer |= {"reasoning_content": reasoning, "thinking": reasoning}
    prompt = template(case.template).render([USER], TOOLS, case.more)
    whole = template(case.template).render([USER, answer], TOOLS, case.more, answers=False)
    if case.cut:
        front, text = whole.rsplit(case.cut, 1)
        prompt = front + case.cut
    else:
        assert whole.startswith(prompt), whole[len(prompt) - 80 :]
        text = whole[len(prompt) :]
    assert text.endswith(case.end)
    return prompt, text[: len(text) - len(case.end)]
