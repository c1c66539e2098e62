"""Whether others are kept off the pool's cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.doctor.inspection import NOTHING_LEFT
from torch_numa_moe.sysfs import format_list, read_list, read_number

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection

FENCED_UNITS = ("system.slice", "user.slice", "init.scope")
"""What systemd runs everything in, unless it is given a slice of its own."""


def check_isolation(inspection: Inspection) -> Report:
    """Looks at isolated CPUs, at hardware threads next to workers, and at what else may run there."""
    report = Report()
    topology = inspection.plan.topology
    if topology.isolated:
        report.facts.append(f"CPUs {format_list(topology.isolated)} are isolated (isolcpus)")
    # "(null)" where there are none.
    quiet = read_list(inspection.root / "devices/system/cpu/nohz_full")
    if quiet:
        report.facts.append(f"CPUs {format_list(quiet)} run without the scheduler's tick (nohz_full)")
    if read_number(inspection.root / "devices/system/cpu/smt/active") == 1:
        beside = format_list(inspection.sibling_cpus)
        report.facts.append(f"SMT is on; CPUs {beside} share a core with a worker and have none themselves")
    if not inspection.worker_cpus:
        return report
    if not inspection.other_cpus:
        report.hint(
            "fence",
            NOTHING_LEFT,
            "whatever else runs takes its time from a worker, and all others wait for that one",
            f"# {inspection.advice_to_leave_a_core}",
        )
        return report
    open_cpus = _open_cpus(inspection)
    workers = open_cpus & set(inspection.worker_cpus)
    siblings = open_cpus & set(inspection.sibling_cpus)
    command = "python -m torch_numa_moe doctor --fence  # prints what fences them off"
    if workers:
        report.hint(
            "fence",
            f"nothing keeps other programs off the workers' CPUs {format_list(workers)}",
            "leaving cores free doesn't make others use them: one busy thread on a worker's CPU holds up all "
            "workers",
            command,
        )
    elif siblings:
        report.hint(
            "fence",
            f"the workers' CPUs are fenced, but not CPUs {format_list(siblings)} on the same cores",
            "what runs there shares the core with a worker, which is late then",
            command,
        )
    else:
        report.facts.append("other programs are kept off the workers' cores")
    return report


def _open_cpus(inspection: Inspection) -> set[int]:
    """Those of the workers' cores' CPUs that other programs may use."""
    cpus = set(inspection.core_cpus) - set(inspection.plan.topology.isolated)
    fences = [read_list(inspection.root / f"fs/cgroup/{unit}/cpuset.cpus.effective") for unit in FENCED_UNITS]
    known = [set(fence) for fence in fences if fence]
    # Version 1, another init, or no cpuset controller there: nothing is known to be fenced.
    if not known or not all(fences[:2]):
        return cpus
    return {cpu for cpu in cpus if any(cpu in fence for fence in known)}
