"""What stops a conversion: bad input, a full disk, Ctrl-C. Nothing is left behind, and what was there stays."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

import checkpoint_fixtures as fixtures
import models
from hybrid_moe_ext import CheckpointError, HybridMoeError, OptionError
from hybrid_moe_ext.cli import run as command_line
from hybrid_moe_ext.convert import PART, convert, parse_size

CONFIG = {**fixtures.CONFIG, "quantization_config": fixtures.QUANTIZATION}


@pytest.fixture
def out(tmp_path) -> Path:
    """In a folder of its own; whatever the test does, it must be as empty at the end as the test says."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "m.gguf"


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def interfere(share: float, call: Callable[[], object]) -> Callable[[float], None]:
    """A progress function that calls `call` once, when that much is written."""
    done: list[float] = []

    def progress(now: float) -> None:
        if now >= share and not done:
            done.append(now)
            call()

    return progress


@pytest.mark.parametrize(
    ("text", "n"), [("1", 1), ("700m", 700 * 10**6), ("50G", 50 * 10**9), ("2TB", 2 * 10**12), (" 3k ", 3000)]
)
def test_sizes(text, n):
    assert parse_size(text) == n


@pytest.mark.parametrize("text", ["", "0", "-1G", "1.5G", "G", "5X", "50 G", "0x10"])
def test_sizes_that_are_none(text, out):
    with pytest.raises(OptionError, match="50G"):
        parse_size(text)
    assert command_line(["convert", str(models.fp8_directory()), str(out), "--split-max-size=" + text]) == 2
    assert left(out) == []


def test_an_existing_output_is_kept_unless_forced(out, capfd):
    out.write_text("mine")
    with pytest.raises(OptionError, match=r"m\.gguf: exists: .*--force"):
        convert(models.fp8_directory(), out)
    assert command_line(["convert", str(models.fp8_directory()), str(out)]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert out.read_text() == "mine" and left(out) == ["m.gguf"]
    with pytest.raises(KeyboardInterrupt):
        convert(models.fp8_directory(), out, force=True, progress=interfere(0.5, interrupt))
    assert out.read_text() == "mine" and left(out) == ["m.gguf"]
    convert(models.fp8_directory(), out, force=True)
    assert out.read_bytes()[:4] == b"GGUF" and left(out) == ["m.gguf"]


def test_an_output_that_appears_meanwhile_is_kept(out):
    with pytest.raises(OptionError, match="exists"):
        convert(models.fp8_directory(), out, progress=interfere(0.5, lambda: out.write_text("mine")))
    assert out.read_text() == "mine" and left(out) == ["m.gguf"]


def test_one_existing_file_of_a_split_model(out):
    (out.parent / "m-00003-of-00006.gguf").write_text("mine")
    with pytest.raises(OptionError, match=r"m-00003-of-00006\.gguf: exists"):
        convert(models.fp8_directory(), out, "f32", split_max_size=400_000)
    assert left(out) == ["m-00003-of-00006.gguf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("m.bin", "NAME.gguf"), (".gguf", "NAME.gguf"), ("no/m.gguf", "make it"), ("d.gguf", "folder")],
)
def test_outputs_that_cannot_be(tmp_path, name, message):
    (tmp_path / "d.gguf").mkdir()
    with pytest.raises(OptionError, match=message):
        convert(models.fp8_directory(), tmp_path / name, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["d.gguf"]


def test_a_folder_without_write_permission(out):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    out.parent.chmod(0o500)
    with pytest.raises(OptionError, match="cannot be written"):
        convert(models.fp8_directory(), out)
    out.parent.chmod(0o700)


def test_the_input_is_checked_first(tmp_path, out):
    for source in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError):
            convert(source, out)
    with pytest.raises(OptionError, match="bf16, q8_0, f32"):
        convert(models.fp8_directory(), out, "int3")
    assert left(out) == []


def test_a_disk_that_is_too_small_is_noticed_before_writing(out, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**6, 0, 10**6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OptionError, match=r"needs \d+ bytes .* has 1000000 bytes .* make room"):
        convert(models.fp8_directory(), out)
    assert left(out) == []


@pytest.mark.parametrize("split_max_size", [None, 400_000])
def test_a_disk_that_fills_up_meanwhile(out, monkeypatch, split_max_size):
    write, n_calls = os.write, []

    def full(fd: int, data: memoryview) -> int:
        n_calls.append(len(data))
        if len(n_calls) > 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:5000])  # short writes are legal

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(HybridMoeError, match=r"m.*\.gguf.*No space left on device.*make room") as caught:
        convert(models.fp8_directory(), out, "f32", split_max_size)
    assert not isinstance(caught.value, CheckpointError) and left(out) == []


