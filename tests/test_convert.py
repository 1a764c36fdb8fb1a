"""hybrid-moe convert: the FP8 GGUF by an independent parser, and the same logits on every way it can be loaded.

Damaged files are in test_convert_damage.py, what stops a conversion in test_convert_refusals.py.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

import checkpoint_fixtures as fixtures
import hybrid_moe_ext
import models
from hybrid_moe_ext import CheckpointError, Llama, counters
from hybrid_moe_ext.cli import run as command_line
from hybrid_moe_ext.convert import convert
from hybrid_moe_ext.info import OURS, describe_model

PROJECTIONS = ("gate", "up", "down")
SPLIT_BYTES = 400_000  # six files of the random model


@cache
def converted() -> Path:
    return convert(models.fp8_directory(), models.FOLDER / "converted.gguf", "f32")[0]


@cache
def split() -> list[Path]:
    return convert(models.fp8_directory(), models.FOLDER / "split.gguf", "f32", split_max_size=SPLIT_BYTES)


@cache
def other() -> Path:
    """Other weights, the same names and shapes."""
    tensors = fixtures.random_tensors({**fixtures.CONFIG, "quantization_config": fixtures.QUANTIZATION}, "fp8", seed=2)
    fixtures.write_checkpoint(models.FOLDER / "other", "fp8", tensors=tensors)
    return convert(models.FOLDER / "other", models.FOLDER / "other.gguf", "f32")[0]


def logits_of(path: Path, **options) -> np.ndarray:
    """Never the host's kernels: all experts through the plug-in."""
    before = counters().n_matmuls
    llm = Llama(path, **models.OPTIONS, **options)
    result = models.logits(llm)
    llm.close()
    assert counters().n_matmuls > before
    return result


@cache
def reference() -> np.ndarray:
    return logits_of(models.fp8_directory(), dense_type="f32")


