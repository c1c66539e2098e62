"""What the machine is made of, as Linux tells it under /sys: NUMA nodes, CPUs, cores, distances."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from torch_numa_moe.limits import ProcessLimits, read_limits
from torch_numa_moe.sysfs import format_list, parse_list, read_list, read_number, read_text

__all__ = ["Cpu", "NumaNode", "ProcessLimits", "Topology", "read_limits", "read_topology"]

_KIB = 1024


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node that is online.

    Attributes:
        id: the kernel's number; numbers need not be contiguous.
        cpus: its CPUs that are online, ascending. Empty for a memory expander.
        memory_bytes: its memory; 0 for a node of CPUs alone, None if the kernel doesn't say.
        free_bytes: memory that nobody uses, or None.
        cached_bytes: page cache of files, which the kernel can give up, or None.
        distances: distance to every node including itself, as in ACPI SLIT (10: local); empty if unknown.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None
    free_bytes: int | None = None
    cached_bytes: int | None = None
    distances: dict[int, int] = field(default_factory=dict, hash=False)

    @property
    def has_memory(self) -> bool:
        """Whether memory can be had there; taken for granted where the kernel doesn't say."""
        return self.memory_bytes != 0


@dataclass(frozen=True)
class Cpu:
    """A logical CPU that is online.

    Attributes:
        id: the kernel's number.
        node: the NUMA node that lists it, or None.
        siblings: the online hardware threads of its core, itself included, ascending.
        capacity: speed relative to the machine's fastest core (1024), or None if all are alike or unknown.
        efficiency: whether it is one of the slower cores of a hybrid processor.
    """

    id: int
    node: int | None
    siblings: tuple[int, ...]
    capacity: int | None = None
    efficiency: bool = False


