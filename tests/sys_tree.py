"""Made-up machines: what Linux shows of them under /sys and /proc, written into a folder.

A machine is a few lines; :data:`MACHINES` holds those that stand for a kind of layout, most of them from
reports about programs that got them wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_numa_moe.limits import ProcessLimits, read_limits
from torch_numa_moe.topology import Topology, read_topology

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def numbers(text: str) -> tuple[int, ...]:
    """``"0-2,8"`` as (0, 1, 2, 8)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


@dataclass(frozen=True)
class Node:
    """A NUMA node: the CPUs that its cpulist names, its memory, its row of distances (None: no file)."""

    cpus: str
    gib: float | None = 32
    free_gib: float = 16
    distances: str | None = None


@dataclass(frozen=True)
class Machine:
    """What the files say. None: the file isn't there."""

    nodes: dict[int, Node]
    online: str | None
    cores: tuple[str, ...] = ()  # hardware threads of each core that has several
    allowed: str | None = None  # affinity mask; None: all that are online
    memory_nodes: str | None = None  # Mems_allowed_list; None: all with memory
    isolated: str = ""
    capacities: dict[int, int] = field(default_factory=dict)
    efficiency_cores: str | None = None
    old_sibling_files: bool = False


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def write_tree(machine: Machine, folder: Path) -> tuple[Path, Path]:
    """Writes a machine's files; returns where its /sys and its /proc are."""
    root, proc = folder / "sys", folder / "proc"
    system = root / "devices/system"
    root.mkdir()
    if machine.online is not None:
        write(system / "cpu/online", machine.online)
        write(system / "cpu/isolated", machine.isolated)
    siblings_file = "thread_siblings_list" if machine.old_sibling_files else "core_cpus_list"
    core_of = {cpu: core for core in machine.cores for cpu in numbers(core)}
    for cpu in numbers(machine.online or ""):
        write(system / f"cpu/cpu{cpu}/topology" / siblings_file, core_of.get(cpu, str(cpu)))
        if cpu in machine.capacities:
            write(system / f"cpu/cpu{cpu}/cpu_capacity", str(machine.capacities[cpu]))
    if machine.efficiency_cores is not None:
        slow = numbers(machine.efficiency_cores)
        fast = [str(cpu) for cpu in numbers(machine.online or "") if cpu not in slow]
        write(root / "devices/cpu_core/cpus", ",".join(fast))
        write(root / "devices/cpu_atom/cpus", machine.efficiency_cores)
    if machine.nodes:
        with_memory = [str(node) for node, described in machine.nodes.items() if described.gib]
        write(system / "node/online", ",".join(map(str, machine.nodes)))
        write(system / "node/has_memory", ",".join(with_memory))
    for node, described in machine.nodes.items():
        path = system / f"node/node{node}"
        write(path / "cpulist", described.cpus)
        if described.distances is not None:
            write(path / "distance", described.distances)
        if described.gib is not None:
            total, free = (
                int(size * GIB) >> 10 for size in (described.gib, min(described.free_gib, described.gib))
            )
            write(
                path / "meminfo",
                f"Node {node} MemTotal:       {total} kB\n"
                f"Node {node} MemFree:        {free} kB\n"
                f"Node {node} Active(file):     2048 kB\n"
                f"Node {node} Inactive(file):   1024 kB\n"
                f"Node {node} HugePages_Total:     0",
            )
    memory_nodes = machine.memory_nodes
    if memory_nodes is None:
        memory_nodes = (
            ",".join(str(node) for node, described in machine.nodes.items() if described.gib) or "0"
        )
    write(
        proc / "self/status",
        "Name:\tpython\n"
        "Cpus_allowed:\tff\n"
        f"Cpus_allowed_list:\t{allowed_cpus(machine)}\n"
        f"Mems_allowed_list:\t{memory_nodes}",
    )
    write(proc / "meminfo", "MemTotal:       67108864 kB\nMemFree:        33554432 kB")
    return root, proc


def allowed_cpus(machine: Machine) -> str:
    """The affinity mask as a list."""
    return machine.allowed if machine.allowed is not None else machine.online or "0"


