"""Page placement on two NUMA nodes, in a virtual machine: tests/cpp/test_placement.cpp as its only process.

By hand, some minutes with the compilation:

    NUMA_GUEST_KERNEL=/path/to/vmlinuz pytest -m slow tests/numa_guest

Any x86-64 Linux kernel with NUMA and a serial console built in will do; Debian's is in the package linux-image-cloud-amd64
(`apt-get download` and `dpkg -x`, nothing need be installed). Needed besides: qemu-system-x86_64, and a C++ compiler with a
static libstdc++."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
SOURCES = TESTS.parent / "cpp"
KERNEL = os.environ.get("NUMA_GUEST_KERNEL")
QEMU = shutil.which("qemu-system-x86_64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KERNEL is None, reason="NUMA_GUEST_KERNEL names no kernel to boot"),
    pytest.mark.skipif(QEMU is None, reason="no qemu-system-x86_64 on this machine"),
]


def archive(files: dict[str, bytes]) -> bytes:
    """A cpio archive in the format that the kernel unpacks ("newc")."""
    out = b""
    for number, (name, data) in enumerate([*files.items(), ("TRAILER!!!", b"")]):
        mode = 0o100755 if data else 0
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return out


@pytest.fixture(scope="module")
def initramfs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guest")
    program = folder / "init"
    sources = [
        TESTS / "cpp" / "test_placement.cpp",
        *sorted((SOURCES / "threads").glob("*.cpp")),
        *sorted((SOURCES / "moe").glob("*.cpp")),
    ]
    command = ["c++", "-std=c++20", "-O1", "-w", "-static", f"-I{SOURCES}", *sources, "-o", program, "-pthread"]
    subprocess.run(command, check=True)
    path = folder / "initramfs"
    path.write_bytes(archive({"init": program.read_bytes()}))
    return path


def boot(initramfs: Path, nodes: list[tuple[str, int]], arguments: str = "") -> str:
    """`nodes`: (CPUs, MiB) of each."""
    n_cpus = 1 + max(int(cpus.split("-")[-1]) for cpus, _ in nodes)
    # An emulated CPU: KVM inside a virtual machine, as CI has it, boots on some hosts and hangs on others.
    command = [QEMU, "-accel", "tcg", "-cpu", "qemu64", "-smp", n_cpus]
    command += ["-m", f"{sum(mib for _, mib in nodes)}M", "-kernel", KERNEL, "-initrd", initramfs]
    for i, (cpus, mib) in enumerate(nodes):
        command += ["-object", f"memory-backend-ram,id=m{i},size={mib}M"]
        command += ["-numa", f"node,nodeid={i},cpus={cpus},memdev=m{i}"]
    command += ["-append", f"console=ttyS0 quiet panic=-1 {arguments}"]
    command += ["-display", "none", "-serial", "stdio", "-monitor", "none", "-nic", "none", "-no-reboot"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr


def test_two_equal_nodes(initramfs):
    out = boot(initramfs, [("0-1", 1536), ("2-3", 1536)])
    assert "2 nodes: pages and threads are where they should be" in out and "\nok" in out, out
    assert '"cpus": [0, 2, 1, 3]' in out


def test_two_unequal_nodes(initramfs):
    """Three cores and one: rows go three to one."""
    out = boot(initramfs, [("0-2", 2048), ("3", 1024)])
    assert "2 nodes: pages and threads are where they should be" in out and "\nok" in out, out
    assert '{"id": 0, "wanted": 25165824, "there": 25165824}, {"id": 1, "wanted": 8388608, "there": 8388608}' in out


def test_reserved_huge_pages(initramfs):
    """With a pool of huge pages the copies come out of it."""
    out = boot(initramfs, [("0-1", 1536), ("2-3", 1536)], "hugepages=64")
    assert "2 nodes: pages and threads are where they should be" in out and "\nok" in out, out
    assert '"huge_pages": 33554432' in out


def test_one_node_in_a_guest(initramfs):
    out = boot(initramfs, [("0-1", 3072)])
    assert "nodes: pages" not in out and "\nok" in out, out
