"""Whether others run on the pool's cores."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.doctor.inspection import hex_mask
from torch_numa_moe.doctor.pools import check_pools, find_pools
from torch_numa_moe.doctor.threads import (
    Intruder,
    PinnedThread,
    compare_threads,
    find_pinned_threads,
    sees_all_processes,
)
from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection
    from torch_numa_moe.doctor.sampling import Sample

BUSY_SHARE = 0.1
"""Share of a worker's CPU from which on a thread is a problem, not a hint."""

UNSEEN_SHARE = 0.2
"""CPU time per time that no visible thread explains, from which on somebody else's thread must be there.
Less may come of not reading everything at the very same moment."""

UNSEEN_OF_ALL = 0.05
"""The same as a share of all CPU time that was used: the busier the machine, the larger that error."""

STOLEN_SHARE = 0.02
"""CPU time per time taken by the hypervisor from which on it is told; two clock ticks of a second."""

_WHY = "the worker there is late, and all others wait for it at every barrier"


def check_intruders(
    inspection: Inspection, before: Sample, after: Sample, *, ignore: Collection[int] = ()
) -> Report:
    """Looks for threads on the workers' cores, and at CPU time that no visible thread explains.

    Args:
        inspection: what to look at.
        before: the first sample.
        after: the second one.
        ignore: numbers of threads that belong there (the pool's workers), or that do the looking.
    """
    report = Report()
    if not inspection.worker_cpus:
        return report
    if not after.threads:
        report.not_checked.append(f"threads of others: {inspection.proc} shows none")
        return report
    seconds = after.seconds - before.seconds
    pinned = find_pinned_threads(inspection.core_cpus, proc=inspection.proc)
    pools = find_pools(pinned)
    workers = {worker.tid for pool in pools.values() for worker in pool}
    report.extend(check_pools(inspection, pools, {pid: _process_name(after, pid) for pid in pools}))
    ignore = {*ignore, *workers}
    found = compare_threads(before.threads, after.threads, seconds, inspection.core_cpus, ignore=ignore)
    by_process = defaultdict(list)
    for intruder in found:
        by_process[intruder.pid, intruder.kernel].append(intruder)
    for (pid, kernel), threads in by_process.items():
        if kernel:
            _tell_of_kernel(report, inspection, threads)
        else:
            name = _process_name(after, pid)
            _tell_of_process(report, inspection, pid, name, threads, has_pool=pid in pools)
    busy = {intruder.pid for intruder in found}
    idle = [thread for thread in pinned if thread.tid not in ignore and thread.pid not in busy]
    _tell_of_pinned(report, inspection, after, idle)
    _tell_of_unseen(report, inspection, before, after, seconds)
    return report


def _process_name(sample: Sample, pid: int) -> str:
    first = sample.threads.get(pid)
    return first.comm if first is not None else "?"


def _tell_of_process(
    report: Report,
    inspection: Inspection,
    pid: int,
    name: str,
    threads: Sequence[Intruder],
    *,
    has_pool: bool,
) -> None:
    workers = set(inspection.worker_cpus)
    on_workers = any(thread.cpu in workers and thread.share >= BUSY_SHARE for thread in threads)
    cpus = {thread.cpu for thread in threads}
    busiest = threads[0]
    names = sorted({thread.comm for thread in threads})
    threads_text = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
    whose = "this process" if busiest.own else f"process {pid} ({name})"
    seen = (
        f"{inspection.proc}/{pid}/task: {threads_text} ({', '.join(names[:4])}) of {whose} on CPUs "
        f"{format_list(cpus)}, up to {busiest.share:.0%} of CPU {busiest.cpu}"
    )
    if busiest.own or has_pool:
        # Not the whole process: its workers stay where they are.
        numbers = " ".join(str(thread.tid) for thread in threads)
        command = inspection.move_command(f"for tid in {numbers}; do taskset -pc {{others}} $tid; done")
        report.hint("threads beside the pool", seen, _WHY, command)
        return
    tell = report.problem if on_workers else report.hint
    why = _WHY if cpus & workers else "it shares its core with a worker, which is late then; all others wait"
    tell("intruder", seen, why, inspection.move_command(f"taskset -apc {{others}} {pid}"))


