"""Runs all checks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from torch_numa_moe import _C, runtime
from torch_numa_moe.doctor.affinity import KernelAnswers, check_affinity, check_kernel_answers
from torch_numa_moe.doctor.devices import check_gpus
from torch_numa_moe.doctor.findings import PROBLEM, Finding, Report
from torch_numa_moe.doctor.frequency import check_frequency
from torch_numa_moe.doctor.inspection import Inspection
from torch_numa_moe.doctor.interrupts import check_interrupts
from torch_numa_moe.doctor.intruders import check_intruders
from torch_numa_moe.doctor.isolation import check_isolation
from torch_numa_moe.doctor.knobs import Knob, check_settings, choose_instruction_set, list_knobs
from torch_numa_moe.doctor.memory import (
    check_huge_pages,
    check_numa_balancing,
    check_paging,
    check_room,
)
from torch_numa_moe.doctor.probes import ask_kernel
from torch_numa_moe.doctor.sampling import DEFAULT_INTERVAL_SECONDS, take_samples
from torch_numa_moe.doctor.scheduling import check_real_time, check_torch_threads
from torch_numa_moe.doctor.throttling import check_throttling
from torch_numa_moe.doctor.versions import read_versions
from torch_numa_moe.plan import Plan, make_plan
from torch_numa_moe.settings import Settings, read_settings


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor has to say.

    Attributes:
        versions: name and version.
        plan: what the pool is, or would be, started with.
        knobs: every setting.
        findings: what isn't as it should be, problems first.
        facts: what was seen and is neither good nor bad.
        not_checked: what couldn't be checked, and why.
    """

    versions: dict[str, str]
    plan: Plan
    knobs: tuple[Knob, ...]
    findings: tuple[Finding, ...]
    facts: tuple[str, ...]
    not_checked: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; hints don't count."""
        return all(finding.severity != PROBLEM for finding in self.findings)


def diagnose(
    *,
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    sleep: Callable[[float], object] = time.sleep,
) -> Diagnosis:
    """Looks at this machine, this process and its settings. Changes nothing, and starts no pool.

    Args:
        interval_seconds: how long threads and interrupts are watched.
        sleep: what waits; it gets the seconds.
    """
    settings = runtime.current_settings()
    plan = runtime.plan()
    supported = _C.supported_instruction_sets()
    settings_report = check_settings(settings, os.environ, plan, supported)
    answers = ask_kernel(plan)
    if answers.unpinnable is not None:
        # As the runtime does when it finds out.
        plan = make_plan(plan.topology, plan.limits, settings, unpinnable=answers.unpinnable)
    instruction_set = choose_instruction_set(settings, supported, _C.instruction_set_names())
    inspection = Inspection(plan)
    report = run_checks(
        inspection,
        settings,
        answers=answers,
        torch_threads=torch.get_num_threads(),
        ignore={threading.get_native_id(), *(worker.thread_id for worker in _C.workers())},
        interval_seconds=interval_seconds,
        sleep=sleep,
    )
    settings_report.extend(report)
    findings = settings_report.findings
    return Diagnosis(
        versions=read_versions(instruction_set, inspection.proc),
        plan=plan,
        knobs=list_knobs(settings, read_settings(), plan, instruction_set),
        findings=tuple(sorted(findings, key=lambda finding: finding.severity != PROBLEM)),
        facts=tuple(settings_report.facts),
        not_checked=tuple(settings_report.not_checked),
    )


def run_checks(
    inspection: Inspection,
    settings: Settings,
    *,
    answers: KernelAnswers,
    torch_threads: int,
    ignore: set[int],
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """All checks of the machine and the process. Never raises for what it reads.

    Args:
        inspection: what to look at.
        settings: what is in force.
        answers: what the kernel said when it was asked.
        torch_threads: ``torch.get_num_threads()``.
        ignore: numbers of threads that may run on the pool's CPUs.
        interval_seconds: how long threads and interrupts are watched.
        sleep: what waits; it gets the seconds.
        clock: what tells the time in seconds.
    """
    before, after = take_samples(interval_seconds, proc=inspection.proc, sleep=sleep, clock=clock)
    binding_works = answers.binding_works
    checks: Mapping[str, Callable[[], Report]] = {
        "affinity": lambda: check_affinity(inspection),
        "what the kernel allows": lambda: check_kernel_answers(inspection, answers),
        "isolation": lambda: check_isolation(inspection),
        "threads of others": lambda: check_intruders(inspection, before, after, ignore=ignore),
        "interrupts": lambda: check_interrupts(inspection, before, after),
        "throttling": lambda: check_throttling(inspection),
        "CPU frequency": lambda: check_frequency(inspection),
        "huge pages": lambda: check_huge_pages(inspection, settings.huge_pages or "explicit"),
        "NUMA balancing": lambda: check_numa_balancing(inspection, binding_works=binding_works),
        "memory": lambda: check_room(inspection, binding_works=binding_works),
        "swap and overcommit": lambda: check_paging(inspection),
        "GPUs": lambda: check_gpus(inspection),
        "torch's threads": lambda: check_torch_threads(inspection, torch_threads),
        "real-time scheduling": lambda: check_real_time(inspection),
    }
    report = Report()
    for name, check in checks.items():
        try:
            report.extend(check())
        except Exception as error:  # noqa: BLE001, PERF203  (a file of an unknown kind must not hide the rest)
            report.not_checked.append(f"{name}: {type(error).__name__}: {error}")
    return report
