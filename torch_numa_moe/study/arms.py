"""The arms of the study: the ways to use a machine that are set side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch_numa_moe.cores import find_sites, usable_cores
from torch_numa_moe.limits import ProcessLimits
from torch_numa_moe.plan import make_plan
from torch_numa_moe.settings import Settings
from torch_numa_moe.topology import Topology

__all__ = ["ARMS", "DEFAULT_ARM", "Arm", "ArmSetting", "set_up_arms"]


@dataclass(frozen=True)
class Arm:
    """A way to use the machine.

    Attributes:
        letter: its name on the command line.
        title: what the table calls it.
    """

    letter: str
    title: str


ARMS: dict[str, Arm] = {
    arm.letter: arm
    for arm in (
        Arm("D", "default: one socket"),
        Arm("X", "all sockets, no split"),
        Arm("F", "split, few workers"),
        Arm("S", "split"),
        Arm("N", "split, not placed"),
    )
}
"""In the order of the table.

D: the cores of one node, memory where its workers first write it. X: the cores of all nodes as one group,
memory as in D. F: the split with about as many workers as D. S: the split. N: as S, but nothing binds the
weights, and one thread on the first node writes all of them before they are packed."""

DEFAULT_ARM = "D"


@dataclass(frozen=True)
class ArmSetting:
    """How an arm is run here.

    Attributes:
        arm: which one.
        split: for ``NUMA_MOE_SPLIT``.
        workers: for ``NUMA_MOE_WORKERS``, or None to leave it to the plan.
        cpus: CPUs that the process is confined to, or None for those that this one may use.
        placed: whether weights are bound to their nodes, where the plan has nodes for them.
        refusal: why it can't be run here, or "".
    """

    arm: Arm
    split: str = "0"
    workers: int | None = None
    cpus: tuple[int, ...] | None = None
    placed: bool = True
    refusal: str = ""


def set_up_arms(topology: Topology, limits: ProcessLimits, settings: Settings) -> dict[str, ArmSetting]:
    """How each arm is run on this machine, or why it isn't.

    Args:
        topology: the machine.
        limits: what this process may use of it.
        settings: of the environment: with ``NUMA_MOE_SPLIT=test`` the split's arms run on any machine, on
            slices that may lie anywhere.

    Returns:
        By the arm's letter, all of them.
    """
    cores, _ = usable_cores(topology, limits)
    sites, _ = find_sites(topology, limits, cores)
    testing = settings.split == "test"
    split = f"test:{settings.test_slices}" if testing else "1"
    wanted = dataclasses.replace(settings, split="1", workers=None)
    refusal = ""
    if not testing:
        plan = make_plan(topology, limits, wanted)
        if not plan.split:
            refusal = next(
                (reason for reason in plan.reasons if reason.startswith("no split: ")), "no split"
            ).removeprefix("no split: ")
    one_site = max(sites, key=lambda site: len(site.cores)) if len(sites) > 1 else None
    cpus = None
    if one_site is not None:
        cpus = tuple(sorted(cpu for core in one_site.cores for cpu in core.threads))
    num_slices = settings.test_slices if testing else len(sites)
    cores_of_one = len(one_site.cores) if one_site is not None else len(cores)
    few = max(num_slices, cores_of_one // max(num_slices, 1) * num_slices)
    without = "" if one_site is not None else "one NUMA node is all there is: it would be the default again"
    return {
        "D": ArmSetting(ARMS["D"], cpus=cpus),
        "X": ArmSetting(ARMS["X"], refusal=without),
        "F": ArmSetting(ARMS["F"], split=split, workers=few, refusal=refusal),
        "S": ArmSetting(ARMS["S"], split=split, refusal=refusal),
        "N": ArmSetting(ARMS["N"], split=split, placed=False, refusal=refusal),
    }