def _tell_of_kernel(report: Report, inspection: Inspection, threads: Sequence[Intruder]) -> None:
    for thread in threads:
        commands = ["# a kernel thread: find what gives it work (network, storage, memory pressure)"]
        if thread.comm.startswith("kworker/u") and inspection.other_cpus:
            mask = hex_mask(inspection.other_cpus)
            commands = [f"echo {mask} > /sys/devices/virtual/workqueue/cpumask"]
        report.hint(
            "kernel thread",
            f"{inspection.proc}/{thread.pid}: {thread.comm} on CPU {thread.cpu}, {thread.share:.0%} of it",
            _WHY,
            *commands,
        )


def _tell_of_pinned(
    report: Report, inspection: Inspection, sample: Sample, idle: Sequence[PinnedThread]
) -> None:
    by_process: dict[int, list[PinnedThread]] = defaultdict(list)
    for thread in idle:
        if not thread.own:
            by_process[thread.pid].append(thread)
    for pid, threads in by_process.items():
        cpus = {cpu for thread in threads for cpu in thread.cpus}
        count = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
        report.hint(
            "pinned threads",
            f"{inspection.proc}/{pid}/task/*/status: {count} of process {pid} ({_process_name(sample, pid)}) "
            f"may run on CPUs {format_list(cpus)} alone, idle now",
            "once it is busy, the scheduler can't move it away from a worker's CPU",
            inspection.move_command(f"taskset -apc {{others}} {pid}"),
        )


def _tell_of_unseen(
    report: Report, inspection: Inspection, before: Sample, after: Sample, seconds: float
) -> None:
    if sees_all_processes(inspection.proc) is False:
        report.not_checked.append(
            "processes outside of this container: its PID namespace hides them (run the doctor on the host)"
        )
    if seconds <= 0:
        return
    ticks = seconds * os.sysconf("SC_CLK_TCK")
    common = before.cpu_times.keys() & after.cpu_times.keys()
    busy = {cpu: (after.cpu_times[cpu].threads - before.cpu_times[cpu].threads) / ticks for cpu in common}
    stolen = {cpu: (after.cpu_times[cpu].stolen - before.cpu_times[cpu].stolen) / ticks for cpu in common}
    # Of the whole machine: which CPU a thread used isn't known if it moved.
    seen = compare_threads(before.threads, after.threads, seconds, busy, lowest_share=0.0)
    total = sum(busy.values())
    unexplained = total - sum(thread.share for thread in seen)
    unseen = {
        cpu: min(unexplained, busy[cpu] - sum(thread.share for thread in seen if thread.cpu == cpu))
        for cpu in inspection.worker_cpus
        if cpu in common
    }
    hidden = [cpu for cpu, share in unseen.items() if share >= max(UNSEEN_SHARE, UNSEEN_OF_ALL * total)]
    if hidden:
        report.problem(
            "intruder",
            f"{inspection.proc / 'stat'}: CPUs {format_list(hidden)} are busy, up to "
            f"{max(unseen.values()):.0%}, with threads that can't be seen from here or that have ended",
            _WHY,
            "# on the host: python -m torch_numa_moe doctor names them",
        )
    taken = {cpu: stolen[cpu] for cpu in unseen if stolen[cpu] >= STOLEN_SHARE}
    if taken:
        report.hint(
            "hypervisor",
            f"{inspection.proc / 'stat'}: up to {max(taken.values()):.0%} of the time of CPUs "
            f"{format_list(taken)} is stolen",
            "other guests use the same cores: no setting in this one keeps them off",
            "# on the host: pin this guest's CPUs to cores of its own",
        )