def parse_trailer(path: Path) -> dict[str, dict]:
    """By docs/fp8-gguf.md, sharing nothing with the product."""
    data = path.read_bytes()
    footer = data[-48:]
    assert footer[:8] == footer[-8:] == b"HMOEFP8\n" and footer[32:40] == bytes(8)
    version, crc, start, length = struct.unpack_from("<IIQQ", footer, 8)
    assert version == 1 and start + length + 48 == len(data) and start % 64 == 0
    assert zlib.crc32(data[start : start + length]) == crc
    (n_tensors,) = struct.unpack_from("<I", data, start)
    at, entries = start + 4, {}
    for _ in range(n_tensors):
        (n,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + n].decode()
        at += 4 + n
        keys = ("n_expert", "n_rows", "k", "block_rows", "block_k", "scale_type", "codes", "scales")
        entry = dict(zip(keys, struct.unpack_from("<6I2Q", data, at), strict=True))
        at += 40
        n_codes = entry["n_expert"] * entry["n_rows"] * entry["k"]
        grid = -(-entry["n_rows"] // entry["block_rows"]) * -(-entry["k"] // entry["block_k"])
        n_scales = entry["n_expert"] * grid * (4, 2, 1)[entry["scale_type"]]
        assert entry["codes"] % 64 == entry["scales"] % 64 == 0
        assert at <= entry["scales"] and entry["scales"] + n_scales <= start + length
        entry["code_bytes"] = data[entry["codes"] : entry["codes"] + n_codes]
        entry["scale_bytes"] = data[entry["scales"] : entry["scales"] + n_scales]
        entries[name] = entry
    return entries


def digest(parts) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def check_bytes(paths: list[Path], tensors: dict, scale_type: int) -> None:
    """Hashes of every expert tensor's codes and scales against the checkpoint's own bytes, and gguf's reader's view."""
    entries = {name: entry for path in paths for name, entry in parse_trailer(path).items()}
    read = {t.name: t for path in paths for t in gguf.GGUFReader(path).tensors}
    for layer in (1, 2):
        for projection in PROJECTIONS:
            entry = entries.pop(f"blk.{layer}.ffn_{projection}_exps.weight")
            names = [f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj.weight" for e in range(4)]
            codes = digest(tensors[name][1].tobytes() for name in names)
            assert digest([entry["code_bytes"]]) == codes
            assert digest([read[f"blk.{layer}.ffn_{projection}_exps.weight"].data.tobytes()]) == codes
            assert digest([entry["scale_bytes"]]) == digest(tensors[n + "_scale_inv"][1].tobytes() for n in names)
            assert entry["scale_type"] == scale_type and (entry["block_rows"], entry["block_k"]) == (128, 128)
            assert (entry["n_expert"], entry["n_rows"], entry["k"]) == (4, *tensors[names[0]][1].shape)
    assert not entries


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16"])
def test_expert_bytes_are_the_checkpoints(tmp_path, scale_dtype):
    config = {**fixtures.CONFIG, "quantization_config": fixtures.QUANTIZATION}
    tensors = fixtures.random_tensors(config, "fp8", scale_dtype=scale_dtype)
    fixtures.write_checkpoint(tmp_path / "m", "fp8", tensors=tensors)
    one = convert(tmp_path / "m", tmp_path / "one.gguf")
    several = convert(tmp_path / "m", tmp_path / "several.gguf", split_max_size=SPLIT_BYTES)
    assert one == [tmp_path / "one.gguf"] and len(several) > 3
    for paths in (one, several):
        check_bytes(paths, tensors, ["F32", "BF16"].index(scale_dtype))
    want = logits_of(tmp_path / "m")
    assert np.array_equal(logits_of(one[0]), want) and np.array_equal(logits_of(several[0]), want)


def test_pieces_smaller_than_a_tensor_and_larger_give_the_same_file(tmp_path, monkeypatch):
    whole = converted().read_bytes()
    monkeypatch.setattr("hybrid_moe_ext.convert.PIECE_BYTES", 1000)
    assert convert(models.fp8_directory(), tmp_path / "m.gguf", "f32")[0].read_bytes() == whole


def test_split_files_follow_llama_cpps_rules():
    paths = split()
    assert [path.name for path in paths] == [f"split-{i + 1:05d}-of-{len(paths):05d}.gguf" for i in range(len(paths))]
    readers = [gguf.GGUFReader(path) for path in paths]
    n_tensors = sum(len(reader.tensors) for reader in readers)
    for i, (path, reader) in enumerate(zip(paths, readers, strict=True)):
        assert path.stat().st_size <= SPLIT_BYTES
        value = {key: field.contents() for key, field in reader.fields.items()}
        assert (value["split.no"], value["split.count"], value["split.tensors.count"]) == (i, len(paths), n_tensors)
        assert value["hybrid_moe.fp8.version"] == 1
        assert next(key for key in value if not key.startswith("GGUF.")) == "hybrid_moe.fp8.version"
        parse_trailer(path)
    assert next(key for key in gguf.GGUFReader(converted()).fields if "GGUF" not in key) == "hybrid_moe.fp8.version"


@pytest.mark.parametrize("dense_type", ["bf16", "q8_0"])
def test_dense_types_equal_the_directory(tmp_path, dense_type):
    path = convert(models.fp8_directory(), tmp_path / "m.gguf", dense_type)[0]
    assert np.array_equal(logits_of(path), logits_of(models.fp8_directory(), dense_type=dense_type))


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("kind", ["one", "split"])
def test_logits_equal_the_directory(kind, use_mmap):
    path = converted() if kind == "one" else split()[0]
    assert np.array_equal(logits_of(path, use_mmap=use_mmap), reference())


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("kind", ["one", "split"])
def test_a_host_that_only_loaded_the_plug_in(kind, use_mmap):
    """llama_cpp.Llama as it is: what any llama.cpp host does once the plug-in is registered."""
    hybrid_moe_ext.register()
    path = converted() if kind == "one" else split()[0]
    before = counters().n_matmuls
    assert np.array_equal(models.logits(llama_cpp.Llama(str(path), use_mmap=use_mmap, **models.OPTIONS)), reference())
    assert counters().n_matmuls > before


@pytest.mark.parametrize("kind", ["one", "split"])
def test_direct_io(kind):
    """O_DIRECT descriptors cannot be read at any offset: the plug-in opens the file anew."""
    import checkpoint_host as host

    hybrid_moe_ext.register()
    paths = [converted()] if kind == "one" else split()
    results, direct = {}, set()

    def look(share: float, _: object) -> bool:
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_DIRECT:
                    direct.add(target)
        return True

    callback = llama_cpp.llama_progress_callback(look)
    for mode in ("NONE", "MMAP", "DIRECT_IO"):
        params = host.params()
        params.load_mode = getattr(llama_cpp, f"LLAMA_LOAD_MODE_{mode}")
        params.progress_callback = callback
        direct.clear()
        model = llama_cpp.llama_model_load_from_file(str(paths[0]).encode(), params)
        assert model, mode
        results[mode] = host.logits(model, models.prompt())
    assert np.array_equal(results["DIRECT_IO"], results["MMAP"]) and np.array_equal(results["NONE"], results["MMAP"])
    assert models.nmse(results["MMAP"].astype(np.float64), reference()) <= 1e-9
    if not direct:
        pytest.skip("this file system has no O_DIRECT: llama.cpp fell back to buffered reads")
    assert direct == {str(path) for path in paths}


@pytest.mark.parametrize("first_mmap", [True, False])
@pytest.mark.parametrize("second_mmap", [True, False])
@pytest.mark.parametrize("swapped", [False, True])
def test_two_models_in_one_process(first_mmap, second_mmap, swapped):
    """The same tensor names and shapes, other codes and scales; both files stay open, so names alone decide nothing."""
    paths = [converted(), other()][:: -1 if swapped else 1]
    with open(paths[0], "rb"), open(paths[1], "rb"):
        first = Llama(paths[0], use_mmap=first_mmap, **models.OPTIONS)
        second = Llama(paths[1], use_mmap=second_mmap, **models.OPTIONS)
        results = [models.logits(first), models.logits(second)]
    first.close()
    assert np.array_equal(models.logits(second), results[1])
    assert np.array_equal(results[swapped], reference())
    assert np.array_equal(results[not swapped], logits_of(models.FOLDER / "other", dense_type="f32"))


def test_the_same_codes_with_other_scales_are_not_guessed(tmp_path):
    """Only copying loads (mmap off) with both files open cannot tell them apart; alone, or mapped, each is right."""
    config = {**fixtures.CONFIG, "quantization_config": fixtures.QUANTIZATION}
    tensors = fixtures.random_tensors(config, "fp8")
    scales = [name for name in tensors if ".experts." in name and name.endswith("_inv")]
    tensors |= {name: (tensors[name][0], tensors[name][1] * np.float32(2)) for name in scales}
    fixtures.write_checkpoint(tmp_path / "m", "fp8", tensors=tensors)
    path = convert(tmp_path / "m", tmp_path / "m.gguf", "f32")[0]
    want = logits_of(tmp_path / "m", dense_type="f32")
    with open(converted(), "rb"):
        assert np.array_equal(logits_of(path), want)
        llm = Llama(path, use_mmap=False, **models.OPTIONS)
        with pytest.raises(CheckpointError, match="these codes with different scales; close the other one"):
            models.logits(llm)
    assert np.array_equal(logits_of(path, use_mmap=False), want)


def test_another_file_moved_onto_a_mapped_one(tmp_path):
    """The mapping keeps the old file, so its old scales go on to be right, before and after the first use."""
    path = tmp_path / "m.gguf"
    for first_use in (True, False):
        path.write_bytes(converted().read_bytes())
        llm = Llama(path, **models.OPTIONS)
        if first_use:
            models.logits(llm)
        replacement = tmp_path / "new.gguf"
        replacement.write_bytes(other().read_bytes())
        replacement.rename(path)
        again = Llama(path, **models.OPTIONS)
        assert np.array_equal(models.logits(llm), reference())
        assert np.array_equal(models.logits(again), logits_of(other()))


def n_descriptors(path: Path) -> int:
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names.count(str(path))


@pytest.mark.parametrize("use_mmap", [True, False])
def test_descriptors_are_few_and_closed(use_mmap):
    """Until their first use, the tensors of a copied model share one; afterwards there is none."""
    before = n_descriptors(converted())
    llm = Llama(converted(), use_mmap=use_mmap, **models.OPTIONS)
    assert n_descriptors(converted()) <= before + (not use_mmap)
    models.logits(llm)
    assert n_descriptors(converted()) <= before
    llm.close()


def test_bf16_checkpoint_becomes_an_ordinary_gguf(tmp_path):
    fixtures.write_checkpoint(tmp_path / "m", "BF16")
    path = convert(tmp_path / "m", tmp_path / "m.gguf")[0]
    reader = gguf.GGUFReader(path)
    assert "hybrid_moe.fp8.version" not in reader.fields
    last = max(reader.tensors, key=lambda t: t.data_offset)
    assert path.stat().st_size == -(-(last.data_offset + last.n_bytes) // 64) * 64
    assert not describe_model(path).is_fp8_gguf
    assert np.array_equal(logits_of(path), logits_of(tmp_path / "m"))
    parts = convert(tmp_path / "m", tmp_path / "s.gguf", split_max_size=SPLIT_BYTES)
    assert len(parts) > 3 and np.array_equal(logits_of(parts[0]), logits_of(tmp_path / "m"))


def test_a_host_without_the_plug_in_dies_before_the_first_token():
    """What info and the documents say of it. No text, no result: it never produces garbage."""
    script = "import llama_cpp, sys; m = llama_cpp.Llama(sys.argv[1], n_ctx=64); m.eval([1, 2]); print('alive')"
    done = subprocess.run([sys.executable, "-c", script, str(converted())], capture_output=True, text=True)
    assert done.returncode < 0 and "alive" not in done.stdout


def test_info_explains_the_file():
    for path in (converted(), split()[0]):
        info, directory = describe_model(path), describe_model(models.fp8_directory())
        assert info.is_fp8_gguf and info.fp8_block == (128, 128) and info.experts_on == OURS
        assert info.parts["experts"].types == directory.parts["experts"].types
        assert info.parts["experts"].n_bytes == directory.parts["experts"].n_bytes


def test_command_line(tmp_path, capfd):
    source, out = str(models.fp8_directory()), tmp_path / "m.gguf"
    assert command_line(["convert", source, str(out), "--dense-type", "f32", "--split-max-size", "400K"]) == 0
    said = capfd.readouterr()
    paths = [Path(line) for line in said.out.splitlines()]
    assert len(paths) > 3 and sorted(tmp_path.iterdir()) == paths
    assert "GB/s" in said.err and "crashes before the first token" in said.err
    assert command_line(["info", str(paths[0])]) == 0
    said = capfd.readouterr()
    assert "F8_E4M3" in said.out and "128 x 128" in said.out and "crashes before the first token" in said.out
    texts = []
    for model in (source, str(paths[0])):
        assert command_line(["run", model, "-p", "the", "-n", "8", "--dense-type", "f32"]) == 0
        said = capfd.readouterr()
        texts.append(said.out)
        assert "experts: HybridMoE" in said.err
    assert texts[0] == texts[1]


def test_progress_ends_at_one(tmp_path):
    seen: list[float] = []
    convert(models.fp8_directory(), tmp_path / "m.gguf", progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 20
