"""Reading made-up /sys trees."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from sys_tree import GIB, MACHINES, Machine, Node, numbers, read_machine, write, write_tree
from torch_numa_moe.sysfs import format_list, parse_list
from torch_numa_moe.topology import NumaNode, read_topology

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0-1,8,10-11\n", [0, 1, 8, 10, 11]),
        ("3,1,2-3", [1, 2, 3]),
        ("", []),
        ("\n", []),
        ("3-1", []),
        ("x", None),
        ("0-", None),
        ("-3", None),
        ("0-99999999999", None),
        ("0,1-2-3", None),
    ],
)
def test_lists(text: str, expected: list[int] | None) -> None:
    assert parse_list(text) == expected


@pytest.mark.parametrize("text", ["0", "0-3", "0-1,8,10-11", "5,7,9"])
def test_lists_are_written_as_the_kernel_writes_them(text: str) -> None:
    assert format_list(reversed(numbers(text))) == text
    assert format_list([]) == "none"


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_read_whole(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    topology, _ = read_machine(machine, tmp_path)
    online = numbers(machine.online if machine.online is not None else machine.allowed or "")
    assert tuple(cpu.id for cpu in topology.cpus) == online
    assert [node.id for node in topology.nodes] == (list(machine.nodes) or [0])
    for node in topology.nodes:
        assert set(node.cpus) <= set(online)
        assert all(topology.cpu(cpu).node == node.id for cpu in node.cpus)
    for cpu in topology.cpus:
        assert cpu.id in cpu.siblings
        assert all(topology.cpu(sibling).siblings == cpu.siblings for sibling in cpu.siblings)
        assert set(cpu.siblings) <= set(online)


def test_interleaved_numbers(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["dual Genoa"], tmp_path)
    assert topology.node(0).cpus == (*range(32), *range(64, 96))
    assert topology.node(1).cpus == (*range(32, 64), *range(96, 128))
    assert topology.node(0).distances == {0: 10, 1: 32}
    assert topology.node(1).distances == {0: 32, 1: 10}
    assert topology.cpu(70).siblings == (6, 70)
    assert topology.cpu(70).node == 0
    assert topology.notes == ()
    assert topology.isolated == ()


def test_memory(tmp_path: Path) -> None:
    topology, _ = read_machine(Machine({0: Node("0-3", gib=32, free_gib=1.5)}, "0-3"), tmp_path)
    assert topology.nodes == (
        NumaNode(0, (0, 1, 2, 3), 32 * GIB, free_bytes=3 * GIB // 2, cached_bytes=3 << 20, distances={}),
    )


def test_offline_cpus_are_not_there(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["offline CPU"], tmp_path)
    assert topology.node(0).cpus == (0, 1, 3)
    with pytest.raises(KeyError):
        topology.cpu(2)
    with pytest.raises(KeyError):
        topology.node(7)


def test_second_threads_that_are_offline_are_no_siblings(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["nosmt"], tmp_path)
    assert [cpu.siblings for cpu in topology.cpus] == [(0,), (2,), (4,), (6,)]


def test_older_name_of_the_sibling_file(tmp_path: Path) -> None:
    machine = Machine({0: Node("0-3")}, "0-3", cores=("0,2", "1,3"), old_sibling_files=True)
    topology, _ = read_machine(machine, tmp_path)
    assert [cpu.siblings for cpu in topology.cpus] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_nodes_without_memory_or_cpus(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["2970WX"], tmp_path)
    assert [node.has_memory for node in topology.nodes] == [True, False, True, False]
    (tmp_path / "second").mkdir()
    topology, _ = read_machine(MACHINES["CXL memory"], tmp_path / "second")
    assert topology.node(1) == NumaNode(
        1, (), 128 * GIB, free_bytes=16 * GIB, cached_bytes=3 << 20, distances={0: 14, 1: 10}
    )


def test_distances_are_in_order_of_the_node_numbers(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["nodes 0 and 2"], tmp_path)
    assert topology.node(2).distances == {0: 21, 2: 10}


def test_memory_that_is_not_told(tmp_path: Path) -> None:
    root, proc = write_tree(Machine({0: Node("0-1", gib=None), 1: Node("2-3", gib=None)}, "0-3"), tmp_path)
    # has_memory is empty: neither node has any. Without that file, it is taken for granted.
    assert [node.memory_bytes for node in read_topology(root, proc).nodes] == [0, 0]
    (root / "devices/system/node/has_memory").unlink()
    nodes = read_topology(root, proc).nodes
    assert [node.memory_bytes for node in nodes] == [None, None]
    assert all(node.has_memory for node in nodes)


def test_hybrid(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["hybrid ARM"], tmp_path)
    assert [cpu.capacity for cpu in topology.cpus] == [446, 446, 446, 446, 871, 871, 1024, 1024]
    assert [cpu.efficiency for cpu in topology.cpus] == [True] * 6 + [False] * 2
    (tmp_path / "second").mkdir()
    topology, _ = read_machine(MACHINES["hybrid x86"], tmp_path / "second")
    assert [cpu.id for cpu in topology.cpus if cpu.efficiency] == list(range(16, 32))
    assert {cpu.capacity for cpu in topology.cpus} == {None}


def test_equal_capacities_say_nothing(tmp_path: Path) -> None:
    machine = Machine({0: Node("0-3")}, "0-3", capacities=dict.fromkeys(range(4), 1024))
    topology, _ = read_machine(machine, tmp_path)
    assert {(cpu.capacity, cpu.efficiency) for cpu in topology.cpus} == {(None, False)}


def test_isolated(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["isolated"], tmp_path)
    assert topology.isolated == tuple(range(8, 16))


def test_without_nodes_there_is_one(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["no nodes"], tmp_path)
    assert topology.nodes == (NumaNode(0, (0, 1, 2, 3), 64 * GIB),)
    assert topology.notes == ("the kernel tells of no NUMA node: taken as one",)


def test_without_sys_the_allowed_cpus_are_the_machine(tmp_path: Path) -> None:
    topology, _ = read_machine(MACHINES["no /sys"], tmp_path)
    assert [cpu.id for cpu in topology.cpus] == [0, 1, 2]
    assert topology.nodes[0].cpus == (0, 1, 2)
    assert topology.notes[0] == "/sys tells of no CPUs: taken as those that this process may use"


def test_with_nothing_at_all(tmp_path: Path) -> None:
    topology = read_topology(tmp_path / "nothing", tmp_path / "nowhere")
    assert len(topology.cpus) == os.cpu_count()
    assert topology.nodes[0].memory_bytes is None
    assert topology.notes[0].startswith("neither /sys nor /proc tells of CPUs")


def test_damaged_files(tmp_path: Path) -> None:
    root, proc = write_tree(Machine({0: Node("0-1"), 1: Node("2-3")}, "0-3"), tmp_path)
    node = root / "devices/system/node/node1"
    (node / "cpulist").write_bytes(b"\xff\xfe2-3")
    write(node / "distance", "10 what")
    write(node / "meminfo", "Node 1 MemTotal: much kB\nMemTotal\n:\nNode 1 MemFree:")
    write(root / "devices/system/cpu/cpu0/topology/core_cpus_list", "zero")
    topology = read_topology(root, proc)
    assert topology.node(1).cpus == ()
    assert topology.node(1).distances == {}
    assert topology.node(1).memory_bytes is None
    assert topology.cpu(0).siblings == (0,)
    assert topology.notes == (
        "the CPUs of NUMA node 1 can't be read: taken as none",
        "CPUs 2-3 belong to no NUMA node",
    )


def test_nodes_are_found_without_the_list_of_them(tmp_path: Path) -> None:
    root, proc = write_tree(MACHINES["nodes 0 and 2"], tmp_path)
    (root / "devices/system/node/online").unlink()
    write(root / "devices/system/node/nodelist/junk", "")
    write(root / "devices/system/node/power/control", "auto")
    assert [node.id for node in read_topology(root, proc).nodes] == [0, 2]


def test_this_machine() -> None:
    """Against what Python itself says, where /sys is the kernel's own."""
    topology = read_topology()
    assert {cpu.id for cpu in topology.cpus} >= os.sched_getaffinity(0)
    assert topology.nodes
    assert sum(len(node.cpus) for node in topology.nodes) <= len(topology.cpus)
