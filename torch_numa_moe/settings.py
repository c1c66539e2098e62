"""What the user sets: the ``NUMA_MOE_*`` environment variables, and the same from code.

From the environment, a value that can't be understood is ignored and one line says so: a typing error in
a shell profile must not keep a program from starting. From code it raises.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INSTRUCTION_SETS = ("portable", "neon", "neonbf16", "avx2", "avx512", "avx512bf16", "amx")
"""Names of ``NUMA_MOE_ISA``, those of csrc/kernels, lowest first within an architecture."""

MAX_WORKERS = 8192
"""Largest ``NUMA_MOE_WORKERS``: the most CPUs that distributions build their x86 kernels for (NR_CPUS)."""

MAX_SPIN_US = 1_000_000
"""Largest ``NUMA_MOE_SPIN_US``, a second: beyond that a worker might as well never sleep."""

MAX_DISPATCHER_YIELDS = 1_000_000
"""Largest ``NUMA_MOE_DISPATCHER_YIELDS``: about a second of yielding, with nobody else to run."""

HUGE_PAGES = ("explicit", "transparent", "none")
"""Values of ``NUMA_MOE_HUGE_PAGES``."""

SCHEDULING = ("normal", "fifo", "rr")
"""Values of ``NUMA_MOE_SCHED``."""

MAX_TEST_SLICES = 64
"""Largest N of ``NUMA_MOE_SPLIT=test:N``."""

DEFAULT_TEST_SLICES = 2
"""Slices of ``NUMA_MOE_SPLIT=test`` without a number."""


class LogLine(NamedTuple):
    """A line for the logger ``torch_numa_moe``: its level, as in :mod:`logging`, and its text."""

    level: int
    text: str


@dataclass(frozen=True)
class Settings:
    """What the user asked for; None means that the plan decides.

    Attributes:
        split: ``"0"``, ``"1"``, ``"test"`` or None (split when two or more NUMA nodes can be used).
        test_slices: slices that ``"test"`` makes.
        workers: number of threads that compute.
        spin_us: microseconds that an idle worker spins before it sleeps.
        dispatcher_yields: how often a waiting call yields before it sleeps.
        isa: highest instruction set to use, one of :data:`INSTRUCTION_SETS`.
        huge_pages: one of :data:`HUGE_PAGES`.
        watch: whether to look for other programs on the workers' CPUs.
        sched: one of :data:`SCHEDULING`.
        log_lines: what was wrong in the environment, one line each.
    """

    split: str | None = None
    test_slices: int = DEFAULT_TEST_SLICES
    workers: int | None = None
    spin_us: int | None = None
    dispatcher_yields: int | None = None
    isa: str | None = None
    huge_pages: str | None = None
    watch: bool | None = None
    sched: str | None = None
    log_lines: tuple[LogLine, ...] = field(default=(), compare=False)


_SPLIT_ACCEPTED = f"0, 1, test or test:N with N from 1 to {MAX_TEST_SLICES}"
_ISA_ACCEPTED = "one of " + ", ".join(INSTRUCTION_SETS)
_HUGE_PAGES_ACCEPTED = "one of " + ", ".join(HUGE_PAGES)
_SCHED_ACCEPTED = "one of " + ", ".join(SCHEDULING)


@dataclass(frozen=True)
class _Integer:
    """A setting that is a number."""

    name: str
    lowest: int
    highest: int

    @property
    def accepted(self) -> str:
        return f"a whole number from {self.lowest} to {self.highest}"

    def parse(self, text: str) -> dict[str, int]:
        # ASCII digits only, and not so many that int() takes long.
        if not re.fullmatch("[0-9]{1,18}", text) or not self.lowest <= int(text) <= self.highest:
            raise ValueError(self.accepted)
        return {self.name: int(text)}


_WORKERS = _Integer("workers", 1, MAX_WORKERS)
_SPIN_US = _Integer("spin_us", 0, MAX_SPIN_US)
_DISPATCHER_YIELDS = _Integer("dispatcher_yields", 0, MAX_DISPATCHER_YIELDS)
_TEST_SLICES = _Integer("test_slices", 1, MAX_TEST_SLICES)


def _parse_split(text: str) -> dict[str, str | int]:
    if text in {"0", "1", "test"}:
        return {"split": text, "test_slices": DEFAULT_TEST_SLICES}
    name, _, number = text.partition(":")
    try:
        if name == "test":
            return {"split": name, **_TEST_SLICES.parse(number)}
    except ValueError:
        pass
    raise ValueError(_SPLIT_ACCEPTED)


def _parse_isa(text: str) -> dict[str, str]:
    if text not in INSTRUCTION_SETS:
        raise ValueError(_ISA_ACCEPTED)
    return {"isa": text}


def _parse_huge_pages(text: str) -> dict[str, str]:
    if text not in HUGE_PAGES:
        raise ValueError(_HUGE_PAGES_ACCEPTED)
    return {"huge_pages": text}


def _parse_sched(text: str) -> dict[str, str]:
    if text not in SCHEDULING:
        raise ValueError(_SCHED_ACCEPTED)
    return {"sched": text}


def _parse_watch(text: str) -> dict[str, bool]:
    if text not in {"0", "1"}:
        raise ValueError("0 or 1")
    return {"watch": text == "1"}


_VARIABLES: Mapping[str, Callable[[str], Mapping[str, str | int]]] = {
    "NUMA_MOE_SPLIT": _parse_split,
    "NUMA_MOE_WORKERS": _WORKERS.parse,
    "NUMA_MOE_SPIN_US": _SPIN_US.parse,
    "NUMA_MOE_DISPATCHER_YIELDS": _DISPATCHER_YIELDS.parse,
    "NUMA_MOE_ISA": _parse_isa,
    "NUMA_MOE_HUGE_PAGES": _parse_huge_pages,
    "NUMA_MOE_WATCH": _parse_watch,
    "NUMA_MOE_SCHED": _parse_sched,
}
_SHOWN_CHARACTERS = 40  # of a value that isn't understood


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the environment.

    Spaces around a value are ignored. What can't be understood counts as not set, and ``log_lines`` of the
    result says so: the variable, what it was and what is accepted. Never raises.

    Args:
        environ: the variables.
    """
    values: dict[str, Any] = {}
    lines: list[LogLine] = []
    for variable, parse in _VARIABLES.items():
        value = environ.get(variable)
        if value is None:
            continue
        try:
            values |= parse(value.strip(" \t\r\n"))
        except ValueError as accepted:
            shown = ascii(value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "...")
            lines.append(LogLine(logging.WARNING, f"{variable} is {shown}, ignored: it takes {accepted}"))
    return Settings(**values, log_lines=tuple(lines))


