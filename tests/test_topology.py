"""What threads get of a machine, read from trees like /sys of machines that are not here."""

import os
from pathlib import Path

import pytest

from fake_machine import FakeMachine, write_file
from hybrid_moe_ext import OptionError
from hybrid_moe_ext.machine import Machine, default_threads, machine


def read(fake: FakeMachine, cpus: str) -> Machine:
    return machine(fake.sys, fake.proc, cpus)


def test_siblings_of_a_core_come_last(tmp_path):
    """The usual numbering: the second half of the CPUs are the first half's siblings."""
    m = read(FakeMachine(tmp_path, 8, core=lambda cpu: cpu % 4), "0-7")
    assert m.cpus == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (m.cores, m.usable, m.default_threads, len(m.nodes)) == (4, 8, 4, 1)


def test_siblings_numbered_in_pairs_come_last_too(tmp_path):
    m = read(FakeMachine(tmp_path, 8, core=lambda cpu: cpu // 2), "0-7")
    assert m.cpus == [0, 2, 4, 6, 1, 3, 5, 7]


def test_the_old_name_of_the_siblings_file(tmp_path):
    fake = FakeMachine(tmp_path, 4, core=lambda cpu: cpu // 2)
    for cpu in range(4):
        folder = fake.sys / f"devices/system/cpu/cpu{cpu}/topology"
        (folder / "core_cpus_list").rename(folder / "thread_siblings_list")
    assert read(fake, "0-3").cpus == [0, 2, 1, 3]


def test_two_nodes_take_turns(tmp_path):
    """2 nodes x 4 cores x 2 threads, numbered like most servers."""
    fake = FakeMachine(
        tmp_path, 16, core=lambda cpu: cpu % 8, l3=lambda cpu: cpu % 8 // 4, node=lambda cpu: cpu % 8 // 4
    )
    m = read(fake, "0-15")
    assert m.cpus == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert m.nodes == [{"id": 0, "cores": 4, "memory": True}, {"id": 1, "cores": 4, "memory": True}]
    assert (m.cores, m.caches, m.default_threads) == (8, 2, 8)


def test_eight_caches_take_turns(tmp_path):
    """8 core complexes of 4 cores on one node: 8 threads get a cache and its link to memory each."""
    m = read(FakeMachine(tmp_path, 32, l3=lambda cpu: cpu // 4), "0-31")
    assert m.cpus == [c * 4 + i for i in range(4) for c in range(8)]
    assert m.caches == 8


def test_caches_within_nodes(tmp_path):
    """2 nodes x 2 caches x 2 cores."""
    m = read(FakeMachine(tmp_path, 8, l3=lambda cpu: cpu // 2, node=lambda cpu: cpu // 4), "0-7")
    assert m.cpus == [0, 4, 2, 6, 1, 5, 3, 7]


def test_offline_cpus_are_left_out(tmp_path):
    fake = FakeMachine(tmp_path, 8, core=lambda cpu: cpu % 4, online=[0, 1, 2, 4, 5])
    m = read(fake, "0-7")
    assert m.cpus == [0, 1, 2, 4, 5]
    assert m.cores == 3


def test_a_cpuset_that_leaves_part_of_two_nodes(tmp_path):
    """Unequal parts; of core 5 only the second sibling may be used, which then stands for the core."""
    fake = FakeMachine(tmp_path, 16, core=lambda cpu: cpu % 8, node=lambda cpu: cpu % 8 // 4)
    m = read(fake, "1-3,9,13")
    assert m.cpus == [1, 13, 2, 3, 9]
    assert [node["cores"] for node in m.nodes] == [3, 1]
    assert m.default_threads == 4


def test_a_node_outside_the_cpuset_is_none_of_ours(tmp_path):
    m = read(FakeMachine(tmp_path, 8, node=lambda cpu: cpu // 4), "4-7")
    assert m.nodes == [{"id": 1, "cores": 4, "memory": True}]


def test_nodes_whose_memory_is_forbidden_or_absent(tmp_path):
    fake = FakeMachine(tmp_path, 6, node=lambda cpu: cpu // 2)
    write_file(fake.proc / "self/status", "Mems_allowed_list:\t0-1")
    write_file(fake.sys / "devices/system/node/node1/meminfo", "Node 1 MemTotal:       0 kB")
    assert [node["memory"] for node in read(fake, "0-5").nodes] == [True, False, False]


@pytest.mark.parametrize(
    ("files", "group", "quota", "usable", "threads"),
    [
        ({}, "0::/", 0, 8, 8),
        ({"cpu.max": "max 100000"}, "0::/", 0, 8, 8),
        ({"cpu.max": "150000 100000"}, "0::/", 1.5, 2, 1),
        ({"cpu.max": "50000 100000"}, "0::/", 0.5, 1, 1),
        ({"cpu.max": "9900000 100000"}, "0::/", 99, 8, 8),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, "0::/a/b", 3, 3, 3),
        ({"unified/a/cpu.max": "200000 100000"}, "0::/a", 2, 2, 2),
        ({"cpu.max": "400000 100000"}, "0::/docker/0123", 4, 4, 4),  # a container: its group is mounted as the root
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/x", 4, 4, 4),
        ({"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
         "4:cpu,cpuacct:/x", 2.5, 3, 2),
        ({"cpuset/x/cpu.max": "100000 100000"}, "4:cpuset:/x", 0, 8, 8),
        ({"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, "4:cpu:/x", 0, 8, 8),
        ({"cpu.max": "nonsense"}, "0::/", 0, 8, 8),
        ({"cpu.max": "100000"}, "0::/", 0, 8, 8),
        ({"cpu.max": "100000 0"}, "no such line", 0, 8, 8),
    ],
)  # fmt: skip
def test_cpu_quota_of_the_cgroup(tmp_path, files, group, quota, usable, threads):
    fake = FakeMachine(tmp_path, 8)
    write_file(fake.proc / "self/cgroup", group)
    for name, text in files.items():
        write_file(fake.sys / "fs/cgroup" / name, text)
    m = read(fake, "0-7")
    assert (m.quota, m.usable, m.default_threads) == (quota, usable, threads)


def test_no_files_at_all(tmp_path):
    m = machine(tmp_path / "sys", tmp_path / "proc", "0-3,8")
    assert m.cpus == [0, 1, 2, 3, 8]
    assert (m.cores, m.default_threads) == (5, 5)
    assert m.nodes == [{"id": 0, "cores": 5, "memory": False}]


@pytest.mark.parametrize("damage", ["", "nonsense", "7-3", "0-", ",", "0,,1", "99999999999999999999", "-1", "\0\0"])
def test_every_damaged_file_leaves_equal_cpus_on_one_node(tmp_path, damage):
    fake = FakeMachine(tmp_path, 4, core=lambda cpu: cpu // 2, l3=lambda cpu: cpu // 2, node=lambda cpu: cpu // 2)
    for folder in (fake.sys, fake.proc):
        for path in folder.rglob("*"):
            if path.is_file():
                path.write_text(damage)
    m = read(fake, "0-3")
    assert sorted(m.cpus) == [0, 1, 2, 3]
    assert (m.cores, len(m.nodes), m.quota, m.default_threads) == (4, 1, 0, 4)


def test_files_of_another_machine_than_the_mask(tmp_path):
    """Containers may show the host's /sys."""
    m = read(FakeMachine(tmp_path, 2), "16-17")
    assert m.cpus == [16, 17]


def test_folders_where_files_should_be(tmp_path):
    fake = FakeMachine(tmp_path, 2)
    for path in (fake.sys / "devices/system/cpu/online", fake.sys / "devices/system/cpu/cpu0/topology/core_cpus_list"):
        path.unlink()
        path.mkdir()
    assert read(fake, "0-1").cpus == [0, 1]


@pytest.mark.parametrize("mask", ["", "x", "1-"])
def test_a_mask_that_is_none(tmp_path, mask):
    with pytest.raises(OptionError, match="such as 0-3,8"):
        machine(tmp_path, tmp_path, mask)


def test_this_machine():
    m = machine()
    assert set(m.cpus) <= os.sched_getaffinity(0)
    assert 1 <= default_threads() == m.default_threads <= m.usable <= len(m.cpus)
    n_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    assert 1 <= len(m.nodes) <= n_nodes
