#!/usr/bin/env python3
"""Checks the model of the thread pool, pool.pml, exhaustively, and that it notices every fault put into it.

    python3 tests/model/check.py [--quick] [--only TEXT]

Status 0 if every variant has the outcome that is expected of it. Needs spin and gcc.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "pool.pml"

CLEAN = "clean"
LOST = "lost wake-up"  # an invalid end state: a thread sleeps and nobody is left to wake it
VIOLATED = "assertion"
TOO_LARGE = "not exhausted"

# Deeper than any run without a cycle in these variants; a run that is cut off counts as a surprise.
DEPTH = 2_000_000
MEMORY_MIB = 8000


@dataclass
class Variant:
    """A configuration of pool.pml, perhaps with a fault in it."""

    what: str
    macros: str  # NAME=VALUE or NAME, separated by spaces
    expected: str = CLEAN
    quick: bool = True

    def value(self, macro: str) -> str:
        """What a macro of pool.pml is defined as; its default there is 1."""
        found = re.search(rf"\b{macro}=(\d+)", self.macros)
        return found[1] if found else "1"


@dataclass
class Result:
    """What Spin said."""

    outcome: str
    states: int
    seconds: float  # of CPU time, compilers included


VARIANTS = [
    Variant("one group", "N=1 K=3"),
    Variant("two groups", "N=2 K=2"),
    Variant("two groups, two phases, barrier of the pool", "N=2 K=2 PHASES=2"),
    Variant("two groups, two phases, barrier of the group", "N=2 K=2 PHASES=2 POOL_BARRIER=0"),
    Variant("two groups, each without tasks in one phase", "N=2 K=2 PHASES=2 SHAPE=1"),
    Variant("one group of two workers", "N=1 W=2 T=2 K=2"),
    Variant("the caller helps, one group", "N=1 T=2 K=2 PHASES=2 HELP=1"),
    Variant("the caller helps, two groups", "N=2 PHASES=2 HELP=1"),
    Variant("the caller alone serves group 0", "N=2 K=2 PHASES=2 SHAPE=1 HELP=1 CALLER_ALONE=1"),
    Variant("three groups", "N=3"),
    Variant("two groups of two workers", "N=2 W=2 T=1", quick=False),
    Variant("four groups", "N=4", quick=False),
    # Claims.
    Variant("claim counter not reset", "N=1 K=2 TASKS_NOT_RESET", LOST),
    Variant("epoch not advanced", "N=1 W=2 K=2 EPOCH_NOT_ADVANCED", LOST),
    Variant("stale epoch accepted by a claim", "N=1 W=2 K=2 STALE_CLAIM", VIOLATED),
    Variant("claims by load and store", "N=1 W=2 CLAIM_BY_STORE", VIOLATED),
    Variant("opening without release", "N=1 OPENING_WITHOUT_RELEASE", VIOLATED),
    # Workers' sleep: both sides of opening and announcement.
    Variant("opening by look and store", "N=1 OPENING_BY_STORE", LOST),
    Variant("worker's announcement by store", "N=1 ANNOUNCEMENT_BY_STORE", LOST),
    Variant("worker's announcement deleted", "N=1 NO_ANNOUNCEMENT", LOST),
    Variant("wake skipped though a worker sleeps", "N=1 SLEEPERS_OVERLOOKED", LOST),
    Variant("workers' wake deleted", "N=1 NO_WORKER_WAKE", LOST),
    Variant("every opening wakes", "N=1 EVERY_OPENING_WAKES", VIOLATED),
    Variant("sleepers' bit not reset", "N=1 K=2 OPENING_KEEPS_SLEEPERS", VIOLATED),
    Variant("announcement and sleep on any epoch", "N=1 ANNOUNCEMENT_TO_ANY_EPOCH SLEEP_ON_ANY_EPOCH", LOST),
    Variant("sleep on any epoch", "N=1 SLEEP_ON_ANY_EPOCH", LOST),
    # The dispatcher's sleep: both sides of announcement and completion.
    Variant("dispatcher's announcement by store", "N=1 SLEEP_ANNOUNCED_BY_STORE", LOST),
    Variant("completion by look and store", "N=1 COMPLETION_BY_STORE", LOST),
    Variant("dispatcher's wake deleted", "N=1 NO_DISPATCHER_WAKE", LOST),
    Variant("dispatcher sleeps on any value", "N=1 DISPATCHER_SLEEPS_ANYWAY", LOST),
    Variant("completion not reset for the next job", "N=1 K=1 ARM_MISSING", VIOLATED),
    Variant("park flag reset over a completion", "N=1 HELP=1 PARK_FLAG_RESET_OVER_COMPLETION", LOST),
    Variant("park flag not reset", "N=2 PHASES=2 HELP=1 PARK_FLAG_NOT_RESET", VIOLATED),
    Variant("wake trusted", "N=1 K=2 WAKE_TRUSTED", VIOLATED),
    Variant("every completion wakes", "N=1 EVERY_COMPLETION_WAKES", VIOLATED),
    # The caller that helps: both sides of its announcement and a phase's opening.
    Variant(
        "caller looks before its announcement",
        "N=2 PHASES=2 SHAPE=1 HELP=1 CALLER_ALONE=1 CALLER_LOOKS_EARLY",
        LOST,
    ),
    Variant(
        "opener looks before its opening",
        "N=2 PHASES=2 SHAPE=1 HELP=1 CALLER_ALONE=1 RECALL_LOOKS_EARLY",
        LOST,
    ),
    Variant("no second look", "N=2 PHASES=2 SHAPE=1 HELP=1 CALLER_ALONE=1 NO_SECOND_LOOK", LOST),
    Variant("no recall", "N=2 PHASES=2 SHAPE=1 HELP=1 CALLER_ALONE=1 NO_RECALL", LOST),
    # Barriers.
    Variant("first group's completion taken for all", "N=2 FIRST_GROUP_FOR_ALL", VIOLATED),
    Variant("first group's phase taken for all", "N=2 PHASES=2 FIRST_GROUP_FOR_ALL", VIOLATED),
    Variant("countdown not reset", "N=2 PHASES=2 COUNTDOWN_NOT_RESET", LOST),
    Variant("countdown by load and store", "N=2 ARRIVAL_BY_STORE", LOST),
    Variant("report and countdown without release", "N=2 REPORT_AND_ARRIVAL_WITHOUT_RELEASE", VIOLATED),
    Variant("report without release", "N=1 W=2 T=2 REPORT_WITHOUT_RELEASE", VIOLATED),
    # The end of the pool.
    Variant("order to stop after rousing", "N=1 STOP_AFTER_ROUSING", LOST),
    Variant("rousing without an opening", "N=1 ROUSING_WITHOUT_OPENING", LOST),
]


def command_output(command: list[str], folder: Path) -> str:
    """What a command prints; ends the program if it fails."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def check(variant: Variant, folder: Path) -> Result:
    """Builds and runs the verifier of a variant."""
    begin = cpu_seconds()
    macros = [f"-D{macro}" for macro in variant.macros.split()]
    command_output(["spin", *macros, "-a", str(MODEL)], folder)
    # In most variants the compiler takes longer than the search.
    optimization = "-O2" if not variant.quick else "-O0"
    options = [optimization, "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
    command_output(["gcc", *options, "-o", "pan", "pan.c"], folder)
    output = command_output(["./pan", f"-m{DEPTH}", "-n"], folder)
    return Result(outcome_of(output), states_in(output), cpu_seconds() - begin)


def cpu_seconds() -> float:
    """CPU time of all programs run so far: it depends less than the clock on what else runs here."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def outcome_of(output: str) -> str:
    """What a verifier found."""
    if "pan:1: invalid end state" in output:
        return LOST
    if "pan:1: assertion violated" in output:
        return VIOLATED
    if "errors: 0" not in output:
        return output.strip().splitlines()[0] if output.strip() else "no output"
    incomplete = "max search depth too small" in output or "Search not completed" in output
    return TOO_LARGE if incomplete else CLEAN


def states_in(output: str) -> int:
    """How many states a verifier stored."""
    found = re.search(r"([\d.e+]+) states, stored", output)
    return round(float(found[1])) if found else 0


def main() -> int:
    """Checks the variants; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="without the variants that take long")
    parser.add_argument("--only", default="", help="variants with this text in their name")
    arguments = parser.parse_args()
    for program in ("spin", "gcc"):
        if shutil.which(program) is None:
            sys.exit(f"{program} isn't installed")
    chosen = [
        variant
        for variant in VARIANTS
        if (variant.quick or not arguments.quick) and arguments.only.lower() in variant.what.lower()
    ]
    if not chosen:
        sys.exit(f"no variant has {arguments.only!r} in its name")
    surprises = 0
    print(f"{'variant':58} groups {'states':>10}  {'outcome':13} {'expected':13} CPU s", flush=True)
    for variant in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            result = check(variant, Path(temporary))
        surprise = result.outcome != variant.expected
        surprises += surprise
        print(
            f"{variant.what:58} {variant.value('N'):>6} {result.states:>10}  {result.outcome:13} "
            f"{variant.expected:13} {result.seconds:5.1f}{'  SURPRISE' if surprise else ''}",
            flush=True,
        )
    print(f"{len(chosen)} variants, {surprises} surprises, {cpu_seconds():.0f} s of CPU time")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