def override(
    settings: Settings,
    *,
    split: str | None = None,
    workers: int | None = None,
    spin_us: int | None = None,
    dispatcher_yields: int | None = None,
    isa: str | None = None,
    huge_pages: str | None = None,
    watch: bool | None = None,
    sched: str | None = None,
) -> Settings:
    """The settings with some of them set from code; None leaves one as it is.

    Args:
        settings: what holds otherwise.
        split: ``"0"``, ``"1"``, ``"test"`` or ``"test:N"``.
        workers: 1 to :data:`MAX_WORKERS`.
        spin_us: 0 to :data:`MAX_SPIN_US`, microseconds.
        dispatcher_yields: 0 to :data:`MAX_DISPATCHER_YIELDS`.
        isa: one of :data:`INSTRUCTION_SETS`.
        huge_pages: one of :data:`HUGE_PAGES`.
        watch: True or False.
        sched: one of :data:`SCHEDULING`.

    Returns:
        The settings, with the ``log_lines`` that reading the environment gave.

    Raises:
        TypeError: an argument of another type (a bool is no number, and a number no bool).
        ValueError: a value that isn't accepted. Both name the argument, what it was and what is accepted.
    """
    values: dict[str, Any] = {}
    numbers = ((_WORKERS, workers), (_SPIN_US, spin_us), (_DISPATCHER_YIELDS, dispatcher_yields))
    for setting, number in numbers:
        if number is None:
            continue
        _check_type(setting.name, number, int, setting.accepted)
        if not setting.lowest <= number <= setting.highest:
            raise ValueError(f"{setting.name} must be {setting.accepted}, got {number}")
        values[setting.name] = number
    texts = (
        ("split", split, _SPLIT_ACCEPTED, _parse_split),
        ("isa", isa, _ISA_ACCEPTED, _parse_isa),
        ("huge_pages", huge_pages, _HUGE_PAGES_ACCEPTED, _parse_huge_pages),
        ("sched", sched, _SCHED_ACCEPTED, _parse_sched),
    )
    for name, text, accepted, parse in texts:
        if text is None:
            continue
        _check_type(name, text, str, accepted)
        try:
            values |= parse(text)
        except ValueError:
            raise ValueError(f"{name} must be {accepted}, got {text!r}") from None
    if watch is not None:
        if not isinstance(watch, bool):
            raise TypeError(f"watch must be True or False, got {watch!r} of type {type(watch).__name__}")
        values["watch"] = watch
    return replace(settings, **values)


def _check_type(name: str, value: object, expected: type, accepted: str) -> None:
    if not isinstance(value, expected) or isinstance(value, bool):
        raise TypeError(f"{name} must be {accepted}, got {value!r} of type {type(value).__name__}")
