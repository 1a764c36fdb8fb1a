"""experts_memory=copy: the same logits, one copy per process whoever loads it, gone with its last user, honest reports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import models
from hybrid_moe_ext import Llama, OptionError
from hybrid_moe_ext.convert import convert
from hybrid_moe_ext.machine import copies, machine

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "cpp"


def fp8_gguf() -> Path:
    path = models.FOLDER / "memory-fp8.gguf"
    if not path.exists():
        convert(models.fp8_directory(), path)
    return path


MODELS = {
    "directory": models.fp8_directory,
    "gguf": lambda: models.twin("BF16"),
    "fp8-gguf": fp8_gguf,
}


def load(path: Path, memory: str, **more) -> Llama:
    return Llama(path, experts_memory=memory, **models.OPTIONS, **more)


@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_gives_the_same_logits_and_is_shared_and_released(kind):
    path = MODELS[kind]()
    assert copies().tensors == 0
    plain = load(path, "mmap")
    expected = models.logits(plain)
    plain.close()
    assert copies().tensors == 0

    first = load(path, "copy")
    assert copies().planned > 0 and copies().copied == 0  # nothing is read before it is used
    assert np.array_equal(models.logits(first), expected)
    alone = copies()
    assert alone.tensors == 2 * 3 and 0 < alone.copied <= alone.planned
    there = [node["there"] for node in alone.nodes]
    if None not in there:
        assert sum(there) >= alone.copied  # whole pages

    second = load(path, "copy")
    assert np.array_equal(models.logits(second), expected)
    assert copies() == alone  # two models of one file: memory grew once
    first.close()
    assert copies() == alone
    assert np.array_equal(models.logits(second), expected)
    second.close()
    assert copies().tensors == 0 and copies().copied == 0


def test_a_file_that_was_written_to_is_another_file(tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(models.twin("BF16"), path)
    first = load(path, "copy")
    os.utime(path, ns=(1, 1))
    second = load(path, "copy")
    assert copies().tensors == 2 * 2 * 3
    for llm in (first, second):
        llm.close()


def test_mapped_and_copied_models_of_one_file_do_not_mix():
    mapped, copied = load(models.twin("BF16"), "mmap"), load(models.twin("BF16"), "copy")
    assert np.array_equal(models.logits(mapped), models.logits(copied))
    assert copies().tensors == 2 * 3
    copied.close()
    mapped.close()


def test_without_mmap_a_directory_is_copied_and_a_gguf_refused():
    with pytest.raises(OptionError, match="needs use_mmap=True for a GGUF"):
        load(models.twin("BF16"), "copy", use_mmap=False)
    llm = load(models.fp8_directory(), "copy", use_mmap=False)
    models.logits(llm)
    assert copies().copied > 0
    llm.close()


def test_pages_on_every_node_are_counted():
    llm = load(models.twin("F32"), "copy")
    models.logits(llm)
    found = copies()
    assert [node["id"] for node in found.nodes] == [node["id"] for node in machine().nodes]
    assert sum(node["wanted"] for node in found.nodes) + found.anywhere == found.copied
    llm.close()


def python(script: str, **environ: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=TESTS)


PRETEND = """if 1:
    import json, tempfile, pathlib
    import numpy as np
    from fake_machine import FakeMachine
    from hybrid_moe_ext import _native
    fake = FakeMachine(pathlib.Path(tempfile.mkdtemp()), 6, node=lambda cpu: 0 if cpu < 3 else 700 + cpu // 5)
    _native.check(_native.library().hybrid_moe_pretend_machine(bytes(fake.sys), bytes(fake.proc), b"0-5"))
    import models, hybrid_moe_ext as h
    from hybrid_moe_ext.machine import copies
    for path in (models.fp8_directory(), models.twin("F32")):
        plain, copied = h.Llama(path, **models.OPTIONS), h.Llama(path, experts_memory="copy", **models.OPTIONS)
        tokens = models.prompt(100)
        assert np.array_equal(models.logits(plain, tokens), models.logits(copied, tokens)), path
        found = copies()
        print(json.dumps([found.nodes, found.troubles]))
        plain.close(), copied.close()
"""


@pytest.mark.parametrize("team", ["pool", "auto"])
def test_nodes_that_are_not_here_degrade_and_the_answer_stays_right(team):
    """3 nodes, of which at most one is real: rows are divided, pages cannot be placed, which is told once per node."""
    done = python(PRETEND, HYBRID_MOE_TEAM=team)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 2
    for nodes, troubles in reports:
        assert [node["id"] for node in nodes] == [0, 700, 701]
        assert all(node["wanted"] > 0 for node in nodes)
        for i in (700, 701):
            assert sum(f"NUMA node {i}" in trouble for trouble in troubles) == 1


STOCK = """if 1:
    import llama_cpp, models
    from hybrid_moe_ext import _native
    llama_cpp.llama_backend_init()
    load = _native.ggml_function("ggml_backend_load", _native.ctypes.c_void_p, [_native.ctypes.c_char_p])
    assert load(str(_native.library_path()).encode())
    options = models.OPTIONS | {"verbose": True}
    llm = llama_cpp.Llama(str(models.twin("BF16")), use_mmap=True, **options)
    models.logits(llm)
    llm.close()
"""


@pytest.mark.parametrize("mmap", [True, False])
def test_stock_hosts_by_environment(tmp_path, mmap):
    """The report at the end of the process says what was held; where the option can do less, the log says so."""
    stats = tmp_path / "stats"
    script = STOCK if mmap else STOCK.replace("use_mmap=True", "use_mmap=False")
    done = python(script, HYBRID_MOE_EXPERTS_MEMORY="copy", HYBRID_MOE_STATS=str(stats), HYBRID_MOE_TEAM="auto")
    assert done.returncode == 0, done.stderr
    told = json.loads(stats.read_text())
    assert told["layers"] > 0
    if mmap:
        assert told["copies"]["tensors"] == 6 and told["copies"]["copied"] > 0 and told["copies"]["troubles"] == []
    else:
        assert told["copies"]["tensors"] == 0 and "mmap is off" in told["copies"]["troubles"][0]
        assert done.stderr.count("mmap is off") == 1


def test_an_unknown_value(tmp_path):
    with pytest.raises(OptionError, match="choose one of mmap, copy"):
        load(models.twin("BF16"), "gpu")
    done = python(STOCK, HYBRID_MOE_EXPERTS_MEMORY="gpu")
    assert (
        done.returncode != 0
        and "HYBRID_MOE_EXPERTS_MEMORY=gpu is not available here; choose mmap, copy or pinned" in done.stderr
    )


def test_placement_in_cpp(tmp_path):
    """Division of rows, lanes, sharing, page counts and whole layers, under the address and undefined-behaviour sanitizers."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no compiler (c++) on this machine")
    sources = [TESTS / "cpp" / "test_placement.cpp", *SOURCES.glob("threads/*.cpp"), *SOURCES.glob("moe/*.cpp")]
    sources.append(SOURCES / "kernels" / "weight_types.cpp")
    command = [compiler, "-std=c++20", "-O1", "-g", "-w", f"-I{SOURCES}", *sources, "-o", tmp_path / "placement"]
    sanitized = [*command, "-pthread", "-ldl", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    built = subprocess.run(sanitized, capture_output=True, text=True)
    if built.returncode != 0 and "asan" in built.stderr:
        built = subprocess.run([*command, "-pthread", "-ldl"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "placement"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
