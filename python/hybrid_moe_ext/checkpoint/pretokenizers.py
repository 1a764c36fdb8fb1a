"""How text is cut before BPE: the pre_tokenizer of tokenizer.json -> llama.cpp's name for these rules. A data table.

The name is looked up from the rules themselves, never from the model's name: a wrong one gives other ids silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UnsupportedModelError

# A step is "split <regex>" (matches and the text between them are pieces), "digits" (every digit alone), or
# "gpt2" (GPT-2's own regex inside ByteLevel). A step ending in "…" matches any that begins like it.
_CJK = "split [\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_QWEN2 = (
    r"split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TABLE: dict[str, tuple[str, ...]] = {
    "deepseek-v3": (
        r"split \p{N}{1,3}",
        "split [\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "split [!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "deepseek-llm": (
        "split [\r\n]",
        "split \\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba…",  # a list of all cased letters
        "split \\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        "split \\s+$",
        _CJK,
        "digits",
    ),
    "deepseek-coder": ("split [\r\n]", r"split \s?\p{L}+", r"split \s?\p{P}+", _CJK, "digits"),
    "qwen2": (_QWEN2,),  # the same for DeepSeek-R1-Distill-Qwen, which llama.cpp also calls deepseek-r1-qwen
    "gpt-2": ("gpt2",),
}


def recognise(path: Path, pre_tokenizer: Any) -> str:
    """llama.cpp's name for the rules; UnsupportedModelError shows the rules if there is none."""
    steps = _steps(pre_tokenizer)
    for name, known in TABLE.items():
        if len(steps) == len(known) and all(_same(step, rule) for step, rule in zip(steps, known, strict=True)):
            return name
    raise UnsupportedModelError(
        f"{path}: pre_tokenizer {' / '.join(steps) or 'none'} is not known (known: {', '.join(TABLE)}):"
        f" convert the model to GGUF with llama.cpp if it knows this tokenizer"
    )


def _same(step: str, rule: str) -> bool:
    return step.startswith(rule[:-1]) if rule.endswith("…") else step == rule


def _steps(node: Any) -> list[str]:
    """The rules in order. What cannot be expressed becomes a step that no table entry has."""
    if not isinstance(node, dict):
        return [] if node is None else [f"unreadable {node!r}"]
    kind = node.get("type")
    if kind == "Sequence":
        return [step for child in node.get("pretokenizers") or [] for step in _steps(child)]
    if kind == "ByteLevel" and not node.get("add_prefix_space", True):
        return ["gpt2"] if node.get("use_regex", True) else []
    if kind == "Digits" and node.get("individual_digits"):
        return ["digits"]
    if kind == "Split" and node.get("behavior") == "Isolated" and not node.get("invert"):
        pattern = node.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            return ["split " + pattern["Regex"]]
    return [f"{kind} { ({key: value for key, value in node.items() if key != 'type'}) }"]
