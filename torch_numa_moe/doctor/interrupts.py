"""Whether devices interrupt the pool's CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.doctor.inspection import hex_mask
from torch_numa_moe.sysfs import format_list, read_list, read_text

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch_numa_moe.doctor.inspection import Inspection
    from torch_numa_moe.doctor.sampling import Sample

NOTICEABLE_PER_SECOND = 10.0
"""Interrupts a second on the pool's CPUs, while looked at or on average since boot, from which on they are
told. Fewer can't be felt: a token takes some hundred barriers, and an interrupt holds up one of them."""

BUSY_PER_SECOND = 1000.0
"""Interrupts a second on the pool's CPUs, while looked at, from which on they are a problem: with some
microseconds each (an estimate), they cost the slowest worker, hence all of them, a percent or so."""

_SHOWN = 8


@dataclass(frozen=True)
class InterruptLoad:
    """A device's interrupt that goes to the pool's CPUs.

    Attributes:
        number: as in /proc/irq.
        device: what /proc/interrupts says of its chip and device.
        cpus: those of the pool's CPUs that handled it.
        count: how often they did since boot.
        per_second: how often they do now.
    """

    number: int
    device: str
    cpus: tuple[int, ...]
    count: int
    per_second: float


def find_interrupts(
    cpus: Collection[int],
    before: Sample,
    after: Sample,
    *,
    proc: Path,
    lowest_per_second: float = NOTICEABLE_PER_SECOND,
) -> tuple[InterruptLoad, ...]:
    """The devices' interrupts that go to some CPUs often enough to matter, the most frequent ones first.

    One that was moved away meanwhile (its affinity names none of the CPUs) doesn't count.

    Args:
        cpus: the CPUs that matter.
        before: the first sample.
        after: the second one.
        proc: where procfs is.
        lowest_per_second: interrupts a second, now or since boot, below which one is left out.
    """
    seconds = after.seconds - before.seconds
    uptime = _uptime(proc)
    found = []
    for number, interrupt in after.interrupts.items():
        earlier = before.interrupts[number].counts if number in before.interrupts else {}
        counts = {cpu: count for cpu, count in interrupt.counts.items() if cpu in cpus and count > 0}
        count = sum(counts.values())
        now = sum(count - earlier.get(cpu, count) for cpu, count in counts.items())
        per_second = now / seconds if seconds > 0 else 0.0
        average = count / uptime if uptime else 0.0
        if max(per_second, average) < lowest_per_second or not _may_go_to(proc, number, cpus):
            continue
        found.append(InterruptLoad(number, interrupt.device, tuple(sorted(counts)), count, per_second))
    return tuple(sorted(found, key=lambda load: (-load.per_second, -load.count, load.number)))


def _uptime(proc: Path) -> float:
    words = (read_text(proc / "uptime") or "").split()
    try:
        return float(words[0]) if words else 0.0
    except ValueError:
        return 0.0


def _may_go_to(proc: Path, number: int, cpus: Collection[int]) -> bool:
    folder = proc / f"irq/{number}"
    # Where it goes in fact; older kernels tell only where it may go.
    allowed = read_list(folder / "effective_affinity_list") or read_list(folder / "smp_affinity_list")
    return allowed is None or not set(cpus).isdisjoint(allowed)


def check_interrupts(inspection: Inspection, before: Sample, after: Sample) -> Report:
    """Looks at devices' interrupts on the workers' CPUs."""
    report = Report()
    if not inspection.worker_cpus:
        return report
    if not after.interrupts:
        report.not_checked.append(f"interrupts: {inspection.proc / 'interrupts'} lists none of devices")
        return report
    loads = find_interrupts(inspection.worker_cpus, before, after, proc=inspection.proc)
    busy = [load for load in loads if load.per_second >= BUSY_PER_SECOND]
    others = [load for load in loads if load not in busy]
    why = "the interrupted worker is late, and all others wait for it at the next barrier"
    balanced = _irqbalance_runs(after)
    if busy:
        commands = _commands(inspection, busy, balanced=balanced)
        report.problem("interrupts", _describe(inspection, busy), why, *commands)
    if others:
        commands = _commands(inspection, others, balanced=balanced)
        report.hint("interrupts", _describe(inspection, others), why, *commands)
    return report


def _describe(inspection: Inspection, loads: list[InterruptLoad]) -> str:
    shown = [
        f"{load.number} ({load.device}): {load.count} since boot on CPUs "
        f"{format_list(load.cpus)}, {load.per_second:.0f} a second now"
        for load in loads[:_SHOWN]
    ]
    if len(loads) > _SHOWN:
        shown.append(f"{len(loads) - _SHOWN} more")
    return f"{inspection.proc / 'interrupts'}: " + "; ".join(shown)


def _commands(inspection: Inspection, loads: list[InterruptLoad], *, balanced: bool) -> list[str]:
    if not inspection.other_cpus:
        return [inspection.move_command("")]
    numbers = " ".join(str(load.number) for load in loads)
    others = format_list(inspection.other_cpus)
    commands = [f"for irq in {numbers}; do echo {others} > /proc/irq/$irq/smp_affinity_list; done"]
    if balanced:
        commands += irqbalance_commands(inspection)
    commands.append("# where that is an input/output error, the device's driver alone spreads its interrupts")
    return commands


def irqbalance_commands(inspection: Inspection) -> list[str]:
    """Lines that keep irqbalance off the pool's cores."""
    banned = f"IRQBALANCE_BANNED_CPULIST={format_list(inspection.core_cpus)}"
    return [
        f"echo {banned} >> /etc/default/irqbalance  # Fedora, RHEL: /etc/sysconfig/irqbalance",
        f"# an old irqbalance knows IRQBALANCE_BANNED_CPUS={hex_mask(inspection.core_cpus)} only",
        "systemctl restart irqbalance",
    ]


def _irqbalance_runs(sample: Sample) -> bool:
    return any(thread.comm == "irqbalance" for thread in sample.threads.values())
