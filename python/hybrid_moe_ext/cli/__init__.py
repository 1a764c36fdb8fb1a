"""The command `hybrid-moe`. Commands are in app.py; here is what every one shares: exit codes, and no traceback.

0    done                               130  Ctrl-C
2    wrong input, said in one line      141  stdout was closed (`| head -1`), as for any Unix filter
"""

from __future__ import annotations

import os
import re
import sys

from ..errors import HybridMoeError
from .terminal import OutputClosed, complain


def main(arguments: list[str] | None = None) -> None:
    sys.exit(run(arguments))


def _plain(message: str) -> str:
    """What newer releases of Typer say of a value that is no number, for people."""
    return re.sub(
        r"Input should be a valid (number|integer), unable to parse.*", r"give digits only, it is no \1", message
    )


def run(arguments: list[str] | None = None) -> int:
    """The exit code."""
    try:
        from .app import app  # takes a while, so Ctrl-C must be quiet here too

        result = app(arguments, prog_name="hybrid-moe", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except HybridMoeError as error:
        complain(str(error))
        return 2
    except (OutputClosed, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout once more at its end
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Typer's usage errors and its Abort, by what they offer: releases differ in the module they come from.
        if hasattr(error, "format_message"):
            command = getattr(getattr(error, "ctx", None), "command_path", "hybrid-moe")
            complain(f"{_plain(error.format_message())} (see {command} --help)")
            return 2
        if type(error).__name__ == "Abort":
            return 130
        raise