def test_a_real_limit_of_the_system(out):
    """RLIMIT_FSIZE: the kernel refuses the write that would go beyond it."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        "from hybrid_moe_ext.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "convert", str(models.fp8_directory()), str(out)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "File too large" in done.stderr
    assert left(out) == []


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    fixtures.write_checkpoint(tmp_path / "m", "fp8")
    return tmp_path / "m"


def replace(path: Path) -> None:
    """By a file with the same bytes."""
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").rename(path)


CHANGES = {
    "touched": lambda path: os.utime(path, ns=(1, 1)),
    "appended": lambda path: path.open("ab").write(b"x"),
    "replaced": replace,
    "removed": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_changes_meanwhile(checkpoint, out, monkeypatch, change, share):
    """At the beginning a read fails or nothing does; at the end everything has been read."""
    monkeypatch.setattr("hybrid_moe_ext.convert.PIECE_BYTES", 10_000)
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    with pytest.raises(CheckpointError, match=f"{shard.name}.*(changed|disappeared|cannot be read)"):
        convert(checkpoint, out, progress=interfere(share, lambda: CHANGES[change](shard)))
    assert left(out) == []


def test_nan_codes_are_refused(tmp_path, out):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    for code in (0x7F, 0xFF):
        tensors = fixtures.random_tensors(CONFIG, "fp8")
        tensors[name][1][150, 90] = code
        fixtures.write_checkpoint(tmp_path / "m", "fp8", tensors=tensors)
        with pytest.raises(CheckpointError, match=rf"safetensors: tensor '{name}' has a NaN .* row 150, column 90"):
            convert(tmp_path / "m", out)
    assert left(out) == []


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scales_must_be_finite(tmp_path, out, value):
    name = "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"
    tensors = fixtures.random_tensors(CONFIG, "fp8")
    kind, bits = fixtures.pack(fixtures.unpack(tensors, name) * 0 + value, tensors[name][0])
    tensors[name] = (kind, bits)
    fixtures.write_checkpoint(tmp_path / "m", "fp8", tensors=tensors)
    with pytest.raises(CheckpointError, match=f"{name}.*infinity or NaN: download"):
        convert(tmp_path / "m", out)
    assert left(out) == []


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("split_max_size", [None, 400_000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_interrupt_leaves_nothing(out, share, split_max_size):
    with pytest.raises(KeyboardInterrupt):
        convert(models.fp8_directory(), out, "f32", split_max_size, progress=interfere(share, interrupt))
    assert left(out) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing(out, number):
    script = (
        "import os, sys; from hybrid_moe_ext.cli import main; write = os.write; calls = []\n"
        "def slow(fd, data):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == 5: os.kill(os.getpid(), {int(number)})\n"
        "    return write(fd, data)\n"
        "os.write = slow; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "convert", str(models.fp8_directory()), str(out)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert left(out) == []


def test_what_a_killed_conversion_left_is_overwritten(out):
    out.with_name(out.name + PART).write_bytes(b"left over" * 10**6)
    convert(models.fp8_directory(), out)
    assert left(out) == ["m.gguf"]


def test_two_conversions_to_one_file(out):
    part = out.with_name(out.name + PART)
    with part.open("wb") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        with pytest.raises(OptionError, match="another conversion is writing it"):
            convert(models.fp8_directory(), out)
    assert left(out) == [part.name]


def test_a_link_in_the_temporary_files_place_is_not_followed(out, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out.with_name(out.name + PART).symlink_to(victim)
    with pytest.raises(OptionError, match="cannot be written"):
        convert(models.fp8_directory(), out)
    assert victim.read_text() == "mine"
