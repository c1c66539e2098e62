"""Whether this process gets at the whole machine: CPUs, nodes' memory, pinning and binding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.doctor.inspection import shell_numbers
from torch_numa_moe.sysfs import format_list, read_list, read_text

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection


@dataclass(frozen=True)
class KernelAnswers:
    """What the kernel said when it was asked for what the pool needs (:func:`probes.ask_kernel`).

    Attributes:
        unpinnable: why a thread can't be pinned, or None if it can or wasn't tried.
        bind_errors: by NUMA node, the error's name such as ``EPERM``, or "" if memory can be bound to it.
        query_error: the error's name if the kernel doesn't tell where pages are, "" if it does, None if it
            wasn't asked.
    """

    unpinnable: str | None = None
    bind_errors: dict[int, str] = field(default_factory=dict)
    query_error: str | None = None

    @property
    def binding_works(self) -> bool | None:
        """Whether memory can be bound to all nodes that were tried; None if none was."""
        return not any(self.bind_errors.values()) if self.bind_errors else None


def check_affinity(inspection: Inspection) -> Report:
    """Looks for CPUs and nodes that this process can't use."""
    report = Report()
    plan = inspection.plan
    online = {cpu.id for cpu in plan.topology.cpus}
    allowed = online if plan.limits.cpus is None else online & set(plan.limits.cpus)
    hidden = online - allowed
    if hidden:
        nodes = [node.id for node in plan.topology.nodes if node.cpus and allowed.isdisjoint(node.cpus)]
        seen = f"the affinity mask ({plan.limits.cpus_source}) leaves out CPUs {format_list(hidden)}"
        if nodes:
            report.hint(
                "affinity",
                f"{seen}, all of NUMA nodes {format_list(nodes)}",
                "the bandwidth of these nodes' memory isn't used",
                f"taskset -c {format_list(online)} COMMAND  # in containers: docker run --cpuset-cpus",
            )
        else:
            report.facts.append(seen)
    _tell_of_memory_nodes(report, inspection, allowed)
    _tell_of_offline(report, inspection)
    return report


def _tell_of_memory_nodes(report: Report, inspection: Inspection, allowed: set[int]) -> None:
    limits = inspection.plan.limits
    if limits.memory_nodes is None:
        report.not_checked.append(f"memory nodes: {inspection.proc / 'self/status'} doesn't tell")
        return
    nodes = [
        node
        for node in inspection.plan.topology.nodes
        if node.has_memory and node.id not in limits.memory_nodes
    ]
    with_memory = [node.id for node in inspection.plan.topology.nodes if node.has_memory]
    for node in nodes:
        seen = (
            f"{inspection.proc / 'self/status'}: Mems_allowed_list is {format_list(limits.memory_nodes)}, "
            f"without node {node.id}"
        )
        command = (
            f"systemctl set-property --runtime UNIT AllowedMemoryNodes={format_list(with_memory)}"
            f"  # in containers: docker run --cpuset-mems={format_list(with_memory)}"
        )
        if allowed.isdisjoint(node.cpus):
            report.hint("memory nodes", seen, "the bandwidth of that memory isn't used", command)
        else:
            report.problem(
                "memory nodes",
                seen,
                f"node {node.id}'s CPUs may work, but all they read has to come from another node",
                command,
            )


def _tell_of_offline(report: Report, inspection: Inspection) -> None:
    folder = inspection.root / "devices/system/cpu"
    offline = set(read_list(folder / "offline") or ())
    present = read_list(folder / "present")
    if present is not None:
        offline &= set(present)  # numbers that CPUs could have don't count
    if not offline:
        return
    seen = f"{folder / 'offline'}: {format_list(offline)}"
    if read_text(folder / "smt/control") in {"off", "forceoff"}:
        report.facts.append(f"{seen} (SMT is off)")
        return
    report.hint(
        "offline CPUs",
        seen,
        "their cores do nothing",
        f"for cpu in {shell_numbers(offline)}; do echo 1 > /sys/devices/system/cpu/cpu$cpu/online; done",
    )


def check_kernel_answers(inspection: Inspection, answers: KernelAnswers) -> Report:
    """Judges what the kernel said: whether workers can be pinned, weights bound, and placement verified."""
    report = Report()
    if answers.unpinnable is not None:
        report.problem(
            "pinning",
            f"a thread can't be pinned to a CPU ({answers.unpinnable})",
            "workers wander between NUMA nodes, so there is no split, and the scheduler puts two on a core",
            "# in containers: a seccomp profile that allows sched_setaffinity",
        )
    nodes = [node for node, error in answers.bind_errors.items() if error]
    several = len(inspection.plan.topology.nodes) > 1
    if nodes:
        errors = ", ".join(sorted({answers.bind_errors[node] for node in nodes}))
        seen = f"memory can't be bound to NUMA nodes {format_list(nodes)} (mbind: {errors})"
        if several:
            tell = report.problem if inspection.plan.split else report.hint
            tell(
                "binding",
                seen,
                "pages stay where the nodes' workers first wrote them, as long as the nodes have free memory "
                "and automatic NUMA balancing is off",
                "# in containers: docker run --cap-add SYS_NICE, or a seccomp profile that allows mbind",
            )
        else:
            report.facts.append(f"{seen}; with one node it makes no difference")
    elif answers.bind_errors:
        report.facts.append(f"memory can be bound to NUMA nodes {format_list(answers.bind_errors)}")
    if answers.query_error and several:
        report.hint(
            "verification",
            f"the kernel doesn't tell where pages are (move_pages: {answers.query_error}; numa_maps neither)",
            "weights that ended up on the wrong node go unnoticed",
            "# in containers: a seccomp profile that allows move_pages",
        )
    return report
