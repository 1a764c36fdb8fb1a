"""A virtual GGUF as a C `FILE *`, for hosts that load models from one. What the bytes are is virtual_gguf.py's business."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np

from ..errors import HybridMoeError
from .virtual_gguf import ALIGNMENT, VirtualGguf

_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SEEK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int)
_IOFBF = 0


class _Functions(ctypes.Structure):
    """cookie_io_functions_t; no write and no close: the stream is read-only and the cookie is Python's."""

    _fields_ = [("read", _READ), ("write", ctypes.c_void_p), ("seek", _SEEK), ("close", ctypes.c_void_p)]


class _Cookie:
    """Position, callbacks and what went wrong. Lives as long as the FILE: C holds pointers to its callbacks."""

    def __init__(self, virtual: VirtualGguf, serve_experts: bool):
        self.virtual = virtual
        self.serve_experts = serve_experts
        self.position = 0
        self.error: BaseException | None = None
        self.n_reads = 0
        self.functions = _Functions(read=_READ(self._read), seek=_SEEK(self._seek))

    def _read(self, _cookie: int, address: int, n: int) -> int:
        """Expert bytes are counted but not written: that memory must stay untouched, the plug-in reads the real file."""
        try:
            self.n_reads += 1
            n = max(0, min(n, self.virtual.size - self.position))
            if n and not (self.virtual.is_expert_range(self.position, n) and not self.serve_experts):
                out = np.frombuffer((ctypes.c_uint8 * n).from_address(address), np.uint8)
                self.virtual.read_into(self.position, out, self.serve_experts)
            self.position += n
            return n
        except BaseException as error:  # noqa: BLE001  nothing may cross C, not even KeyboardInterrupt
            self.error = self.error or error
            return -1

    def _seek(self, _cookie: int, offset: Any, whence: int) -> int:
        try:
            base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.virtual.size}[whence]
            if base + offset[0] < 0:
                return -1
            self.position = offset[0] = base + offset[0]
            return 0
        except BaseException as error:  # noqa: BLE001
            self.error = self.error or error
            return -1


class GgufStream:
    """`with GgufStream(virtual) as stream: load(stream.file)`, then look at `stream.error` before the result.

    The file must outlive the load, not the model. It is closed once: at the end of the block, by close(), or at the
    latest when the stream is collected or Python exits (C's own exit would call back into a dead interpreter).
    `serve_experts` gives out the experts' bytes too, for hosts without the plug-in.
    """

    def __init__(self, virtual: VirtualGguf, serve_experts: bool = False):
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "fopencookie"):
            raise HybridMoeError("this C library has no fopencookie, which loading a checkpoint needs: use Linux with glibc")
        libc.fopencookie.restype = ctypes.c_void_p
        libc.fopencookie.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Functions]
        libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        libc.fclose.argtypes = [ctypes.c_void_p]
        self._cookie = _Cookie(virtual, serve_experts)
        file = libc.fopencookie(None, b"rb", self._cookie.functions)
        if not file:
            raise HybridMoeError(f"fopencookie failed: {os.strerror(ctypes.get_errno())}")
        self._buffer = ctypes.create_string_buffer(ALIGNMENT)
        libc.setvbuf(file, self._buffer, _IOFBF, ALIGNMENT)
        self._close = weakref.finalize(self, _close, libc, file, self._cookie, self._buffer)
        self.file: ctypes.c_void_p | None = ctypes.c_void_p(file)

    @property
    def error(self) -> BaseException | None:
        """The first exception of a callback; the host only saw a read error."""
        return self._cookie.error

    @property
    def n_reads(self) -> int:
        return self._cookie.n_reads

    def close(self) -> None:
        self._close()  # a finalizer runs once
        self.file = None

    def __enter__(self) -> GgufStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(libc: ctypes.CDLL, file: int, _cookie: _Cookie, _buffer: Any) -> None:
    libc.fclose(file)
