"""Values that a model writes between marks, without quotes: what they are says the tool's JSON schema."""

from __future__ import annotations

import json
from typing import Any

from .cursor import refuse

_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ALL = frozenset(_KINDS.values())
# Qwen's templates print Python's values.
_AS_PYTHON = {"True": True, "False": False, "None": None}
# Schemas in schemas, and in one; some refer to themselves, and each of them ten times.
_MOST_DEEP, _MOST_SCHEMAS = 16, 1000


def typed(text: str, schema: Any, root: Any) -> Any:
    """A string where the schema wants one; otherwise the JSON that it is, or else the text. `root`: the schema it stands in."""
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        word = text.strip()
        if kinds != _ALL and word in _AS_PYTHON and _kind(_AS_PYTHON[word]) in kinds:
            return _AS_PYTHON[word]
        return text
    return text if "string" in kinds and _kind(value) not in kinds - {"string"} and kinds != _ALL else value


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """JSON's types that it admits; all, where it does not say."""
    return _Kinds(root).of(schema, 0)


class _Kinds:
    def __init__(self, root: Any):
        self._root = root
        self._n_left = _MOST_SCHEMAS

    def of(self, schema: Any, depth: int) -> frozenset[str]:
        self._n_left -= 1
        if not isinstance(schema, dict) or depth > _MOST_DEEP or self._n_left < 0:
            return _ALL
        if isinstance(schema.get("$ref"), str):
            return self.of(_referred(schema["$ref"], self._root), depth + 1)
        if "const" in schema:
            return frozenset({_kind(schema["const"])})
        if isinstance(schema.get("enum"), list):
            return frozenset(_kind(value) for value in schema["enum"])
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list):
                return frozenset().union(*(self.of(one, depth + 1) for one in schema[union]))
        if isinstance(schema.get("allOf"), list):
            return _ALL.intersection(*(self.of(one, depth + 1) for one in schema["allOf"]))
        kind = schema.get("type")
        told = frozenset(one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)) & _ALL
        return (told | {"integer"} if "number" in told else told) or _ALL


def _referred(ref: str, root: Any) -> Any:
    """What "#/$defs/Name" means; None for anything else."""
    found = root
    for part in ref.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _kind(value: Any) -> str:
    return _KINDS[type(value)]
