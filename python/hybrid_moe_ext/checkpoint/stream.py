"""A virtual GGUF as a C `FILE *`, for hosts that load models from one. The bytes themselves: virtual_gguf.py.

How an expert tensor's memory stays untouched. The obvious way, a read callback that returns the length without writing,
does not work: glibc's fread of a cookie stream always copies through the stdio buffer (`_IO_default_xsgetn`), so every
page of the destination would be written. But llama.cpp reads a tensor as

    fseeko(file, offset, SEEK_SET); to_read = min(n, file_size - ftello(file)); fread(data, to_read, 1, file)

and takes 0 bytes for an answer. So after a seek to an expert tensor we report the end of the file as our position:
nothing is read, nothing is copied, whatever the tensor's size. `copied_expert_bytes` counts what a host that works
otherwise reads in spite of that; it gets whatever the stdio buffer holds.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import HybridMoeError
from .inventory import ExpertTensor
from .virtual_gguf import ALIGNMENT, Region, VirtualGguf

_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SEEK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int)
_IOFBF = 0

WINDOW_BYTES = 16 << 20  # converted at once, so that all threads have work; stdio asks for ALIGNMENT bytes at a time


class _Functions(ctypes.Structure):
    """cookie_io_functions_t; no write and no close: the stream is read-only and the cookie is Python's."""

    _fields_ = [("read", _READ), ("write", ctypes.c_void_p), ("seek", _SEEK), ("close", ctypes.c_void_p)]


class _Cookie:
    """Position, callbacks and what went wrong. Lives as long as the FILE: C holds pointers to its callbacks."""

    def __init__(self, virtual: VirtualGguf, serve_experts: bool):
        self.virtual = virtual
        self.serve_experts = serve_experts
        self.position = 0
        self.at_expert = False  # the last call was a seek to an expert tensor
        self.window_start = 0
        self.window = np.empty(0, np.uint8)  # converted bytes ahead of stdio's small reads, of one tensor only
        self.copied_expert_bytes = 0
        self.error: BaseException | None = None
        self.functions = _Functions(read=_READ(self._read), seek=_SEEK(self._seek))

    def _read(self, _cookie: int, address: int, n: int) -> int:
        try:
            self.at_expert = False
            region = self.virtual.region_at(self.position)
            n = min(n, self.virtual.end_of(region) - self.position)  # short: never buffer beyond one tensor
            if n <= 0:
                return 0
            if isinstance(region.tensor, ExpertTensor) and not self.serve_experts:
                self.copied_expert_bytes += n
            else:
                out = np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address))
                n = self._from_window(region, out)
            self.position += n
            return n
        except BaseException as error:  # nothing may cross C, not even KeyboardInterrupt
            self.error = self.error or error
            return -1

    def _from_window(self, region: Region, out: NDArray[np.uint8]) -> int:
        at = self.position - self.window_start
        if not 0 <= at < len(self.window):
            n = min(WINDOW_BYTES, self.virtual.end_of(region) - self.position)
            self.window = np.empty(0, np.uint8)  # so that two windows never exist at once
            window = np.empty(n, np.uint8)
            self.virtual.read_into(self.position, window, self.serve_experts)
            self.window_start, self.window, at = self.position, window, 0
        n = min(len(out), len(self.window) - at)
        out[:n] = self.window[at : at + n]
        return n

    def _seek(self, _cookie: int, offset: Any, whence: int) -> int:
        try:
            base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.virtual.size}[whence]
            position = base + offset[0]
            if position < 0:
                return -1
            if position != self.position or whence == os.SEEK_SET:
                region = self.virtual.region_at(position)
                is_start = isinstance(region.tensor, ExpertTensor) and position == region.start
                self.at_expert = is_start and not self.serve_experts
            self.position = position
            offset[0] = self.virtual.size if self.at_expert else position
            return 0
        except BaseException as error:
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
            raise HybridMoeError("the C library has no fopencookie, which loading a checkpoint needs: use Linux, glibc")
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
    def copied_expert_bytes(self) -> int:
        """Expert bytes that the host read although it was told there are none; 0 means their memory is untouched."""
        return self._cookie.copied_expert_bytes

    def close(self) -> None:
        self._close()  # a finalizer runs once
        self.file = None

    def __enter__(self) -> GgufStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(libc: ctypes.CDLL, file: int, _cookie: _Cookie, _buffer: Any) -> None:
    libc.fclose(file)
