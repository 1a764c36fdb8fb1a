"""Fields of option classes that are numbers or choices: default, range and help in one place, and the check of all of them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from .errors import OptionError

_MOST = 1e9


def number(default: float, least: float, help: str) -> Any:
    """An int or float, as the field's type says, from `least` on."""
    return field(default=default, metadata={"least": least, "help": help})


def choice(default: str, choices: tuple[str, ...], help: str) -> Any:
    return field(default=default, metadata={"choices": choices, "help": help})


def check(options: Any) -> None:
    """Raises OptionError for the first field of a dataclass that is out of its range. Fields without one are left alone."""
    for f in fields(options):
        value = getattr(options, f.name)
        if "least" in f.metadata:
            least = f.metadata["least"]
            is_number = isinstance(value, int) or (f.type == "float" and isinstance(value, float))
            if not is_number or isinstance(value, bool) or not least <= value < _MOST:
                kind = "a number" if f.type == "float" else "an integer"
                raise OptionError(
                    f"{f.name}={value!r} is not possible: give {kind} from {least} on ({f.metadata['help']})"
                )
        choices = f.metadata.get("choices")
        if choices and value not in choices:
            raise OptionError(f"{f.name}={value!r} is not possible: choose one of {', '.join(choices)}")
