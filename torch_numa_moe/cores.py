"""The cores that this process may use, the NUMA nodes that they work for, and dealing workers out to them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_numa_moe.limits import ProcessLimits
    from torch_numa_moe.topology import NumaNode, Topology


@dataclass(frozen=True)
class Core:
    """A physical core of which at least one hardware thread may be used.

    Attributes:
        threads: the CPUs that may be used, ascending; a worker goes to the first one first.
        node: the NUMA node that it is part of, or None.
        slowness: sorts cores from fast to slow; all 0 on machines whose cores are alike.
    """

    threads: tuple[int, ...]
    node: int | None
    slowness: int = 0


@dataclass(frozen=True)
class Site:
    """Cores that work for the same node's memory, the preferred ones first; node None: for any memory."""

    node: int | None
    cores: tuple[Core, ...]


@dataclass(frozen=True)
class Deal:
    """Workers dealt out.

    Attributes:
        order: their CPUs, in the order in which they were dealt.
        by_site: the same per site, ascending.
        host_cpu: the first CPU of the core set aside for the calling thread, or None.
        spare_cpus: the same of further cores set aside.
    """

    order: tuple[int, ...]
    by_site: tuple[tuple[int, ...], ...]
    host_cpu: int | None
    spare_cpus: tuple[int, ...]


def usable_cores(topology: Topology, limits: ProcessLimits) -> tuple[list[Core], list[str]]:
    """The cores that this process may use, ascending by CPU, and sentences about what is left out."""
    notes = []
    allowed = {cpu.id for cpu in topology.cpus} if limits.cpus is None else set(limits.cpus)
    usable = {cpu.id: cpu for cpu in topology.cpus if cpu.id in allowed}
    unknown = sorted(allowed - usable.keys())
    if not usable:
        # What /sys shows is another machine's: only the mask counts.
        notes.append(f"/sys doesn't know the CPUs {format_list(allowed)} that this process may use")
        return [Core((cpu,), None) for cpu in unknown] or [Core((0,), None)], notes
    isolated = set(topology.isolated) & usable.keys()
    # They are kept free for something. Whoever is on isolated CPUs alone was put there on purpose.
    if isolated and len(isolated) < len(usable):
        notes.append(f"CPUs {format_list(isolated)} are isolated from the scheduler: not used")
        usable = {cpu: described for cpu, described in usable.items() if cpu not in isolated}
    threads_of_core = defaultdict(list)
    for cpu in usable.values():
        threads_of_core[min(cpu.siblings)].append(cpu)
    fastest = max((cpu.capacity or 0) for cpu in usable.values())
    cores = []
    for threads in threads_of_core.values():
        first = threads[0]
        slowness = fastest - (first.capacity or fastest) + int(first.efficiency)
        cores.append(Core(tuple(sorted(cpu.id for cpu in threads)), first.node, slowness))
    return sorted(cores, key=lambda core: core.threads), notes


def find_sites(
    topology: Topology, limits: ProcessLimits, cores: Sequence[Core]
) -> tuple[list[Site], list[str]]:
    """The NUMA nodes that can hold a slice, with the cores that work for it, and sentences about the others.

    A node needs memory that this process may take, and cores of its own. The cores of nodes without
    (allowed) memory work for the nearest such node.
    """
    notes = []
    homes: list[NumaNode] = []
    lenders: list[NumaNode] = []
    for node in topology.nodes:
        has_cores = any(core.node == node.id for core in cores)
        allowed = limits.memory_nodes is None or node.id in limits.memory_nodes
        if not has_cores:
            if not node.cpus:
                lack = "no CPUs" if node.has_memory else "neither CPUs nor memory"
                notes.append(f"node {node.id} has {lack}: no slice there")
            else:
                notes.append(f"node {node.id}: none of its CPUs {format_list(node.cpus)} may be used")
        elif node.has_memory and allowed:
            homes.append(node)
        else:
            lenders.append(node)
    own_cores = {node.id: _preferred(core for core in cores if core.node == node.id) for node in homes}
    lent_cores: dict[int, list[Core]] = {node.id: [] for node in homes}
    for node in lenders:
        lack = "no memory" if not node.has_memory else "memory that this process may not use (Mems_allowed)"
        if not homes:
            notes.append(f"node {node.id} has {lack}")
            continue
        home = min(homes, key=lambda other: (node.distances.get(other.id, 0), other.id))
        notes.append(f"node {node.id} has {lack}: its CPUs work for node {home.id}")
        lent_cores[home.id] += _preferred(core for core in cores if core.node == node.id)
    return [Site(node.id, (*own_cores[node.id], *lent_cores[node.id])) for node in homes], notes


def _preferred(cores: Iterable[Core]) -> list[Core]:
    return sorted(cores, key=lambda core: (core.slowness, core.threads))


def sites_without_split(cores: Sequence[Core]) -> list[Site]:
    """The cores by node as they are, to deal workers out evenly when memory isn't looked at."""
    nodes = dict.fromkeys(core.node for core in cores)
    return [Site(None, tuple(_preferred(core for core in cores if core.node == node))) for node in nodes]


def deal_workers(
    sites: Sequence[Site],
    count: int | None,
    *,
    set_aside: int,
    keep_one_each: bool,
    most_per_site: int | None = None,
) -> Deal:
    """Deals workers out to sites alternately, so that the sites stay as equal as they can.

    First come cores that aren't set aside, one thread each; then those set aside, the host's last; then the
    second threads of cores.

    Args:
        sites: where workers can go.
        count: how many, at most; None for all cores that aren't set aside.
        set_aside: cores to leave free if there are enough, the first one for the calling thread. They are
            taken from the site with the most cores left.
        keep_one_each: whether every site must keep a core that isn't set aside, or only all in all.
        most_per_site: a bound on the cores that count as not set aside, per site.
    """
    first_threads = [[core.threads[0] for core in site.cores] for site in sites]
    aside: list[tuple[int, int]] = []  # CPU, site
    for _ in range(set_aside):
        largest = max(range(len(sites)), key=lambda index: len(first_threads[index]))
        left = len(first_threads[largest]) if keep_one_each else sum(map(len, first_threads))
        if left <= 1:
            break
        cpu = min(first_threads[largest])
        first_threads[largest].remove(cpu)
        aside.append((cpu, largest))
    if most_per_site is not None:
        first_threads = [threads[:most_per_site] for threads in first_threads]
    tiers = [first_threads]
    for cpu, index in reversed(aside):
        tiers.append([[cpu] if other == index else [] for other in range(len(sites))])
    tiers.append([[cpu for core in site.cores for cpu in core.threads[1:]] for site in sites])
    if count is None:
        count = sum(map(len, first_threads))

    order: list[int] = []
    by_site: list[list[int]] = [[] for _ in sites]
    for tier in tiers:
        while len(order) < count and any(tier):
            index = min((i for i in range(len(sites)) if tier[i]), key=lambda i: len(by_site[i]))
            cpu = tier[index].pop(0)
            order.append(cpu)
            by_site[index].append(cpu)
    free = [cpu for cpu, _ in aside if cpu not in order]
    host = aside[0][0] if aside and aside[0][0] in free else None
    return Deal(
        order=tuple(order),
        by_site=tuple(tuple(sorted(cpus)) for cpus in by_site),
        host_cpu=host,
        spare_cpus=tuple(cpu for cpu in free if cpu != host),
    )
