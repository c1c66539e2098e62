"""Whether a CPU quota stops the pool now and then; that looks like an intruder, and isn't one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.sysfs import read_text

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection

OFTEN = 0.01
"""Share of the quota's periods in which the group was stopped from which on it is a problem."""


def check_throttling(inspection: Inspection) -> Report:
    """Looks at how often the group with the tightest quota was stopped, and those above it."""
    report = Report()
    limits = inspection.plan.limits
    if limits.cpu_quota is None:
        return report
    source = Path(limits.cpu_quota_source)
    found = False
    for folder in (source.parent, *source.parent.parents):
        text = read_text(folder / "cpu.stat")
        if text is None:
            break
        counts = {
            words[0]: int(words[1])
            for words in map(str.split, text.splitlines())
            if len(words) == 2 and words[1].isdecimal()
        }
        if "nr_throttled" not in counts:
            break
        found = True
        _tell(report, inspection, folder, source.name, counts)
    if not found:
        report.not_checked.append(f"throttling: {source.parent / 'cpu.stat'} can't be read")
    return report


def _tell(report: Report, inspection: Inspection, folder: Path, name: str, counts: dict[str, int]) -> None:
    throttled, periods = counts["nr_throttled"], counts.get("nr_periods", 0)
    # Version 2 counts microseconds, version 1 nanoseconds.
    seconds = counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9
    if throttled == 0:
        report.facts.append(f"{folder / 'cpu.stat'}: never throttled")
        return
    quota = inspection.plan.limits.cpu_quota
    tell = report.problem if throttled >= OFTEN * periods else report.hint
    unlimited = "max" if name == "cpu.max" else "-1"
    tell(
        "CPU quota",
        f"{folder / 'cpu.stat'}: stopped in {throttled} of {periods} periods, {seconds:.1f} s in all",
        f"the quota of {quota:g} CPUs ({inspection.plan.limits.cpu_quota_source}) stops all threads at once "
        "until the next period; no other program is to blame",
        f"echo {unlimited} > {folder / name}  # in containers on the host, or: docker update --cpus",
    )
