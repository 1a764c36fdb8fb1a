"""The CUDA part without a GPU: arithmetic on the CPU, what was compiled, the driver API against a fake driver. On a machine with
an NVIDIA GPU also the real kernels (test_on_real_devices)."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from checkpoint_fixtures import E4M3
from conftest import ROOT
from hybrid_moe_ext import _native, library_path
from hybrid_moe_ext.checkpoint.fp8 import f32_to_bf16
from ptx_machine import Kernel, Memory, job

CPP = ROOT / "tests" / "cpp"
ENTRIES = ("hybrid_moe_fp8_to_bf16", "hybrid_moe_fp8_to_f16")
KERNELS = _native.library().hybrid_moe_cuda_kernels().decode().split()
needs_kernels = pytest.mark.skipif(not KERNELS, reason="the plug-in was built without nvcc, so it has no CUDA kernels")
CUDA_EM, PTX, ELF = 190, 1, 2  # the machine of GPU code in ELF; kinds of entries of a fatbin


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **environ}
    env.pop("LD_PRELOAD", None)
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)


def tools() -> None:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no CMake or no C++ compiler on this machine")


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    tools()
    build = tmp_path_factory.mktemp("cuda")
    for command in (["-S", CPP, "-B", build], ["--build", build, "--target", "cuda-tests"]):
        done = run("cmake", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    return build


def test_arithmetic_and_indices_on_the_cpu(programs):
    """Every code times thousands of scales against float64; ragged matrices and unaligned ones in exact memory."""
    done = run(programs / "test-cuda-body")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr


def test_driver_calls_against_a_fake_driver(programs):
    """Order, contexts, every call failing once, undone pinning, wrong input, old and missing drivers."""
    fakes = [programs / fake / "libcuda.so.1" for fake in ("fake-cuda", "fake-cuda-old")]
    done = run(programs / "test-cuda-device", *fakes)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr


def test_declarations_agree_with_the_toolkit(programs):
    if not (programs / "check-cuda-header").exists():
        pytest.skip("no cuda.h on this machine to compare our declarations with")
    done = run(programs / "check-cuda-header")
    assert done.returncode == 0 and done.stdout.startswith("cuda.h of CUDA "), done.stdout


def test_the_program_for_real_devices_finds_faults(programs):
    """On the fake driver, by the name and the way that the real one is found."""
    done = run(programs / "run-cuda-kernel", "quick", LD_LIBRARY_PATH=str(programs / "fake-cuda"))
    if not KERNELS:
        assert done.returncode == 77 and "built without CUDA kernels" in done.stdout
        return
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr
    assert "20 matrices as on the CPU" in done.stdout and "fake device" in done.stdout
    old = run(programs / "run-cuda-kernel", "quick", LD_LIBRARY_PATH=str(programs / "fake-cuda-old"))
    assert old.returncode == 1 and "has no function cuDevicePrimaryCtxRelease_v2" in old.stdout


def test_on_real_devices(programs):
    done = run(programs / "run-cuda-kernel")
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().removeprefix("skipped: "))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr


def fatbin_entries() -> list[tuple[int, int, bytes]]:
    """(kind, architecture, content) of everything in the fatbin inside the plug-in."""
    library = library_path().read_bytes()
    start = library.index(struct.pack("<IHH", 0xBA55ED50, 1, 16))
    (size,) = struct.unpack_from("<Q", library, start + 8)
    at, end, entries = start + 16, start + 16 + size, []
    while at < end:
        kind, _, header, content = struct.unpack_from("<HHIQ", library, at)
        (architecture,) = struct.unpack_from("<I", library, at + 28)
        entries.append((kind, architecture, library[at + header : at + header + content]))
        at += header + content
    assert at == end
    return entries


@needs_kernels
def test_architectures_and_entry_points_in_the_library():
    entries = fatbin_entries()
    names = {PTX: "compute_", ELF: "sm_"}
    assert sorted(names[kind] + str(architecture) for kind, architecture, _ in entries) == sorted(KERNELS)
    for kind, architecture, content in entries:
        if kind == ELF:
            assert content[:4] == b"\x7fELF" and struct.unpack_from("<H", content, 18) == (CUDA_EM,)
            assert all(b".text." + entry.encode() + b"\0" in content for entry in ENTRIES)
        else:
            assert f".target sm_{architecture}" in content.decode(errors="replace")
            assert all(f".entry {entry}(".encode() in content for entry in ENTRIES)


@needs_kernels
def test_every_promised_generation_is_served():
    """Code for the generation itself where nvcc has it, and PTX that later ones compile."""
    own = {int(name[3:]) for name in KERNELS if name.startswith("sm_")}
    ptx = {int(name[8:]) for name in KERNELS if name.startswith("compute_")}
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        known = {int(a) for a in re.findall(r"sm_(\d+)\b", run(nvcc, "--list-gpu-code").stdout)}
        assert own == known & {75, 80, 86, 89, 90, 120}
    assert ptx == {min(own), max(own)}
    for generation in range(min(own), 200):
        same_major = any(a // 10 == generation // 10 and a <= generation for a in own)
        assert same_major or any(p <= generation for p in ptx)


def ptx_texts() -> list[str]:
    """The PTX for the oldest generation, from the fatbin and as the text beside it."""
    library = library_path().read_bytes()
    starts = [m.start() for m in re.finditer(rb"\n\.version [0-9.]+\n\.target sm_", library)]
    return [library[start : library.index(b"\0", start)].decode() for start in starts]


@needs_kernels
def test_ptx_uses_what_every_generation_has():
    texts = ptx_texts()
    assert len(texts) == len({k for k in KERNELS if k.startswith("compute_")}) + 1
    for text in texts:
        for entry in ENTRIES:  # sizeof(Fp8Job)
            assert re.search(rf"\.param \.align 8 \.b8 {entry}_param_0\[64\]", text)
        # No other floating-point instruction: no FP8, BF16 or F16, nothing fused, no subnormals flushed. Without ".rn" the
        # driver's compiler might fuse.
        floats = set(re.findall(r"\b(?:\w+\.)+(?:b?f16|b?f16x2|f32|f64|e4m3|e4m3x2|e5m2)\b", text))
        assert {"mul.rn.f32", "add.rn.f32"} <= floats
        assert floats <= {"mul.rn.f32", "add.rn.f32", "ld.global.f32", "mov.f32", "mov.b32.f32", "selp.f32"}, floats
        assert text.count("ld.global.v4.u32") == 2 and text.count("st.global.v4.u32") == 4  # wide, in both kernels


def expected_halves(entry: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same product by NumPy, for codes and scales of one shape."""
    with np.errstate(all="ignore"):
        product = E4M3[codes].astype(np.float32) * scales
        halves = f32_to_bf16(product) if entry.endswith("bf16") else product.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(product), np.uint16(0x7FC0 if entry.endswith("bf16") else 0x7E00), halves)


