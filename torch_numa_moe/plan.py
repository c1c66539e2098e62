"""Decides which CPUs work, in which groups, and whether weights are split across NUMA nodes.

Pure: :func:`make_plan` is a function of what was read, so every rule has a test with a made-up machine.

Workers stay on physical cores, one thread per core. With the split there is one group of workers per NUMA
node and the slices of the weights are of equal size; without it there is one group that takes all nodes'
memory as one.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_numa_moe.cores import Deal, deal_workers, find_sites, sites_without_split, usable_cores
from torch_numa_moe.plan_text import describe_plan
from torch_numa_moe.room import find_shortages
from torch_numa_moe.settings import LogLine
from torch_numa_moe.sizes import size_text
from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_numa_moe.cores import Core
    from torch_numa_moe.limits import ProcessLimits
    from torch_numa_moe.settings import Settings
    from torch_numa_moe.topology import Topology

__all__ = ["GroupPlan", "Plan", "make_plan"]

SMALL_BOX_CORES = 4
"""Up to this many cores (or CPUs of quota) in a single group, the calling thread computes too, instead of
leaving its core to wait on: there it would be a quarter of the machine or more."""

MAX_WORKERS_PER_GROUP = 128
"""Most workers of a group by default. All of a group's workers claim tasks from one counter, and a node's
memory bandwidth is used up by far fewer; ``NUMA_MOE_WORKERS`` may ask for more."""

LOWEST_CORE_RATIO = 0.5
"""No split by default when the smallest node has less than this share of the largest node's cores.

Slices are of equal size, so the smaller of two nodes, r times as fast as the other, sets the pace: 2 * r.
Without the split it is 1 + r, times what reading from the other node costs: 43.25 / 59.3 = 0.73 in a
published study of a dual-socket machine (22 workers, tokens per second without and with the split). Hence
the split wins from r = 0.57 on if speed goes with the number of cores; when weights are read it does so
less, since part of a node's cores use up its bandwidth, and so the bound is set a little lower."""

DEFAULT_WORKER_SPIN_US = 50
"""How long an idle worker spins before it sleeps."""

MAX_REAL_TIME_SPIN_US = 1000
"""How long workers that go before other programs spin at most: meanwhile nobody else gets their CPUs."""

DEFAULT_DISPATCHER_SPIN_US = 20
"""How long a waiting call spins before it yields."""

DEFAULT_DISPATCHER_YIELDS = 512
"""How often a waiting call yields before it sleeps: for about a quarter of a millisecond.

To be woken took 40 us where it was measured (``benchmarks/pool.py --only wait``), so sleeping adds a sixth to
a wait that is just too long; with 128 it added a third. With many more, calls of 7 ms would spend more than
1/20 of the system time of yielding without a bound."""


