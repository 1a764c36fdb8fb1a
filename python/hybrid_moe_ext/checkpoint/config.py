"""Reading JSON files and config.json fields with rules. What the fields mean for a model is in families/."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError

_REQUIRED: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        other = ", or give a GGUF file" if path.name == "config.json" else ""  # any folder is taken for a model
        raise CheckpointError(f"{path.absolute()}: is missing: download it with the model{other}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}): download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object: download the file again")
    return value


class Fields:
    """Checked access to one JSON object; every complaint names the file and the field."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        self.path = path
        self.values = values
        self.prefix = prefix

    def fail(self, key: str, rule: str) -> CheckpointError:
        file = self.path.name
        return CheckpointError(
            f"{self.path}: {self.prefix}{key} is {self._show(key)}, {rule}: use the release's {file}"
        )

    def unsupported(self, key: str, rule: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {self.prefix}{key} is {self._show(key)}; {rule}")

    def _show(self, key: str) -> str:
        """A found value, cut short: the vocabulary is one too."""
        text = repr(self.values[key]) if key in self.values else "missing"
        return text if len(text) <= 80 else text[:77] + "..."

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """A value, with `null` and absence meaning the default."""
        value = self.values.get(key)
        if value is None and default is _REQUIRED:
            raise self.fail(key, "but it is required")
        return default if value is None else value

    def count(self, key: str, least: int = 1, most: int = 2**31 - 1, default: Any = _REQUIRED) -> int:
        value: Any = self.get(key, default)
        if value is default:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.fail(key, f"but must be an integer from {least} to {most}")
        return value

    def number(self, key: str, above: float = 0.0, default: Any = _REQUIRED) -> float:
        value: Any = self.get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= above:
            raise self.fail(key, f"but must be a number greater than {above:g}")
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool) and value is not default:
            raise self.fail(key, "but must be true or false")
        return value

    def only(self, key: str, allowed: tuple[Any, ...], why: str, default: Any = _REQUIRED) -> Any:
        """A setting of which only some values can be run."""
        value = self.get(key, default)
        if value is not default and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.unsupported(key, f"only {' or '.join(map(repr, allowed))} can be run ({why})")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value: Any = self.get(key, default)
        if not isinstance(value, str) and value is not default:
            raise self.fail(key, "but must be text")
        return value

    def items(self, key: str, default: Any = _REQUIRED) -> list[Any]:
        value = self.get(key, default)
        if not isinstance(value, list):
            raise self.fail(key, "but must be a list")
        return value

    def child(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "but must be an object")
        return Fields(self.path, value, f"{self.prefix}{key}.")
