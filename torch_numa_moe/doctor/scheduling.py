"""What the kernel would let this process do about its scheduling, and torch's own threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.sysfs import read_number, read_text

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection


def check_real_time(inspection: Inspection) -> Report:
    """Tells what real-time scheduling would be allowed. The pool doesn't use it."""
    report = Report()
    runtime = read_number(inspection.proc / "sys/kernel/sched_rt_runtime_us")
    if runtime is not None:
        report.facts.append(f"kernel.sched_rt_runtime_us is {runtime}")
    for line in (read_text(inspection.proc / "self/limits") or "").splitlines():
        name = "Max realtime priority"
        if line.startswith(name):
            soft, *_ = [*line.removeprefix(name).split(), "?"]
            report.facts.append(f"highest real-time priority for this process: {soft} (ulimit -r)")
    return report


def check_torch_threads(inspection: Inspection, num_threads: int) -> Report:
    """Compares torch's threads with the cores that workers leave.

    Args:
        inspection: what to look at.
        num_threads: ``torch.get_num_threads()``.
    """
    report = Report()
    allowed = inspection.plan.limits.cpus
    others = set(inspection.other_cpus) if allowed is None else set(inspection.other_cpus) & set(allowed)
    cores = len({min(cpu.siblings) for cpu in inspection.plan.topology.cpus if cpu.id in others})
    left = max(1, cores)
    if not inspection.worker_cpus or num_threads <= left:
        report.facts.append(f"torch.get_num_threads() is {num_threads}")
        return report
    beside = "1 core" if cores == 1 else f"{cores} cores"
    report.hint(
        "torch's threads",
        f"torch.get_num_threads() is {num_threads}, and workers leave {beside}",
        "torch's threads then run, and spin for a while afterwards, on workers' CPUs; lower it if the rest "
        "of the model runs on a GPU, but where attention runs on the CPU too it may need them: measure both",
        f"export OMP_NUM_THREADS={left}  # or, in the program: torch.set_num_threads({left})",
    )
    return report
