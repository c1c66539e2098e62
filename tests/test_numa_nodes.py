"""In emulated machines with real NUMA nodes: the plans, where memory lands, what is refused, and the bits.

``pytest -m numa_lab``. Each test boots a guest, which takes minutes; ``-m "numa_lab and not slow"`` runs the
most telling ones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from guest import REPOSITORY, TOPOLOGIES, missing, run_in_guest
from guest_cases import MASKS, SPLITS
from numa_table import markdown, run_cases

_reason = missing()
pytestmark = [
    pytest.mark.numa_lab,
    pytest.mark.skipif(_reason is not None, reason=f"no guests: {_reason}"),
]

MIB = 1 << 20
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

# Those that differ most; the others take as long again.
TELLING = ("two",)
ALL_TOPOLOGIES = [
    pytest.param(name, marks=() if name in TELLING else pytest.mark.slow) for name in TOPOLOGIES
]


def groups(row: dict[str, Any]) -> Groups:
    return [(node, cpus) for node, cpus in row["groups"]]


def logged(row: dict[str, Any], text: str) -> list[str]:
    return [line for _, line in row["log"] if text in line]


@pytest.mark.parametrize("topology", ALL_TOPOLOGIES)
def test_table(topology: str) -> None:
    """Every setting, with and without a mask that hides nodes: plan, log, placement, bits."""
    rows = run_cases(topology, "table")
    assert not [row["error"] for row in rows if "error" in row]
    print("\n".join(markdown(topology, rows)))
    table = {(row["mask"], row["setting"]): row for row in rows}
    assert set(table) == {(mask, split) for mask in MASKS for split in SPLITS}
    unset, forced, reason = EXPECTED[topology]
    row = table["all CPUs", "unset"]
    assert groups(row) == unset
    assert reason in row["reasons"][0]
    assert groups(table["all CPUs", "0"]) == (one_group(2) if topology == "smt" else ALL_FOUR)
    assert groups(table["all CPUs", "1"]) == forced
    # The split says so, a machine with fewer than two usable nodes nothing, unless it was asked for.
    assert bool(logged(row, "split")) == (topology in {"two", "four", "lopsided", "tight", "smt"})
    assert logged(table["all CPUs", "1"], "split")
    test = table["all CPUs", "test"]
    assert [node for node, _ in groups(test)] == [None, None]
    assert all(cpus for _, cpus in groups(test))

    # A mask that hides what is beyond CPUs 0 and 1.
    hidden = table["CPUs 0-1", "unset"]
    used = [cpu for _, cpus in groups(hidden) for cpu in cpus]
    assert set(used) <= {0, 1}
    if topology == "four":
        assert groups(hidden) == [(0, [0]), (1, [1])]
    else:
        assert groups(hidden) == (one_group() if topology == "smt" else one_group(1))
        (line,) = logged(table["CPUs 0-1", "1"], "but no split")
        assert line.startswith("NUMA_MOE_SPLIT=1, but no split: ")

    for row in rows:
        where = row["mask"], row["setting"]
        assert row["bits"] == table["all CPUs", "0"]["bits"], where
        assert row["pinned"], where
        nodes = [node for node, _ in row["groups"]]
        assert row["placement"] == [[node, None if node is None else 1.0] for node in nodes], where


def test_little_memory_on_a_node() -> None:
    """The warning before, the line about less than 95 %, and what releasing a file's page cache mends."""
    found = {row["case"]: row for row in run_cases("tight", "tight")}
    assert not [row["error"] for row in found.values() if "error" in row]
    for row in found.values():
        (line,) = logged(row, "placement at risk: NUMA node 1 needs ")
        assert "GiB (its share and 2.0 GiB to spare) and has " in line
        assert row["placement"][0] == [0, 1.0]

    fits = found["fits"]
    assert fits["placement"] == [[0, 1.0], [1, 1.0]]
    assert not logged(fits, "FAILED")

    overfull = found["overfull"]
    share = overfull["placement"][1][1]
    assert 0.3 < share < 0.95
    (line,) = logged(overfull, "placement FAILED")
    assert f"only {100 * share:.1f} % of slice 1 is on NUMA node 1 (the rest on node 0)" in line
    assert overfull["finite"]

    kept, released = found["page cache"], found["page cache released"]
    for row in (kept, released):
        # What the file left free wasn't enough for the slice.
        assert row["free"] < fits["share"] * MIB < row["free"] + row["cached"]
    assert kept["placement"][1][1] < 0.95
    (line,) = logged(kept, "placement FAILED")
    assert "page cache): free memory there" in line
    assert released["placement"] == [[0, 1.0], [1, 1.0]]
    assert not logged(released, "FAILED")