def run_ptx(
    kernel: Kernel, entry: str, shape: tuple[int, int], block: tuple[int, int], codes_at: int, out_at: int
) -> None:
    """All threads of the grid on random codes and scales, in memory of the exact size."""
    rng = np.random.default_rng(shape[1] * 7 + codes_at)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes.reshape(-1)[: min(256, codes.size)] = np.arange(min(256, codes.size), dtype=np.uint8)
    grid = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    scales = rng.integers(0, 2**32, grid, np.uint32).view(np.float32)  # NaN, infinities and subnormals too
    ordinary = rng.random(grid) < 0.7
    scales = np.where(ordinary, rng.standard_normal(grid).astype(np.float32) * np.float32(0.01), scales)
    memory = Memory()
    memory.place(0x10000 + codes_at, codes.tobytes())
    memory.place(0x80000, scales.tobytes())
    out = memory.place(0x100000 + out_at, bytes(codes.size * 2))
    parameters = job(0x10000 + codes_at, 0x80000, 0x100000 + out_at, *shape, *block)
    for i_thread in range(-(-codes.size // 4096) * 256):
        kernel.run(memory, parameters, i_thread // 256, i_thread % 256)
    by = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: shape[0], : shape[1]]
    assert np.array_equal(np.frombuffer(out, np.uint16).reshape(shape), expected_halves(entry, codes, by))


def run_far_ptx(kernel: Kernel, entry: str, shape: tuple[int, int], first: int, codes_at: int) -> None:
    """Four threads of a matrix of more than 2^32 elements, from element `first` on; only their memory exists."""
    memory, codes = Memory(), np.arange(1, 65, dtype=np.uint8)
    code_base, scale_base, out_base = (1 << 40) + codes_at, 1 << 44, 1 << 48
    memory.place(code_base + first, codes.tobytes())
    out = memory.place(out_base + first * 2, bytes(128))
    rows, columns = np.divmod(np.arange(first, first + 64), shape[1])
    numbers = rows // 128 * -(-shape[1] // 128) + columns // 128
    for number in np.unique(numbers):
        memory.place(scale_base + int(number) * 4, np.float32(number % 1000).tobytes())
    for i_thread in range(first // 16, first // 16 + 4):
        kernel.run(memory, job(code_base, scale_base, out_base, *shape, 128, 128), i_thread // 256, i_thread % 256)
    expected = expected_halves(entry, codes, (numbers % 1000).astype(np.float32))
    assert np.array_equal(np.frombuffer(out, np.uint16), expected)


@needs_kernels
@pytest.mark.parametrize("entry", ENTRIES)
def test_compiled_ptx_computes_the_right_values(entry):
    """What nvcc made of the kernel, interpreted: all codes, partial blocks, unaligned matrices, threads beyond the end, and
    rows whose elements are counted beyond 2^32. Every instruction is executed."""
    for text in ptx_texts():
        kernel = Kernel(text, entry)
        if unknown := kernel.unknown_instructions():
            pytest.skip(f"this nvcc uses instructions that tests/ptx_machine.py does not know: {', '.join(unknown)}")
        run_ptx(kernel, entry, (20, 256), (3, 128), 0, 0)
        run_ptx(kernel, entry, (5, 33), (2, 5), 0, 0)
        run_ptx(kernel, entry, (3, 100), (1, 100), 1, 2)
        run_ptx(kernel, entry, (4, 128), (128, 48), 0, 8)
        for codes_at in (0, 1):
            run_far_ptx(kernel, entry, (70001, 70000), 69998 * 70000 - 32, codes_at)
            run_far_ptx(kernel, entry, (2, 2**33), 2**33 - 32, codes_at)
            run_far_ptx(kernel, entry, (2**33, 3), 3 * 2**33 - 64, codes_at)
        unused = set(range(len(kernel.code))) - kernel.executed
        assert not [kernel.code[i] for i in unused]


@needs_kernels
def test_ptx_for_old_drivers_is_valid(tmp_path):
    """nvcc writes its own PTX version, which older drivers refuse: one copy has the version that sm_75 came with."""
    if "compute_75" not in KERNELS:
        pytest.skip("this nvcc has no sm_75")
    old = [text for text in ptx_texts() if text.startswith("\n.version 6.3\n.target sm_75")]
    assert len(old) == 1
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas on this machine to assemble it with")
    (tmp_path / "old.ptx").write_text(old[0])
    done = run(ptxas, "-arch=sm_75", tmp_path / "old.ptx", "-o", tmp_path / "old.cubin")
    assert done.returncode == 0, done.stderr


def test_no_cuda_library_is_linked():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf on this machine")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run(readelf, "-d", library_path()).stdout)
    assert needed and not [name for name in needed if "cu" in name.lower() or "nv" in name.lower()]