def read_machine(machine: Machine, folder: Path) -> tuple[Topology, ProcessLimits]:
    """What the package reads of a machine whose files are written to an empty folder."""
    root, proc = write_tree(machine, folder)
    mask = numbers(allowed_cpus(machine))
    return read_topology(root, proc), read_limits(root, proc, get_affinity=lambda _pid: mask)


def _pairs(first: range, offset: int) -> tuple[str, ...]:
    return tuple(f"{cpu},{cpu + offset}" for cpu in first)


MACHINES = {
    "single socket": Machine({0: Node("0-15", distances="10")}, "0-15", cores=_pairs(range(8), 8)),
    # SMT siblings 64 apart: node 0 has two runs of CPUs.
    "dual Genoa": Machine(
        {0: Node("0-31,64-95", distances="10 32"), 1: Node("32-63,96-127", distances="32 10")},
        "0-127",
        cores=_pairs(range(64), 64),
    ),
    "odd and even": Machine(
        {0: Node("0,2,4,6", distances="10 21"), 1: Node("1,3,5,7", distances="21 10")}, "0-7"
    ),
    # nosmt: the second threads are offline, and the ids that are left have gaps.
    "nosmt": Machine(
        {0: Node("0,2", distances="10 21"), 1: Node("4,6", distances="21 10")},
        "0,2,4,6",
        cores=("0-1", "2-3", "4-5", "6-7"),
    ),
    "adjacent siblings": Machine({0: Node("0-15", distances="10")}, "0-15", cores=("0-7", "8-15")),
    # CPU 2 is listed by its node, but offline.
    "offline CPU": Machine({0: Node("0-3", distances="10 21"), 1: Node("4-7", distances="21 10")}, "0-1,3-7"),
    # Threadripper 2970WX: dies 1 and 3 have no memory controller.
    "2970WX": Machine(
        {
            0: Node("0-5", distances="10 16 16 16"),
            1: Node("6-11", gib=0, distances="16 10 16 14"),
            2: Node("12-17", distances="16 16 10 16"),
            3: Node("18-23", gib=0, distances="16 16 12 10"),
        },
        "0-23",
    ),
    "CXL memory": Machine(
        {0: Node("0-7", distances="10 14"), 1: Node("", gib=128, distances="14 10")}, "0-7"
    ),
    "phantom nodes": Machine({0: Node("0-1"), 1: Node("", gib=0), 2: Node("", gib=0)}, "0-1"),
    "nodes 0 and 2": Machine({0: Node("0-3", distances="10 21"), 2: Node("4-7", distances="21 10")}, "0-7"),
    "four nodes": Machine({node: Node(f"{4 * node}-{4 * node + 3}") for node in range(4)}, "0-15"),
    # Two sockets of four nodes each, siblings 64 apart.
    "NPS4": Machine(
        {node: Node(f"{8 * node}-{8 * node + 7},{64 + 8 * node}-{64 + 8 * node + 7}") for node in range(8)},
        "0-127",
        cores=_pairs(range(64), 64),
    ),
    "lopsided": Machine({0: Node("0-2"), 1: Node("3")}, "0-3"),
    "hybrid ARM": Machine(
        {0: Node("0-7")}, "0-7", capacities={0: 446, 1: 446, 2: 446, 3: 446, 4: 871, 5: 871, 6: 1024, 7: 1024}
    ),
    "hybrid x86": Machine(
        {0: Node("0-31")},
        "0-31",
        cores=tuple(f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)),
        efficiency_cores="16-31",
    ),
    # A container of two CPUs that is shown the host's /sys.
    "host's /sys": Machine({0: Node("0-35"), 1: Node("36-71")}, "0-71", allowed="3,5"),
    "memory of one node": Machine({0: Node("0-3"), 1: Node("4-7")}, "0-7", memory_nodes="0"),
    "CPUs of one node": Machine({0: Node("0-3"), 1: Node("4-7")}, "0-7", allowed="4-7"),
    "no nodes": Machine({}, "0-3"),
    "no /sys": Machine({}, None, allowed="0-2"),
    "isolated": Machine({0: Node("0-15")}, "0-15", isolated="8-15"),
}
