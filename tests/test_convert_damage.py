"""Converted files that were damaged: one clear error when they are loaded, mmap on and off, and the process goes on."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import hybrid_moe_ext
import models
from hybrid_moe_ext import CheckpointError, Llama
from hybrid_moe_ext.cli import run as command_line
from hybrid_moe_ext.info import describe_model
from test_convert import SPLIT_BYTES, converted, logits_of, other, reference, split

FOOTER = struct.Struct("<8sIIQQ8x8s")
MAGIC = b"HMOEFP8\n"


class Open:
    """A converted file taken apart, so that one thing can be wrong and the rest, the checksum too, be right."""

    def __init__(self, path: Path):
        self.data = path.read_bytes()
        _, self.version, self.crc, self.start, self.length, _ = FOOTER.unpack(self.data[-48:])
        self.body = self.data[self.start : -48]

    def closed(self, body: bytes | None = None, version: int = 1, **footer: int) -> bytes:
        body = self.body if body is None else body
        crc = footer.get("crc", zlib.crc32(body))
        at = FOOTER.pack(MAGIC, version, crc, footer.get("start", self.start), footer.get("length", len(body)), MAGIC)
        return self.data[: self.start] + body + at


def replaced(old: bytes, new: bytes) -> Callable[[Open], bytes]:
    def damage(f: Open) -> bytes:
        assert f.body.count(old) == 1 and len(old) == len(new)
        return f.closed(f.body.replace(old, new))

    return damage


def first_entry(at: int, value: int) -> Callable[[Open], bytes]:
    """A number of the first entry: 0 n_expert, 1 n_rows, 2 k, 3, 4 block, 5 scale type, 6 codes' place, 8 scales'."""

    def damage(f: Open) -> bytes:
        (n,) = struct.unpack_from("<I", f.body, 4)
        place = 8 + n + 4 * at
        return f.closed(f.body[:place] + struct.pack("<I", value) + f.body[place + 4 :])

    return damage


def flipped(f: Open) -> bytes:
    """One bit of one scale."""
    at = len(f.body) - 3
    return f.closed(f.body[:at] + bytes([f.body[at] ^ 1]) + f.body[at + 1 :], crc=f.crc)


def one_more(f: Open) -> bytes:
    """A seventh entry, of a tensor that the file has not; the scales move up to make room for it."""
    entries, at = [], 4
    for _ in range(6):
        n = struct.unpack_from("<I", f.body, at)[0] + 44
        entries.append(f.body[at : at + n])
        at += n
    entries.append(entries[0].replace(NAME, b"blk.9.ffn_gate_exps.weight"))
    first = min(struct.unpack("<Q", entry[-8:])[0] for entry in entries)
    moved = [entry[:-8] + struct.pack("<Q", struct.unpack("<Q", entry[-8:])[0] + 128) for entry in entries]
    table = struct.pack("<I", 7) + b"".join(moved)
    return f.closed(table.ljust(first - f.start + 128, b"\0") + f.body[first - f.start :])


NAME = b"blk.1.ffn_gate_exps.weight"
DAMAGES: dict[str, tuple[Callable[[Open], bytes], str, str]] = {
    "missing": (lambda f: f.data[: f.start], "no trailer", "again"),
    "cut by a byte": (lambda f: f.data[:-1], "no trailer", "again"),
    "cut within the footer": (lambda f: f.data[:-20], "no trailer", "again"),
    "cut within the scales": (lambda f: f.data[: f.start + len(f.body) // 2], "no trailer", "again"),
    "extended": (lambda f: f.data + b"\1", "no trailer", "again"),
    "scales cut out": (lambda f: f.closed(f.body[:-100], length=f.length), "where its footer says", "again"),
    "another version": (lambda f: f.closed(version=2), "version 2", "update hybrid-moe-ext"),
    "moved": (lambda f: f.closed(start=f.start + 64), "where its footer says", "again"),
    "checksum": (lambda f: f.closed(crc=f.crc ^ 1), "checksum", "again"),
    "a flipped bit": (flipped, "checksum", "again"),
    "unknown tensor": (replaced(NAME, NAME.replace(b"1", b"9")), "no scales for tensor 'blk.1.ffn_gate_exps", "again"),
    "one tensor too many": (one_more, "scales for 'blk.9.ffn_gate_exps.weight', which is no FP8 tensor", "again"),
    "empty table": (lambda f: f.closed(struct.pack("<I", 0) + f.body[4:]), "no scales for tensor", "again"),
    "endless table": (lambda f: f.closed(struct.pack("<I", 2**32 - 1) + f.body[4:]), "trailer", "again"),
    "endless name": (lambda f: f.closed(f.body[:4] + struct.pack("<I", 2**31) + f.body[8:]), "cut short", "again"),
    "another shape": (first_entry(1, 64), "another shape", "again"),
    "no experts": (first_entry(0, 0), "makes no sense", "again"),
    "no block": (first_entry(3, 0), "makes no sense", "again"),
    "a huge tensor": (first_entry(1, 2**32 - 1), "trailer", "again"),
    "unknown scale type": (first_entry(5, 3), "makes no sense", "again"),
    "codes elsewhere": (first_entry(6, 64), "another place", "again"),
    "scales elsewhere": (first_entry(9, 1), "leave the trailer", "again"),
}


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_trailers_fail_the_load(tmp_path, damage, use_mmap):
    make, message, remedy = DAMAGES[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(make(Open(converted())))
    with pytest.raises(CheckpointError) as caught:
        Llama(path, use_mmap=use_mmap, **models.OPTIONS)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and message in text and remedy in text and "\n" not in text, text


def test_the_process_goes_on_after_them():
    assert np.array_equal(logits_of(converted()), reference())
    assert np.array_equal(logits_of(converted(), use_mmap=False), reference())


@pytest.mark.parametrize("use_mmap", [True, False])
def test_one_damaged_file_of_a_split_model(tmp_path, use_mmap):
    for path in split():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / split()[-1].name
    damaged.write_bytes(Open(damaged).closed(crc=0))
    with pytest.raises(CheckpointError, match=f"{damaged}: the checksum") as caught:
        Llama(tmp_path / split()[0].name, use_mmap=use_mmap, **models.OPTIONS)
    assert split()[0].name not in str(caught.value)
    damaged.unlink()
    with pytest.raises(CheckpointError, match="split-00001"):
        Llama(tmp_path / split()[0].name, use_mmap=use_mmap, **models.OPTIONS)
    assert SPLIT_BYTES


@pytest.mark.parametrize("use_mmap", [True, False])
def test_the_trailer_of_another_model(tmp_path, use_mmap):
    """Same names, shapes and places: indistinguishable, and not protected against. Other places are noticed."""
    path, longer = tmp_path / "m.gguf", Open(other())
    path.write_bytes(Open(converted()).data[:-64] + longer.data[longer.start :])
    with pytest.raises(CheckpointError, match=r"m\.gguf: "):
        Llama(path, use_mmap=use_mmap, **models.OPTIONS)


@pytest.mark.parametrize("use_mmap", [True, False])
def test_other_hosts_get_no_model_and_live(tmp_path, use_mmap):
    hybrid_moe_ext.register()
    path = tmp_path / "m.gguf"
    path.write_bytes(Open(converted()).closed(crc=1))
    with pytest.raises(ValueError):
        llama_cpp.Llama(str(path), use_mmap=use_mmap, **models.OPTIONS)


def test_a_damaged_file_that_is_merely_open_hurts_nobody(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(Open(converted()).closed(crc=1))
    with path.open("rb"):
        assert np.array_equal(logits_of(converted(), use_mmap=False), reference())


def test_an_old_complaint_is_not_told_again(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(Open(converted()).closed(crc=1))
    hybrid_moe_ext.register()
    with pytest.raises(ValueError):
        llama_cpp.Llama(str(path), **models.OPTIONS)  # leaves a sentence that nobody took
    llm = Llama(converted(), **models.OPTIONS)
    assert np.array_equal(models.logits(llm), reference())


def test_loading_in_two_threads_at_once():
    results = {}

    def load(path: Path) -> None:
        results[path] = Llama(path, use_mmap=False, **models.OPTIONS)

    threads = [threading.Thread(target=load, args=(path,)) for path in (converted(), other())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(models.logits(results[converted()]), reference())
    assert np.array_equal(models.logits(results[other()]), logits_of(other()))


@pytest.mark.parametrize("damage", ["missing", "another version", "moved", "unknown tensor", "endless name"])
def test_info_says_it_too(tmp_path, damage, capfd):
    path = tmp_path / "m.gguf"
    path.write_bytes(DAMAGES[damage][0](Open(converted())))
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*trailer.*again"):
        describe_model(path)
    for arguments in (["info", str(path)], ["run", str(path), "-p", "the"]):
        assert command_line(arguments) == 2
        said = capfd.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and "m.gguf" in said.err
