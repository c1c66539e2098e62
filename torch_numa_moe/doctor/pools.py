"""The pools of this library that run on the machine, this process's own or others'."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection
    from torch_numa_moe.doctor.threads import PinnedThread

WORKER_NAME = "numa_moe/"
"""What the names of workers begin with; csrc/pool/worker.cpp gives them."""


def find_pools(pinned: Iterable[PinnedThread]) -> dict[int, list[PinnedThread]]:
    """The workers among some pinned threads, by process."""
    pools = defaultdict(list)
    for thread in pinned:
        if thread.comm.startswith(WORKER_NAME):
            pools[thread.pid].append(thread)
    return dict(pools)


def check_pools(
    inspection: Inspection, pools: Mapping[int, list[PinnedThread]], names: Mapping[int, str]
) -> Report:
    """Looks for pools that share CPUs.

    Args:
        inspection: what to look at.
        pools: workers by process.
        names: of these processes.
    """
    report = Report()
    cpus_of = {pid: {cpu for worker in workers for cpu in worker.cpus} for pid, workers in pools.items()}
    users = Counter(cpu for cpus in cpus_of.values() for cpu in cpus)
    shared = {cpu for cpu, count in users.items() if count > 1}
    described = {pid: f"process {pid} ({names.get(pid, '?')})" for pid in pools}
    sharing = [described[pid] for pid, cpus in cpus_of.items() if cpus & shared]
    if sharing:
        report.problem(
            "pools",
            f"{inspection.proc}/*/task: workers of {' and '.join(sharing)} are pinned to the same CPUs "
            f"{format_list(shared)}",
            "each pool's workers hold up the other's: both are slower than in turns",
            "# end one, or start each on CPUs of its own: taskset -c LIST COMMAND",
        )
    for pid, workers in pools.items():
        if not workers[0].own and described[pid] not in sharing:
            where = f"on CPUs {format_list(cpus_of[pid])}"
            report.facts.append(f"{described[pid]} runs a pool {where}; its workers are no intruders")
    return report