@dataclass(frozen=True)
class GroupPlan:
    """A group of workers, and where its slice of the weights lies.

    Attributes:
        node: the NUMA node of its slice, or None if it may lie anywhere.
        worker_cpus: the CPU of each worker, ascending; -1 for one that isn't pinned.
    """

    node: int | None
    worker_cpus: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What the pool is started with, and why. Printing it shows both, with a picture of the machine.

    Attributes:
        split: whether the slices lie on different NUMA nodes.
        groups: the groups of workers, one per slice.
        host_cpu: a CPU whose core has no worker, left to the calling thread (which isn't pinned), or None.
        spare_cpus: CPUs of further cores left free, for what else the process and the system do.
        caller_helps: whether the calling thread computes too (then of group 0).
        worker_spin_us: microseconds that an idle worker spins before it sleeps.
        dispatcher_spin_us: microseconds that a waiting call spins before it yields.
        dispatcher_yields: how often it yields before it sleeps.
        scheduling: ``"normal"``, ``"fifo"`` or ``"rr"``: how workers share their CPUs with other programs.
        reasons: sentences: what was decided that isn't obvious, and why.
        log_lines: what to log when the pool starts with this plan.
        topology, limits: what it was made from.
    """

    split: bool
    groups: tuple[GroupPlan, ...]
    host_cpu: int | None
    spare_cpus: tuple[int, ...]
    caller_helps: bool
    worker_spin_us: int
    dispatcher_spin_us: int
    dispatcher_yields: int
    scheduling: str
    reasons: tuple[str, ...]
    log_lines: tuple[LogLine, ...]
    topology: Topology = field(repr=False)
    limits: ProcessLimits = field(repr=False)

    @property
    def num_slices(self) -> int:
        """Slices that weights are cut into: one per group."""
        return len(self.groups)

    @property
    def num_workers(self) -> int:
        """Workers of all groups; the calling thread isn't counted."""
        return sum(len(group.worker_cpus) for group in self.groups)

    def describe(self) -> str:
        """What the plan is and why, in lines of text with a picture of nodes, cores and workers."""
        return describe_plan(self)

    def __str__(self) -> str:
        return self.describe()


def make_plan(
    topology: Topology,
    limits: ProcessLimits,
    settings: Settings,
    *,
    unpinnable: str | None = None,
    weight_bytes: int | None = None,
) -> Plan:
    """Decides on groups, workers and the split.

    Never raises: on any machine there is a plan, at worst a single group with a single worker.

    Args:
        topology: the machine.
        limits: what this process may use of it.
        settings: what the user asked for.
        unpinnable: why threads can't be pinned, if that has turned out. Workers are then left to the
            scheduler, and there is no split, since nothing keeps them on their nodes.
        weight_bytes: size of the packed weights to be placed, in bytes, if known. A node with less memory
            than its share rules the split out; one that only lacks room at present is a reason in the plan.
    """
    cores, notes = usable_cores(topology, limits)
    planner = _Planner(topology, limits, settings, unpinnable, cores, weight_bytes or 0)
    planner.log_lines += settings.log_lines
    if settings.split == "test":
        groups, deal, caller_helps = planner.test_groups()
    else:
        groups, deal, caller_helps = planner.split_groups() or planner.single_group()
    planner.look_for_room(groups)
    spin_us = DEFAULT_WORKER_SPIN_US if settings.spin_us is None else settings.spin_us
    scheduling = planner.scheduling(groups)
    if scheduling != "normal":
        spin_us = min(spin_us, MAX_REAL_TIME_SPIN_US)
    yields = settings.dispatcher_yields
    return Plan(
        split=len(groups) > 1 and settings.split != "test",
        groups=groups,
        host_cpu=deal.host_cpu,
        spare_cpus=deal.spare_cpus,
        caller_helps=caller_helps,
        worker_spin_us=spin_us,
        # Whoever wants workers to sleep sooner wants the same of a waiting call.
        dispatcher_spin_us=min(DEFAULT_DISPATCHER_SPIN_US, spin_us),
        dispatcher_yields=DEFAULT_DISPATCHER_YIELDS if yields is None else yields,
        scheduling=scheduling,
        reasons=(*planner.reasons, *planner.site_notes, *notes, *topology.notes),
        log_lines=tuple(planner.log_lines),
        topology=topology,
        limits=limits,
    )


_Choice = tuple[tuple[GroupPlan, ...], Deal, bool]  # groups, the deal that they came from, caller_helps


class _Planner:
    """The rules, and what is to be said about their outcome."""

    def __init__(
        self,
        topology: Topology,
        limits: ProcessLimits,
        settings: Settings,
        unpinnable: str | None,
        cores: Sequence[Core],
        weight_bytes: int,
    ) -> None:
        self.reasons: list[str] = []
        self.log_lines: list[LogLine] = []
        self.sites, self.site_notes = find_sites(topology, limits, cores)
        self._topology = topology
        self._limits = limits
        self._weight_bytes = weight_bytes
        self._settings = settings
        self._unpinnable = unpinnable
        self._cores = cores
        self._cpus = sum(len(core.threads) for core in cores)
        # Whole CPUs that can be kept busy.
        quota = limits.cpu_quota
        self._budget = self._cpus if quota is None else min(self._cpus, max(1, math.ceil(quota)))
        self._quota_text = "" if quota is None else f"the CPU quota of {quota:g} ({limits.cpu_quota_source})"
        self._workers = self._wanted_workers()

    def _say(self, level: int, sentence: str) -> None:
        self.reasons.append(sentence)
        self.log_lines.append(LogLine(level, sentence))

    def _wanted_workers(self) -> int | None:
        """NUMA_MOE_WORKERS, as far as it can be had; None if it isn't set."""
        wanted = self._settings.workers
        if wanted is not None and wanted > self._budget:
            why = f"this process may use {self._cpus} CPUs"
            if self._budget < self._cpus:
                why = f"{self._quota_text} pays for {self._budget}"
            self._say(logging.WARNING, f"NUMA_MOE_WORKERS={wanted} is lowered to {self._budget}: {why}")
            return self._budget
        return wanted

    def scheduling(self, groups: Sequence[GroupPlan]) -> str:
        """NUMA_MOE_SCHED, unless a worker could then take a CPU for itself alone."""
        wanted = self._settings.sched or "normal"
        if wanted == "normal":
            return wanted
        refusal = None
        if not any(cpu >= 0 for group in groups for cpu in group.worker_cpus):
            refusal = "no worker has a CPU of its own"
        elif self._limits.real_time_us == -1:
            refusal = (
                "kernel.sched_rt_runtime_us is -1, nothing would run beside a busy worker: "
                "sysctl -w kernel.sched_rt_runtime_us=950000 mends it"
            )
        if refusal is not None:
            self._say(logging.WARNING, f"NUMA_MOE_SCHED={wanted} is not done: {refusal}")
            return "normal"
        self.reasons.append(f"workers go before other programs on their CPUs: NUMA_MOE_SCHED={wanted}")
        return wanted

    def split_groups(self) -> _Choice | None:
        """A group per node, or None, with the reason said."""
        refusal = self._split_refusal()
        if refusal is None:
            deal = self._deal_for_split()
            shares = [len(cpus) for cpus in deal.by_site]
            # The cores that a node has, before some are set aside, which would hide the difference; but
            # what was asked for is judged by what it leads to.
            sizes = shares if self._workers is not None else [len(site.cores) for site in self.sites]
            lopsided = min(sizes) < LOWEST_CORE_RATIO * max(sizes)
            nodes = [site.node for site in self.sites if site.node is not None]
            unequal = f"NUMA nodes {format_list(nodes)} have {_sum(sizes)} cores for equal slices"
            if not lopsided or self._settings.split == "1":
                shown = f"split across NUMA nodes {format_list(nodes)}: {_sum(shares)} workers"
                self._say(logging.INFO, shown)
                if lopsided:
                    self._say(logging.WARNING, f"{unequal}: the smallest node sets the pace")
                if deal.host_cpu is None:
                    self.reasons.append(
                        "no core is left to the calling thread: it sleeps while workers compute"
                    )
                groups = zip(self.sites, deal.by_site, strict=True)
                return tuple(GroupPlan(site.node, cpus) for site, cpus in groups), deal, False
            refusal = f"{unequal}, the smallest less than {LOWEST_CORE_RATIO:g} of the largest"
        self._say_refusal(refusal)
        return None

    def _split_refusal(self) -> str | None:
        if self._settings.split == "0":
            return "NUMA_MOE_SPLIT=0"
        num_sites = len(self.sites)
        if num_sites < 2:
            num_nodes = len(self._topology.nodes)
            if num_nodes == 1:
                return "this machine has one NUMA node"
            usable = "none" if num_sites == 0 else "one"
            notes, self.site_notes = self.site_notes, []  # said here
            return f"{usable} of {num_nodes} NUMA nodes can be used ({'; '.join(notes)})"
        if self._unpinnable is not None:
            return f"workers can't be kept on their nodes ({self._unpinnable})"
        if self._budget < num_sites:
            why = self._quota_text or "the affinity mask"
            return f"{why} leaves {self._budget} CPUs for {num_sites} NUMA nodes"
        if self._workers is not None and self._workers < num_sites:
            return f"NUMA_MOE_WORKERS={self._workers} are fewer than the {num_sites} NUMA nodes"
        share = self._weight_bytes // num_sites
        for site in self.sites:
            memory = None if site.node is None else self._topology.node(site.node).memory_bytes
            if memory is not None and memory < share:
                return (
                    f"NUMA node {site.node} has {size_text(memory)} of memory, less than its share of the "
                    f"weights ({size_text(share)})"
                )
        return None

    def look_for_room(self, groups: Sequence[GroupPlan]) -> None:
        """Says which nodes lack room for the weights at present."""
        nodes = [group.node for group in groups]
        share = [self._weight_bytes // len(nodes)] * len(nodes)
        self.reasons += map(str, find_shortages(share, nodes, self._topology, self._limits))

    def _say_refusal(self, refusal: str) -> None:
        sentence = f"no split: {refusal}"
        self.reasons.append(sentence)
        if self._settings.split == "1":
            self.log_lines.append(LogLine(logging.WARNING, f"NUMA_MOE_SPLIT=1, but {sentence}"))
        # That workers aren't pinned is said once, where they are dealt out.
        elif self._settings.split is None and len(self.sites) > 1 and self._unpinnable is None:
            self.log_lines.append(LogLine(logging.INFO, sentence))

    def _deal_for_split(self) -> Deal:
        if self._workers is not None:
            return deal_workers(self.sites, self._workers, set_aside=2, keep_one_each=True)
        deal = self._deal_all_cores(None)
        # One CPU of a quota is the calling thread's, if the nodes can spare it.
        within_quota = max(len(self.sites), self._budget - 1)
        if within_quota < len(deal.order):
            self.reasons.append(f"{self._quota_text} pays for {self._budget} of {self._cpus} CPUs")
            deal = self._deal_all_cores(within_quota)
        if any(len(cpus) == MAX_WORKERS_PER_GROUP for cpus in deal.by_site):
            self._say_capped()
        return deal

    def _deal_all_cores(self, count: int | None) -> Deal:
        return deal_workers(
            self.sites, count, set_aside=2, keep_one_each=True, most_per_site=MAX_WORKERS_PER_GROUP
        )

    def _say_capped(self) -> None:
        self.reasons.append(
            f"at most {MAX_WORKERS_PER_GROUP} workers in a group, unless NUMA_MOE_WORKERS asks for more"
        )

    def _busy_cores(self) -> int:
        """The cores that can be kept busy, one thread each."""
        cores = len(self._cores)
        if self._budget < cores:
            self.reasons.append(f"{self._quota_text} pays for {self._budget} of {cores} cores")
        return min(cores, self._budget)

    def single_group(self) -> _Choice:
        """All workers in one group."""
        caller_helps = False
        count = self._workers
        if count is None:
            cores = self._busy_cores()
            caller_helps = cores <= SMALL_BOX_CORES
            count = min(cores - 1, MAX_WORKERS_PER_GROUP)
            if caller_helps:
                self.reasons.append(f"the calling thread computes too: few cores ({cores})")
            if count < cores - 1:
                self._say_capped()
        deal = self._deal_anywhere(count)
        return (GroupPlan(None, tuple(sorted(deal.order))),), deal, caller_helps

    def test_groups(self) -> _Choice:
        """As many groups as NUMA_MOE_SPLIT=test asks for, on any machine."""
        num_groups = self._settings.test_slices
        count = self._workers
        if count is None:
            cores = self._busy_cores()
            count = cores - 1 if cores > num_groups else cores
        if count < num_groups:
            if self._workers is not None:
                sentence = (
                    f"NUMA_MOE_WORKERS={count} is raised to {num_groups}, one for each slice of the test"
                )
                self._say(logging.WARNING, sentence)
            count = num_groups
        self.reasons.append(f"NUMA_MOE_SPLIT=test: {num_groups} slices that may lie anywhere")
        if self._cpus < num_groups:
            self.reasons.append(f"workers aren't pinned: {num_groups} groups, {self._cpus} CPUs")
            return (GroupPlan(None, (-1,)),) * num_groups, Deal((), (), None, ()), False
        deal = self._deal_anywhere(count)
        dealt = [tuple(sorted(deal.order[group::num_groups])) for group in range(num_groups)]
        return tuple(GroupPlan(None, cpus) for cpus in dealt), deal, False

    def _deal_anywhere(self, count: int) -> Deal:
        deal = deal_workers(sites_without_split(self._cores), count, set_aside=1, keep_one_each=False)
        if self._unpinnable is None:
            return deal
        sentence = f"workers aren't pinned: {self._unpinnable}"
        if any(self._unpinnable in line.text for line in self.log_lines):
            self.reasons.append(sentence)
        else:
            self._say(logging.WARNING, sentence)
        return Deal((-1,) * len(deal.order), (), None, ())


def _sum(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))
