"""Every exception this package raises on purpose, and nothing else.

    HybridMoeError
    ├── CheckpointError (ValueError)     a model directory or file that cannot be used
    │   └── UnsupportedModelError        it may be fine, but this version does not know how to run it
    ├── PluginError                      the plug-in library or its host library is missing, too old or refused to work
    ├── OptionError (ValueError)         a misspelt option or a value outside its range
    ├── BuildError                       llama.cpp could not be built with our patches
    └── EngineError                      the engine cannot go on with a request, or at all
        ├── RequestError (ValueError)    a request that cannot be served as it is: its prompt, limits, grammar or sampling
        ├── EngineBusy                   the queue is full: try again later
        ├── DeadlinePassed (TimeoutError)  a request's deadline passed before its first token
        └── EngineClosed                 the engine was closed before the request was done

Messages say what was found, which rule it breaks, and the remedy, in this order.
"""

from __future__ import annotations


class HybridMoeError(Exception):
    """Base class: `except HybridMoeError` catches everything this package raises on purpose."""


class CheckpointError(HybridMoeError, ValueError):
    """A model directory or file is damaged, incomplete or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """A model that this version does not know how to run."""


class PluginError(HybridMoeError):
    """The plug-in library could not be found, loaded or used."""


class OptionError(HybridMoeError, ValueError):
    """An unknown option, or a value outside its range."""


class BuildError(HybridMoeError):
    """llama.cpp could not be built with our patches. `log_tail`: what the failed program said last, if one failed."""

    def __init__(self, message: str, log_tail: tuple[str, ...] = ()):
        super().__init__(message)
        self.log_tail = log_tail


class EngineError(HybridMoeError):
    """The engine cannot go on with a request, or at all."""


class RequestError(EngineError, ValueError):
    """A request that cannot be served as it is."""


class EngineBusy(EngineError):
    """As many requests wait as may: try again later."""


class DeadlinePassed(EngineError, TimeoutError):
    """The deadline of a request passed before its first token."""


class EngineClosed(EngineError):
    """The engine was closed before the request was done."""
