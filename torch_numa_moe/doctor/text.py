"""A diagnosis as text, and as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_numa_moe.doctor.diagnosis import Diagnosis
    from torch_numa_moe.doctor.findings import Finding
    from torch_numa_moe.plan import Plan


_SOURCES = {"environment": "from the environment", "code": "from configure()", "plan": "from the plan"}


def to_text(diagnosis: Diagnosis) -> str:
    """Sections: versions, plan, settings, what was also seen, findings, and what wasn't checked (if any)."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield "versions"
    width = max(map(len, diagnosis.versions))
    yield from (f"  {name:<{width}}  {version}" for name, version in diagnosis.versions.items())
    yield ""
    yield "plan"
    yield from (f"  {line}" for line in str(diagnosis.plan).splitlines())
    yield ""
    yield "settings"
    width = max(len(knob.name) for knob in diagnosis.knobs)
    for knob in diagnosis.knobs:
        why = f": {knob.why}" if knob.why else ""
        yield f"  {knob.name:<{width}}  {knob.value} ({_SOURCES.get(knob.source, knob.source)}{why})"
    yield ""
    yield "also seen"
    yield from (f"  {fact}" for fact in diagnosis.facts or ("nothing",))
    yield ""
    problems = sum(finding.severity == "problem" for finding in diagnosis.findings)
    yield (
        f"findings: {_count(problems, 'problem')}, {_count(len(diagnosis.findings) - problems, 'hint')}"
        + ("; commands are for a root shell and last until the next boot" if diagnosis.findings else "")
    )
    for finding in diagnosis.findings:
        yield from _finding_lines(finding)
    if diagnosis.not_checked:
        yield ""
        yield "not checked"
        yield from (f"  {what}" for what in diagnosis.not_checked)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"  {finding.severity}: {finding.topic}: {finding.seen}"
    yield f"    {finding.why}"
    yield from (f"      {command}" for command in finding.commands)


def to_json(diagnosis: Diagnosis) -> str:
    """The same as one JSON object, with the keys of :class:`~torch_numa_moe.doctor.diagnosis.Diagnosis`."""
    return json.dumps(
        {
            "healthy": diagnosis.healthy,
            "versions": diagnosis.versions,
            "plan": _plan(diagnosis.plan),
            "settings": [dataclasses.asdict(knob) for knob in diagnosis.knobs],
            "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
            "facts": diagnosis.facts,
            "not_checked": diagnosis.not_checked,
        },
        indent=2,
    )


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "split": plan.split,
        "groups": [dataclasses.asdict(group) for group in plan.groups],
        "host_cpu": plan.host_cpu,
        "spare_cpus": plan.spare_cpus,
        "caller_helps": plan.caller_helps,
        "worker_spin_us": plan.worker_spin_us,
        "dispatcher_spin_us": plan.dispatcher_spin_us,
        "dispatcher_yields": plan.dispatcher_yields,
        "scheduling": plan.scheduling,
        "reasons": plan.reasons,
        "text": str(plan).splitlines(),
    }
