"""Grammars and JSON schemas to llama.cpp's grammar sampler; what would hang or overflow its parser is refused before."""

from __future__ import annotations

import json
import re
from typing import Any

import llama_cpp.llama_cpp as C
from llama_cpp.llama_grammar import json_schema_to_gbnf

from ..errors import RequestError
from .request import Sampling

# llama.cpp's parser and its check for left recursion recurse per parenthesis and per rule.
_MOST_NESTED = 256
_MOST_CHARACTERS = 128 * 1024
_OPAQUE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)  # strings, classes, comments
_REPEAT = re.compile(r"\{\s*(\d{1,20})\s*,\s*(\d{1,20})\s*\}")


def grammar_sampler(vocab: Any, s: Sampling) -> Any:
    """None when nothing is asked for. The caller frees it."""
    if s.grammar is None and s.json_schema is None:
        return None
    if C.llama_vocab_type(vocab) == C.LLAMA_VOCAB_TYPE_NONE:
        raise RequestError("this model has no tokenizer, so a grammar cannot be kept: leave it out")
    text = s.grammar if s.grammar is not None else schema_grammar(s.json_schema)
    _check(text)
    grammar = C.llama_sampler_init_grammar(vocab, text.encode("utf-8", "replace"), b"root")
    if not grammar:
        raise RequestError(
            "the grammar cannot be used: llama.cpp wants GBNF with a rule `root`, no undefined rules, no left recursion and no "
            "more than 2000 repetitions"
        )
    return grammar


def schema_grammar(schema: Any) -> str:
    """GBNF, rules by line. Raises RequestError."""
    try:
        return json_schema_to_gbnf(schema if isinstance(schema, str) else json.dumps(schema))
    except Exception as error:  # the converter raises whatever a schema makes it stumble on
        raise RequestError(f"json_schema cannot be made into a grammar: {error or type(error).__name__}") from error


def _check(text: Any) -> None:
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise RequestError("grammar must be text in GBNF, neither empty nor with NUL characters")
    if len(text) > _MOST_CHARACTERS:
        raise RequestError(f"the grammar has {len(text)} characters: {_MOST_CHARACTERS} at most")
    rules = _OPAQUE.sub(" ", text)
    for least, most in _REPEAT.findall(rules):
        if int(most) < int(least):
            raise RequestError(
                f"the grammar repeats from {least} to {most} times: the second number must not be smaller"
            )
    depth = 0
    for bracket in re.findall(r"[()]", rules):
        depth += 1 if bracket == "(" else -1
        if depth > _MOST_NESTED:
            raise RequestError(f"the grammar nests parentheses more than {_MOST_NESTED} deep")
