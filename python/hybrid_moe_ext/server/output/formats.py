"""Which format a model writes, by its chat template's text: the first that fits, the most particular ones first."""

from __future__ import annotations

from dataclasses import dataclass

from . import deepseek, dsml, glm, harmony, hermes, kimi, minimax, qwen_coder
from .call_format import CallFormat
from .calls import Tools
from .reader import Reader, TaggedReader, Tags, Thinking

_CALLS = (
    kimi.FORMAT,
    dsml.V3_2,
    dsml.V4,
    deepseek.V3_1,
    deepseek.V3,
    minimax.FORMAT,
    glm.FORMAT,
    qwen_coder.FORMAT,
    hermes.FORMAT,
)
_MOST_TAG = 100  # characters of a prompt's end in which it is looked for, with white space
_TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class OutputFormat:
    """`tags` around the reasoning and `calls`: None where the template knows none, or none that is known here."""

    tags: Tags | None = None
    calls: CallFormat | None = None
    is_harmony: bool = False

    @property
    def has_reasoning(self) -> bool:
        return self.is_harmony or self.tags is not None

    def thinking(self, prompt: str) -> Thinking:
        """What the prompt's end says."""
        end = prompt[-_MOST_TAG:].rstrip()
        if self.tags is None:
            return "free"
        return "open" if end.endswith(self.tags.begin) else "closed" if end.endswith(self.tags.end) else "free"

    def reader(self, tools: Tools | None, thinking: Thinking, apart: bool, is_forced: bool = False) -> Reader | None:
        """`tools`: calls of them are looked for; `apart`: reasoning goes out apart from the content, not as a part of it;
        `is_forced`: there is nothing but calls, of which the last may be cut off. None: there is nothing to look for."""
        calls = self.calls if tools is not None else None
        if calls is None and not (apart and self.has_reasoning):
            return None
        if self.is_harmony:
            return harmony.HarmonyReader(tools, apart)
        return TaggedReader(self.tags, calls, tools, thinking, apart, is_forced)


def format_of(template: str) -> OutputFormat:
    if harmony.FORMAT.is_taught_by(template):
        return OutputFormat(calls=harmony.FORMAT, is_harmony=True)
    tags = next((tags for tags in _TAGS if tags.begin in template and tags.end in template), None)
    return OutputFormat(tags, next((calls for calls in _CALLS if calls.is_taught_by(template)), None))
