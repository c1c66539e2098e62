"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass, field

PROBLEM = "problem"
"""Severity of what costs speed or keeps a setting from working: mend it."""

HINT = "hint"
"""Severity of what may be so on purpose, or costs speed under some circumstances only."""


@dataclass(frozen=True)
class Finding:
    """Something that isn't as it should be.

    Attributes:
        severity: :data:`PROBLEM` or :data:`HINT`.
        topic: what it is about, in a word or two.
        seen: what was seen: the file or the setting, and its value.
        why: why it matters, a sentence.
        commands: lines for a root shell that mend it; empty where no command can. Lines that begin with
            ``#`` are remarks.
    """

    severity: str
    topic: str
    seen: str
    why: str
    commands: tuple[str, ...] = ()


@dataclass
class Report:
    """What checks have found.

    Attributes:
        findings: what isn't as it should be.
        facts: what was seen and is neither good nor bad.
        not_checked: what couldn't be checked, and why.
    """

    findings: list[Finding] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def problem(self, topic: str, seen: str, why: str, *commands: str) -> None:
        """Adds a :data:`PROBLEM`."""
        self.findings.append(Finding(PROBLEM, topic, seen, why, commands))

    def hint(self, topic: str, seen: str, why: str, *commands: str) -> None:
        """Adds a :data:`HINT`."""
        self.findings.append(Finding(HINT, topic, seen, why, commands))

    def extend(self, other: Report) -> None:
        """Adds what another one says."""
        self.findings += other.findings
        self.facts += other.facts
        self.not_checked += other.not_checked
