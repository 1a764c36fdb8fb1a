"""Every exception this package raises on purpose, and nothing else.

    HybridMoeError
    ├── CheckpointError (ValueError)     a model directory or file that cannot be used
    │   └── UnsupportedModelError        it may be fine, but this version does not know how to run it
    ├── PluginError                      the plug-in library or its host library is missing, too old or refused to work
    └── OptionError (ValueError)         a misspelt option or a value outside its range

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