def test_refused_system_calls() -> None:
    """Right bits and no more than one line each, whatever the kernel refuses or pretends."""
    rows = run_cases("two", "refusals", "table")
    found = {row["case"]: row for row in rows if row["cases"] == "refusals"}
    expected = next(row["bits"] for row in rows if row["cases"] == "table")
    for name, row in found.items():
        assert "error" not in row, (name, row)
        assert row["status"] == 0 and row["bits"] == expected, name
        lines = [line for level, line in row["log"] if level > 20]
        # Of nodes that are this small, two lines say that they lack room, and rightly so.
        others = [line for line in lines if not line.startswith("placement at risk: NUMA node ")]
        assert len(lines) == len(set(lines)) and len(others) <= 2, (name, lines)
    # First touch places, numa_maps tells.
    refused = found["memory calls EPERM"]
    assert refused["placement"] == [[0, 1.0], [1, 1.0]]
    assert len(logged(refused, "can't be bound to their NUMA nodes (EPERM)")) == 1
    unasked = found["move_pages EPERM"]
    assert unasked["placement"] == [[0, 1.0], [1, 1.0]]
    assert not [line for level, line in unasked["log"] if level > 20 and "at risk" not in line]
    # Workers that can't be pinned, or only seem to be: no split, and no claim that they are.
    for name, why in (
        ("affinity EPERM", "Operation not permitted"),
        ("affinity pretends", "the kernel reads back another mask"),
        ("everything ENOSYS", "Function not implemented"),
    ):
        row = found[name]
        assert [node for node, _ in groups(row)] == [None], name
        assert all(cpu == -1 for _, cpus in groups(row) for cpu in cpus), name
        assert len(logged(row, why)) == 1, name


@pytest.mark.parametrize("topology", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_memory_goes_back_to_its_nodes(topology: str) -> None:
    """Deleting packed experts returns each node's free memory to within 5 % of what was packed."""
    (found,) = run_cases(topology, "memory_returns")
    assert "error" not in found, found
    assert all(share == 1.0 for _, share in found["placement"])
    per_node = found["bytes"] / len(found["before"])
    for node, before in found["before"].items():
        # Slices are equal, so each node gave its share ...
        assert before - found["during"][node] == pytest.approx(per_node, rel=0.1), node
        # ... and has it back.
        assert abs(before - found["after"][node]) < 0.05 * found["bytes"], node


def test_a_cpu_goes_offline_under_a_running_pool() -> None:
    """Calls go on with right results while a worker's CPU is offline, and after."""
    (found,) = run_cases("two", "hotplug")
    assert "error" not in found, found
    assert found["wrong"] == 0
    assert not found["hangs"]
    assert all(calls > 0 for calls in found["calls"]), found
    assert found["again"]


def test_memory_limit_and_no_huge_pages() -> None:
    """One clear line each, and it works."""
    limited, plain = run_cases("two", "memory_limit", "no_huge_pages")
    assert "error" not in limited, limited
    assert not [line for _, line in limited["quiet"] if "the memory limit of " in line]
    (line,) = logged(limited, "the memory limit of ")
    assert "placement at risk" in line and "/numa-moe-test/memory.max leaves" in line
    assert limited["finite"]

    assert "error" not in plain, plain
    assert plain["huge"] == [0.0, 0.0]
    (line,) = logged(plain, "weights lie in small pages")
    assert "transparent huge pages are off; echo madvise > " in line
    assert plain["placement"] == [[0, 1.0], [1, 1.0]]


def test_program(name: str) -> Path | None:
    """A program of the C++ tests, if it was built (without sanitizers: guests are slow enough)."""
    programs = [REPOSITORY / "build" / folder / name for folder in ("cpp-plain", "cpp")]
    return next((program for program in programs if os.access(program, os.X_OK)), None)


test_program.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "topology",
    ["two", "four", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpuless", "tight"))],
)
def test_memory_lands_on_its_node(topology: str) -> None:
    """Slices bound to each node are found there whole; an overfull node spills; huge pages never fault."""
    program = test_program("memory/memory_test")
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
        "ARegionCountsInWhatIsMappedButNotWritten",
        "ExplicitHugePagesOfEachNode",
    ):
        assert f"[       OK ] NodeBinding.{test}" in done.stdout


@pytest.mark.parametrize("topology", ["two", "four"])
def test_pool(topology: str) -> None:
    """The pool's own tests, with workers pinned to the CPUs of several nodes."""
    program = test_program("pool/pool_test")
    if program is None:
        pytest.skip("the C++ tests are not built (.ci/cpp-tests plain)")
    done = run_in_guest(topology, [str(program)], environment={"NUMA_MOE_TEST_LIMIT": "600"})
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


# What takes long on an emulated CPU and depends on nodes no more than the rest.
LONG = (
    "chunks_of_long_inputs or a_patched_model or patching_warns_once or the_gil_is_released or in_any_batch "
    "or all_tokens_on_one_expert or (any_workers_and_slices and (130 or fp16 or fp32))"
)


@pytest.mark.parametrize("topology", ["two", "four"])
def test_op(topology: str) -> None:
    """The op's tests where the plan splits: results, bits, packing, placement."""
    suites = ["test_experts_op.py", "test_bit_identity.py", "test_packing.py", "test_placement.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"not ({LONG})"]
    command += ["-o", "faulthandler_timeout=300"]  # says where, if a test hangs
    command += [f"tests/{name}" for name in suites]
    done = run_in_guest(topology, command, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
