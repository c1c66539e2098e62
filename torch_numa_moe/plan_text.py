"""The plan in words, with a picture of nodes, cores and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_numa_moe.sizes import size_text
from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_numa_moe.plan import Plan
    from torch_numa_moe.topology import Cpu, NumaNode

_CORES_PER_LINE = 16

_LEGEND = {
    "W": "worker",
    "H": "left to the calling thread",
    "s": "spare",
    ".": "not used",
    "x": "not for this process",
}


def describe_plan(plan: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join([*_decision(plan), *_limits(plan), *_picture(plan), *_reasons(plan)])


def _decision(plan: Plan) -> Iterator[str]:
    where = "across NUMA nodes" if plan.split else "no split across NUMA nodes"
    yield f"{_count(plan.num_slices, 'slice')} ({where}), {_count(plan.num_workers, 'worker')}"
    for index, group in enumerate(plan.groups):
        memory = "memory anywhere" if group.node is None else f"memory on node {group.node}"
        pinned = [cpu for cpu in group.worker_cpus if cpu >= 0]
        if not group.worker_cpus:
            workers = "no worker"
        elif pinned:
            workers = f"{_count(len(pinned), 'worker')}, CPUs {format_list(pinned)}"
        else:
            workers = f"{_count(len(group.worker_cpus), 'worker')}, not pinned"
        yield f"  group {index}: {workers}; {memory}"
    role = "computes too" if plan.caller_helps else "waits for the workers"
    core = "" if plan.host_cpu is None else f"; the core of CPU {plan.host_cpu} is left to it"
    yield f"  calling thread: {role}{core}"
    yield (
        f"  waiting: a worker spins {plan.worker_spin_us} us, then sleeps; the calling thread spins "
        f"{plan.dispatcher_spin_us} us, yields {plan.dispatcher_yields} times, then sleeps"
    )


def _limits(plan: Plan) -> Iterator[str]:
    limits = plan.limits
    cpus = "unknown" if limits.cpus is None else format_list(limits.cpus)
    yield f"this process may use: CPUs {cpus} (from {limits.cpus_source})"
    if limits.memory_nodes is not None:
        yield f"  memory of nodes {format_list(limits.memory_nodes)}"
    if limits.cpu_quota is not None:
        yield f"  {limits.cpu_quota:g} CPUs' time ({limits.cpu_quota_source})"
    if limits.memory_bytes is not None:
        yield f"  {size_text(limits.memory_bytes)} of memory ({limits.memory_source})"


def _picture(plan: Plan) -> Iterator[str]:
    topology = plan.topology
    marks = _marks(plan)
    used = dict.fromkeys(mark for mark in _LEGEND if mark in marks.values())
    legend = ", ".join(f"{mark} {_LEGEND[mark]}" for mark in used)
    yield f"machine: {_count(len(topology.nodes), 'NUMA node')}; a letter per CPU, a word per core: {legend}"
    for node in topology.nodes:
        yield f"  node {node.id}: {_node_facts(node)}"
        yield from _core_lines([cpu for cpu in topology.cpus if cpu.node == node.id], marks)
    homeless = [cpu for cpu in topology.cpus if cpu.node is None]
    if homeless:
        yield "  no node"
        yield from _core_lines(homeless, marks)


def _marks(plan: Plan) -> dict[int, str]:
    allowed = plan.limits.cpus
    marks = {cpu.id: "." if allowed is None or cpu.id in allowed else "x" for cpu in plan.topology.cpus}
    workers = {cpu: "W" for group in plan.groups for cpu in group.worker_cpus if cpu >= 0}
    host = {} if plan.host_cpu is None else {plan.host_cpu: "H"}
    return {**marks, **dict.fromkeys(plan.spare_cpus, "s"), **host, **workers}


def _node_facts(node: NumaNode) -> str:
    facts = ["memory unknown" if node.memory_bytes is None else size_text(node.memory_bytes)]
    if node.free_bytes is not None and node.memory_bytes:
        facts.append(f"{size_text(node.free_bytes)} free")
    if node.cached_bytes:
        facts.append(f"{size_text(node.cached_bytes)} page cache")
    if len(node.distances) > 1:
        others = (
            f"{distance} to node {other}" for other, distance in node.distances.items() if other != node.id
        )
        facts.append("distance " + ", ".join(others))
    if not node.cpus:
        facts.append("no CPUs")
    return ", ".join(facts)


def _core_lines(cpus: Sequence[Cpu], marks: dict[int, str]) -> Iterator[str]:
    cores = dict.fromkeys(cpu.siblings for cpu in cpus)
    words = [(core[0], "".join(marks.get(cpu, "x") for cpu in core)) for core in cores]
    for begin in range(0, len(words), _CORES_PER_LINE):
        line = words[begin : begin + _CORES_PER_LINE]
        yield f"    from CPU {line[0][0]:<4} {' '.join(word for _, word in line)}"


def _reasons(plan: Plan) -> Iterator[str]:
    if plan.reasons:
        yield "why:"
    for reason in plan.reasons:
        yield f"  {reason}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
