"""Decode's priority over long prompts: what these may use of the machine, told to the plug-in when it changes."""

from __future__ import annotations

from collections.abc import Iterable

from .. import _native


class Priority:
    """While a sequence decodes, long prompts stream to `devices` only (None: all that stream) and keep off the CPU; otherwise
    they may use everything. Called at every step of a decode worker; any thread, one at a time."""

    def __init__(self, streams: bool, devices: Iterable[str] | None):
        self._streams = streams
        self._devices = None if devices is None else ",".join(devices).encode()
        self._is_decoding: bool | None = None

    def decoding(self, n: int) -> None:
        """`n`: sequences that decode now."""
        if not self._streams or (n > 0) == self._is_decoding:
            return
        self._is_decoding = n > 0
        _native.allow_streaming(self._devices if self._is_decoding else None, cpu_may_help=not self._is_decoding)

    def end(self) -> None:
        if self._streams:
            _native.allow_streaming(None, cpu_may_help=True)