@dataclass(frozen=True)
class Topology:
    """The machine.

    Attributes:
        nodes: NUMA nodes, ascending by id. One node 0 with all CPUs where the kernel tells of none.
        cpus: online CPUs, ascending by id.
        isolated: CPUs that the kernel keeps other programs off (``isolcpus``).
        notes: what could not be read and was made up for, a sentence each.
    """

    nodes: tuple[NumaNode, ...]
    cpus: tuple[Cpu, ...]
    isolated: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def node(self, node_id: int) -> NumaNode:
        """The node with this id; KeyError if there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def cpu(self, cpu_id: int) -> Cpu:
        """The CPU with this id; KeyError if there is none online."""
        for cpu in self.cpus:
            if cpu.id == cpu_id:
                return cpu
        raise KeyError(cpu_id)


def read_topology(root: str | Path = "/sys", proc: str | Path = "/proc") -> Topology:
    """Reads the topology. Never raises: what is missing or unreadable is made up for, and noted.

    Where /sys tells nothing of CPUs or nodes (some sandboxes), there is one node with the CPUs that this
    process may use. /sys may show more than this process can use (containers show the host's):
    :func:`read_limits` tells what it may.

    Args:
        root: where sysfs is.
        proc: where procfs is.
    """
    system = Path(root) / "devices/system"
    notes: list[str] = []
    online = _online_cpus(system, Path(proc), notes)
    nodes = _nodes(system / "node", set(online), notes)
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    homeless = [cpu for cpu in online if cpu not in node_of]
    if not nodes:
        nodes = [NumaNode(0, online, _total_memory(Path(proc)))]
        node_of = dict.fromkeys(online, 0)
        notes.append("the kernel tells of no NUMA node: taken as one")
    elif homeless:
        notes.append(f"CPUs {format_list(homeless)} belong to no NUMA node")
    efficiency = _efficiency_cores(Path(root))
    capacities = {cpu: read_number(system / f"cpu/cpu{cpu}/cpu_capacity") for cpu in online}
    known = {capacity for capacity in capacities.values() if capacity is not None}
    if len(known) <= 1:
        capacities = dict.fromkeys(online, None)
    cpus = tuple(
        Cpu(
            id=cpu,
            node=node_of.get(cpu),
            siblings=_siblings(system, cpu, online),
            capacity=capacity,
            efficiency=cpu in efficiency or (capacity is not None and capacity < max(known)),
        )
        for cpu, capacity in capacities.items()
    )
    return Topology(tuple(nodes), cpus, tuple(read_list(system / "cpu/isolated") or ()), tuple(notes))


def _online_cpus(system: Path, proc: Path, notes: list[str]) -> tuple[int, ...]:
    online = read_list(system / "cpu/online")
    if online:
        return tuple(online)
    for line in (read_text(proc / "self/status") or "").splitlines():
        name, _, value = line.partition(":")
        allowed = parse_list(value) if name == "Cpus_allowed_list" else None
        if allowed:
            notes.append("/sys tells of no CPUs: taken as those that this process may use")
            return tuple(allowed)
    notes.append("neither /sys nor /proc tells of CPUs: taken as many as Python counts")
    return tuple(range(os.cpu_count() or 1))


def _nodes(folder: Path, online: set[int], notes: list[str]) -> list[NumaNode]:
    ids = read_list(folder / "online")
    if ids is None:
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError:
            names = []
        ids = sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal())
    with_memory = read_list(folder / "has_memory")
    nodes = []
    claimed: set[int] = set()
    for node_id in ids:
        path = folder / f"node{node_id}"
        listed = read_list(path / "cpulist")
        if listed is None:
            notes.append(f"the CPUs of NUMA node {node_id} can't be read: taken as none")
        # The kernel lists the online ones alone; what imitates /sys may list others, or one CPU twice.
        cpus = tuple(cpu for cpu in listed or () if cpu in online and cpu not in claimed)
        claimed.update(cpus)
        memory = _node_memory(path)
        total = memory.get("MemTotal")
        if total is None and with_memory is not None and node_id not in with_memory:
            total = 0
        files = [memory[key] for key in ("Active(file)", "Inactive(file)") if key in memory]
        nodes.append(
            NumaNode(
                id=node_id,
                cpus=cpus,
                memory_bytes=total,
                free_bytes=memory.get("MemFree"),
                cached_bytes=sum(files) if files else None,
                distances=_distances(path, ids),
            )
        )
    return nodes


def _node_memory(path: Path) -> dict[str, int]:
    """Sizes in bytes of a node's meminfo: lines such as ``Node 0 MemTotal:  65536 kB``."""
    sizes = {}
    for line in (read_text(path / "meminfo") or "").splitlines():
        head, _, tail = line.partition(":")
        words = tail.split()
        if head and words and words[0].isdecimal():
            sizes[head.split()[-1]] = int(words[0]) * _KIB
    return sizes


def _distances(path: Path, ids: list[int]) -> dict[int, int]:
    # One number per online node, in order of their ids.
    numbers = (read_text(path / "distance") or "").split()
    if len(numbers) != len(ids) or not all(number.isdecimal() for number in numbers):
        return {}
    return dict(zip(ids, map(int, numbers), strict=True))


def _siblings(system: Path, cpu: int, online: tuple[int, ...]) -> tuple[int, ...]:
    folder = system / f"cpu/cpu{cpu}/topology"
    # core_cpus_list is the name since Linux 5.3, the other one the older name.
    listed = read_list(folder / "core_cpus_list") or read_list(folder / "thread_siblings_list") or []
    return tuple(sorted({cpu, *(sibling for sibling in listed if sibling in online)}))


def _efficiency_cores(root: Path) -> set[int]:
    """The slower cores of a hybrid x86 processor, which has a performance counter unit per kind."""
    if read_list(root / "devices/cpu_core/cpus") is None:
        return set()
    return set(read_list(root / "devices/cpu_atom/cpus") or ())


def _total_memory(proc: Path) -> int | None:
    for line in (read_text(proc / "meminfo") or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "MemTotal:" and words[1].isdecimal():
            return int(words[1]) * _KIB
    return None
