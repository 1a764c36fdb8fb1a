"""Values that models write without quotes: what they are by a tool's JSON schema."""

from __future__ import annotations

import pytest

from hybrid_moe_ext.server.output.values import typed


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5.5", {"type": ["string", "integer"]}, "5.5"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ("true", {}, True),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("6", {"enum": [5, 6]}, 6),
        ("5", {"const": "5"}, "5"),
        ("[1]", {"$ref": "#/$defs/list"}, [1]),
        ("[1]", {"$ref": "#/$defs/text"}, "[1]"),
        ("1", {"$ref": "#/$defs/loop"}, 1),
        ("1", {"$ref": "elsewhere"}, 1),
        ("1", {"allOf": [{"$ref": "#/$defs/text"}]}, "1"),
        ("NaN", {"type": "number"}, "NaN"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("1", None, 1),
        ("1", {"type": {}}, 1),
        ("1", {"type": [[]]}, 1),
        ("1", {"enum": [[]]}, 1),
        ("1", {"anyOf": []}, 1),
    ],
)
def test_a_value_by_its_schema(text: str, schema: object, value: object) -> None:
    root = {"$defs": {"list": {"type": "array"}, "text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    got = typed(text, schema, root)
    assert (got, type(got)) == (value, type(value))


def test_a_schema_of_a_thousand_branches_is_not_followed() -> None:
    root = {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 50} for i in range(20)}}
    assert typed("1", {"$ref": "#/$defs/0"}, root) == 1
