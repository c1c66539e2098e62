"""Whether the pool's CPUs clock up at once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.doctor.inspection import shell_numbers
from torch_numa_moe.sysfs import format_list, read_text

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection

_FOLDER = "devices/system/cpu/cpu{}/cpufreq"


def check_frequency(inspection: Inspection) -> Report:
    """Looks at the frequency governor and the energy preference of the workers' CPUs."""
    report = Report()
    governors = _by_value(inspection, "scaling_governor")
    if not governors:
        if inspection.worker_cpus:
            path = inspection.root / _FOLDER.format(inspection.worker_cpus[0]) / "scaling_governor"
            report.not_checked.append(f"frequency governor: {path} can't be read (usual in virtual machines)")
        return report
    slow = {cpu for governor, cpus in governors.items() if governor != "performance" for cpu in cpus}
    seen = _describe(governors, "scaling_governor")
    if slow:
        report.problem(
            "CPU frequency",
            seen,
            "workers sleep between calls, and a governor that clocks idle CPUs down starts every call slowly",
            _set(slow, "scaling_governor"),
            f"# or: cpupower -c {format_list(slow)} frequency-set -g performance",
        )
    else:
        report.facts.append(seen)
    preferences = _by_value(inspection, "energy_performance_preference")
    saving = {cpu for value, cpus in preferences.items() if value != "performance" for cpu in cpus}
    if saving:
        report.hint(
            "CPU frequency",
            _describe(preferences, "energy_performance_preference"),
            "the processor chooses its clock by itself, and prefers to save energy",
            _set(saving, "energy_performance_preference"),
        )
    return report


def _by_value(inspection: Inspection, name: str) -> dict[str, list[int]]:
    found = defaultdict(list)
    for cpu in inspection.worker_cpus:
        value = read_text(inspection.root / _FOLDER.format(cpu) / name)
        if value:
            found[value].append(cpu)
    return dict(found)


def _describe(values: dict[str, list[int]], name: str) -> str:
    shown = "; ".join(f"{value} on CPUs {format_list(cpus)}" for value, cpus in sorted(values.items()))
    return f"cpufreq/{name}: {shown}"


def _set(cpus: set[int], name: str) -> str:
    path = f"/sys/{_FOLDER.format('$cpu')}/{name}"
    return f"for cpu in {shell_numbers(cpus)}; do echo performance > {path}; done"
