"""What the user sees: text on stdout, everything else on stderr, progress on terminals only, llama.cpp's log muted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import llama_cpp._logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


class OutputClosed(Exception):
    """Whoever read our stdout went away, as `| head -1` does."""


def write(text: str) -> None:
    """To stdout, at once. Raises OutputClosed."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise OutputClosed from error


def note(text: str) -> None:
    """A line of statistics, to stderr. A closed stderr loses it, nothing more."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """One red line on stderr (red on terminals), however many lines the message has."""
    line = Text(f"error: {' '.join(text.split())}", style="bold red")
    with contextlib.suppress(BrokenPipeError):
        Console(stderr=True, highlight=False, emoji=False).print(line, soft_wrap=True)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float], None] | None]:
    """A function that takes the share done, 0 to 1, or None when stderr is no terminal.

    llama-cpp-python points fds 1 and 2 at /dev/null and replaces sys.stderr while it loads, so the bar has its own
    duplicate of the terminal's fd.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with open(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding) as terminal:
        console = Console(file=terminal, force_terminal=True)
        with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task(what, total=1.0)
            yield lambda share: bar.update(task, completed=share)


_errors: deque[str] = deque(maxlen=3)


def _keep_errors(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        _errors.append(text.decode("utf-8", "replace").strip())


_callback = llama_cpp.llama_log_callback(_keep_errors)  # C keeps a pointer to it


def last_errors() -> str:
    """What llama.cpp last complained about while it was muted."""
    return "; ".join(_errors)


def set_log(verbose: bool) -> None:
    """llama.cpp's log: to stderr, or nowhere (llama-cpp-python's own levels let warnings through on some paths)."""
    llama_cpp._logger.set_verbose(verbose)
    callback = llama_cpp._logger.llama_log_callback if verbose else _callback
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
