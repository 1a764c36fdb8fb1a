"""The FILE *: what C reads from it, that expert memory stays untouched, and that errors do not cross C."""

from __future__ import annotations

import ctypes
import gc
import os

import numpy as np
import pytest

import checkpoint_fixtures as fx
from hybrid_moe_ext.checkpoint import ExpertTensor, GgufStream, open_checkpoint
from hybrid_moe_ext.errors import CheckpointError

libc = ctypes.CDLL(None)
libc.fseeko.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
libc.ftello.argtypes, libc.ftello.restype = [ctypes.c_void_p], ctypes.c_int64
libc.fread.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
libc.fread.restype = ctypes.c_size_t
libc.ferror.argtypes = [ctypes.c_void_p]
MARK = 0xA5


@pytest.fixture(scope="module")
def virtual(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    fx.write_checkpoint(directory)
    return open_checkpoint(directory).virtual_gguf()


def fread(stream: GgufStream, n: int) -> tuple[np.ndarray, int]:
    out = np.full(n, MARK, np.uint8)
    return out, libc.fread(out.ctypes.data, 1, n, stream.file)


def read_like_llama(stream: GgufStream, size: int, offset: int, n: int) -> np.ndarray:
    """llama_file::seek and read_raw: reads no further than what it takes for the end of the file."""
    out = np.full(n, MARK, np.uint8)
    assert libc.fseeko(stream.file, offset, os.SEEK_SET) == 0
    to_read = min(n, size - libc.ftello(stream.file))
    n_read = libc.fread(out.ctypes.data, to_read, 1, stream.file)
    assert not libc.ferror(stream.file) and (to_read == 0 or n_read == 1)
    return out


def test_sequential_reads_of_all_sizes(virtual):
    end = virtual.end_of(virtual.regions[3])
    want = virtual.read(0, end)
    for n in (1, 7, 1000, 300_000):
        with GgufStream(virtual) as stream:
            assert libc.ftello(stream.file) == 0
            limit = 2000 if n == 1 else end
            data = b"".join(bytes(fread(stream, min(n, limit - at))[0]) for at in range(0, limit, n))
            assert data == want[:limit]
            assert libc.ftello(stream.file) == limit


def test_seeks(virtual):
    rng = np.random.default_rng(4)
    dense = [region for region in virtual.regions if not isinstance(region.tensor, ExpertTensor)]
    with GgufStream(virtual) as stream:
        assert libc.fseeko(stream.file, 0, os.SEEK_END) == 0 and libc.ftello(stream.file) == virtual.size
        for region in dense:
            offset = region.start + int(rng.integers(0, region.n_bytes))
            assert libc.fseeko(stream.file, offset, os.SEEK_SET) == 0 and libc.ftello(stream.file) == offset
            n = int(rng.integers(1, 5000))
            n = min(n, region.start + region.n_bytes - offset)
            assert bytes(fread(stream, n)[0]) == virtual.read(offset, n)
            assert libc.ftello(stream.file) == offset + n
        assert libc.fseeko(stream.file, -5, os.SEEK_SET) != 0
        assert stream.error is None


@pytest.mark.parametrize("serve_experts", [False, True])
def test_reading_every_tensor_as_llama_does(virtual, serve_experts):
    """In both orders, since a seek may find its target in stdio's buffer."""
    with GgufStream(virtual, serve_experts) as stream:
        for region in [*virtual.regions[1:], *virtual.regions[:0:-1]]:
            data = read_like_llama(stream, virtual.size, region.start, region.n_bytes)
            if isinstance(region.tensor, ExpertTensor) and not serve_experts:
                assert (data == MARK).all(), region.tensor.name
            else:
                assert bytes(data) == virtual.read(region.start, region.n_bytes, with_experts=True)
        assert stream.error is None and stream.copied_expert_bytes == 0


def test_a_host_that_reads_experts_all_the_same_is_noticed(virtual):
    region = next(r for r in virtual.regions if isinstance(r.tensor, ExpertTensor))
    with GgufStream(virtual) as stream:
        libc.fseeko(stream.file, region.start, os.SEEK_SET)
        _, n_read = fread(stream, region.n_bytes)
        assert n_read == region.n_bytes and stream.copied_expert_bytes >= region.n_bytes


def test_error_in_a_callback(tmp_path):
    tensors = fx.random_tensors(fx.CONFIG, "fp8")
    tensors["model.layers.0.self_attn.o_proj.weight"][1][0, 0] = 0x7F
    fx.write_checkpoint(tmp_path, tensors=tensors)
    virtual = open_checkpoint(tmp_path).virtual_gguf()
    region = next(r for r in virtual.regions if getattr(r.tensor, "name", "") == "blk.0.attn_output.weight")
    with GgufStream(virtual) as stream:
        libc.fseeko(stream.file, region.start, os.SEEK_SET)
        assert fread(stream, 100)[1] == 0 and libc.ferror(stream.file)
        assert isinstance(stream.error, CheckpointError) and "o_proj" in str(stream.error)


def test_closing(virtual):
    stream = GgufStream(virtual)
    stream.close()
    stream.close()
    assert stream.file is None
    GgufStream(virtual)  # never closed: the collector does it
    gc.collect()
