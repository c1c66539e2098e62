"""Every ``NUMA_MOE_*`` variable: what holds, where it comes from, and what was wrong with it."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch_numa_moe.plan import Plan
    from torch_numa_moe.settings import Settings

FIELDS = {
    "NUMA_MOE_SPLIT": "split",
    "NUMA_MOE_WORKERS": "workers",
    "NUMA_MOE_SPIN_US": "spin_us",
    "NUMA_MOE_DISPATCHER_YIELDS": "dispatcher_yields",
    "NUMA_MOE_ISA": "isa",
    "NUMA_MOE_HUGE_PAGES": "huge_pages",
    "NUMA_MOE_WATCH": "watch",
    "NUMA_MOE_SCHED": "sched",
}
"""The variables, and the fields of Settings that they set."""

OTHER_VARIABLES = frozenset({"NUMA_MOE_WERROR"})
"""Variables that building and testing read."""

_TESTS_PREFIXES = ("NUMA_MOE_TEST_", "NUMA_MOE_STRESS_", "NUMA_MOE_GUEST", "NUMA_MOE_POOL_")


@dataclass(frozen=True)
class Knob:
    """A variable.

    Attributes:
        name: such as ``NUMA_MOE_SPLIT``.
        value: what holds, in words.
        source: ``environment``, ``code`` (``configure()``), ``default`` or ``plan``.
        why: in a few words, or "".
    """

    name: str
    value: str
    source: str
    why: str = ""


def choose_instruction_set(settings: Settings, supported: Sequence[str], order: Sequence[str]) -> str:
    """The kernels that will run: the best that the CPU offers, not above the cap of ``NUMA_MOE_ISA``.

    Args:
        settings: what the user asked for.
        supported: what the CPU offers, lowest first.
        order: all names, lowest first.
    """
    if settings.isa is None or settings.isa not in order:
        return supported[-1]
    cap = order.index(settings.isa)
    return [name for name in supported if order.index(name) <= cap][-1]


def list_knobs(
    settings: Settings, from_environment: Settings, plan: Plan, instruction_set: str
) -> tuple[Knob, ...]:
    """All variables.

    Args:
        settings: what is in force.
        from_environment: what the environment alone says.
        plan: what came of it.
        instruction_set: the kernels that will run.
    """
    whys = _whys(plan)
    values = {
        "split": ("split" if plan.split else "no split", "plan", whys["split"]),
        "workers": (str(plan.num_workers), "plan", whys["workers"]),
        "spin_us": (str(plan.worker_spin_us), "default", ""),
        "dispatcher_yields": (str(plan.dispatcher_yields), "default", ""),
        "isa": (instruction_set, "default", "the best that this CPU offers"),
        "huge_pages": (
            settings.huge_pages or "explicit",
            "default",
            "transparent ones where too few are reserved",
        ),
        "sched": (plan.scheduling, "default", ""),
        "watch": ("off" if settings.watch is False else "on", "default", "names intruders in the log"),
    }
    knobs = []
    for name, field in FIELDS.items():
        holds, source, why = values[field]
        asked = getattr(settings, field)
        if asked is not None:
            source = "environment" if getattr(from_environment, field) == asked else "code"
            if field == "split":
                asked = f"test:{settings.test_slices}" if asked == "test" else asked
                holds = f"{asked} ({holds})"
            elif field == "watch":
                why = why if asked else ""
            else:
                why = "" if str(asked) == holds else f"{asked} asked for"
        knobs.append(Knob(name, holds, source, why))
    return tuple(knobs)


def _whys(plan: Plan) -> dict[str, str]:
    split = next((reason for reason in plan.reasons if "split" in reason or "SPLIT" in reason), "")
    workers = "a worker per core" if plan.num_workers else "the calling thread computes alone"
    if plan.host_cpu is not None:
        left = 1 + len(plan.spare_cpus)
        workers += ", but for " + ("one that is" if left == 1 else f"{left} that are") + " left to others"
    quota = next((reason for reason in plan.reasons if "CPU quota" in reason), "")
    return {"split": split, "workers": quota or workers}


def check_settings(
    settings: Settings, environ: Mapping[str, str], plan: Plan, supported: Collection[str]
) -> Report:
    """Looks for settings that can't be understood, have no effect, or can't be met.

    Args:
        settings: what is in force.
        environ: the environment's variables.
        plan: what came of it.
        supported: instruction sets that the CPU offers.
    """
    report = Report()
    for line in settings.log_lines:
        variable = line.text.partition(" ")[0]
        report.problem(
            "setting", line.text, "it counts as not set", f"unset {variable}  # or set it to a value it takes"
        )
    for line in plan.log_lines:
        if line.level >= logging.WARNING and line not in settings.log_lines:
            report.hint("setting", line.text, "the pool does something other than what was asked for")
    if settings.isa is not None and settings.isa not in supported:
        report.hint(
            "setting",
            f"NUMA_MOE_ISA is {settings.isa}, which this CPU doesn't offer ({', '.join(supported)})",
            "the best one below it is used",
            "unset NUMA_MOE_ISA",
        )
    for variable in sorted(environ):
        known = variable in FIELDS or variable in OTHER_VARIABLES or variable.startswith(_TESTS_PREFIXES)
        if not variable.startswith("NUMA_MOE_") or known:
            continue
        similar = difflib.get_close_matches(variable, FIELDS, n=1, cutoff=0.0)[0]
        report.hint(
            "setting",
            f"{variable!a} is set, and no variable of that name is read",
            f"it has no effect; perhaps {similar} was meant",
            *([f"unset {variable}"] if variable.isidentifier() and variable.isascii() else []),
        )
    return report
