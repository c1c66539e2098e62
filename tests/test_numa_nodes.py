"""In emulated machines with real NUMA nodes: what the kernel shows, the plans, and where memory lands.

``pytest -m numa_lab``. Each test boots a guest, which takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from guest import REPOSITORY, TOPOLOGIES, missing, run_in_guest
from guest_plans import MASKS, SPLITS

_reason = missing()
pytestmark = [
    pytest.mark.numa_lab,
    pytest.mark.skipif(_reason is not None, reason=f"no guests: {_reason}"),
]

Groups = list[tuple[int | None, list[int]]]


def one_group(*cpus: int) -> Groups:
    return [(None, list(cpus))]


ALL_FOUR = one_group(1, 2, 3)
"""Four cores without the split: the calling thread computes on the fourth."""

TWO_NODES: Groups = [(0, [1]), (1, [3])]
"""Two nodes of two cores: one core is the calling thread's, one is spare."""

FOUR_NODES: Groups = [(node, [node]) for node in range(4)]
"""Nodes of a single core: there is none to leave to the calling thread."""

TWO_CORES: Groups = [(0, [0]), (1, [2])]
"""The same with two threads per core."""

# Without a setting and with NUMA_MOE_SPLIT=1, on all CPUs; what the first reason without a setting holds.
EXPECTED: dict[str, tuple[Groups, Groups, str]] = {
    "one": (ALL_FOUR, ALL_FOUR, "this machine has one NUMA node"),
    "two": (TWO_NODES, TWO_NODES, "split across NUMA nodes 0-1: 1 + 1 workers"),
    "four": (FOUR_NODES, FOUR_NODES, "split across NUMA nodes 0-3: 1 + 1 + 1 + 1 workers"),
    "memless": (ALL_FOUR, ALL_FOUR, "node 1 has no memory: its CPUs work for node 0"),
    "cpuless": (ALL_FOUR, ALL_FOUR, "node 1 has no CPUs: no slice there"),
    "lopsided": (ALL_FOUR, [(0, [2]), (1, [3])], "have 3 + 1 cores for equal slices"),
    "tight": (TWO_NODES, TWO_NODES, "split across NUMA nodes 0-1: 1 + 1 workers"),
    "smt": (TWO_CORES, TWO_CORES, "split across NUMA nodes 0-1: 1 + 1 workers"),
}


def plans_in_guest(topology: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The plans by mask and setting."""
    done = run_in_guest(topology, [sys.executable, str(Path(__file__).with_name("guest_plans.py"))])
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    plans = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(plan["mask"], plan["setting"]): plan for plan in plans}


def groups(plan: dict[str, Any]) -> Groups:
    return [(node, cpus) for node, cpus in plan["groups"]]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_plans(topology: str) -> None:
    unset, forced, reason = EXPECTED[topology]
    plans = plans_in_guest(topology)
    assert set(plans) == {(mask, split) for mask in MASKS for split in SPLITS}
    plan = plans["all CPUs", "unset"]
    assert groups(plan) == unset
    assert reason in plan["reasons"][0]
    assert groups(plans["all CPUs", "0"]) == (one_group(2) if topology == "smt" else ALL_FOUR)
    assert groups(plans["all CPUs", "1"]) == forced
    # The split says so, a machine with fewer than two usable nodes nothing, unless it was asked for.
    assert bool(plan["log"]) == (topology in {"two", "four", "lopsided", "tight", "smt"})
    assert plans["all CPUs", "1"]["log"]
    test = plans["all CPUs", "test"]
    assert [node for node, _ in groups(test)] == [None, None]
    assert all(cpus for _, cpus in groups(test))

    # A mask that hides what is beyond CPUs 0 and 1.
    hidden = plans["CPUs 0-1", "unset"]
    used = [cpu for _, cpus in groups(hidden) for cpu in cpus]
    assert set(used) <= {0, 1}
    if topology == "four":
        assert groups(hidden) == [(0, [0]), (1, [1])]
    else:
        assert groups(hidden) == (one_group() if topology == "smt" else one_group(1))
        (line,) = plans["CPUs 0-1", "1"]["log"]
        assert line[1].startswith("NUMA_MOE_SPLIT=1, but no split: ")


def memory_test() -> Path | None:
    """The C++ tests of csrc/memory, if they were built (without sanitizers: guests are slow enough)."""
    programs = [REPOSITORY / "build" / folder / "memory/memory_test" for folder in ("cpp-plain", "cpp")]
    return next((program for program in programs if os.access(program, os.X_OK)), None)


@pytest.mark.parametrize("topology", ["two", "four", "cpuless", "tight"])
def test_memory_lands_on_its_node(topology: str) -> None:
    """Slices bound to each node are found there whole; an overfull node spills; huge pages never fault."""
    program = memory_test()
    if program is None:
        pytest.skip("the C++ tests are not built (.ci/cpp-tests plain)")
    # Emulated, filling a node takes its time.
    done = run_in_guest(topology, [str(program)], environment={"NUMA_MOE_TEST_LIMIT": "600"})
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in (
        "TouchedByOneThreadEverySliceIsOnItsNode",
        "SlicesInReverseOrderOfNodes",
        "OverfullNodeSpillsInsteadOfCallingTheOomKiller",
        "ExplicitHugePagesOfEachNode",
    ):
        assert f"[       OK ] NodeBinding.{test}" in done.stdout
