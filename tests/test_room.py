"""Room for weights: of nodes, of control groups; what the plan and the log say of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sys_tree import GIB, MACHINES, Machine, Node, read_machine, write
from torch_numa_moe.cgroup import read_cgroup_limits
from torch_numa_moe.limits import ProcessLimits
from torch_numa_moe.plan import make_plan
from torch_numa_moe.room import NODE_RESERVE_BYTES, RoomShortage, ShortageLog, find_shortages
from torch_numa_moe.settings import Settings
from torch_numa_moe.topology import NumaNode, Topology

if TYPE_CHECKING:
    from pathlib import Path

ANY_LIMITS = ProcessLimits(cpus=(0, 1, 2, 3))


def machine(*nodes: tuple[int, int | None, int | None]) -> Topology:
    """Nodes of an id, free and cached GiB."""
    return Topology(
        tuple(
            NumaNode(
                node,
                (node,),
                64 * GIB,
                None if free is None else free * GIB,
                None if cached is None else cached * GIB,
            )
            for node, free, cached in nodes
        ),
        (),
    )


def test_a_node_needs_its_share_and_the_reserve() -> None:
    assert NODE_RESERVE_BYTES == 2 * GIB
    topology = machine((0, 10, 0), (2, 10, 0))
    assert find_shortages([8 * GIB, 8 * GIB], [0, 2], topology, ANY_LIMITS) == []
    (short,) = find_shortages([8 * GIB, 8 * GIB + 1], [0, 2], topology, ANY_LIMITS)
    assert short == RoomShortage(2, 10 * GIB + 1, 10 * GIB, 0)


def test_slices_on_the_same_node_add_up_and_slices_anywhere_need_nothing() -> None:
    topology = machine((0, 10, 0))
    assert find_shortages([4 * GIB, 4 * GIB, 90 * GIB], [0, 0, None], topology, ANY_LIMITS) == []
    (short,) = find_shortages([4 * GIB, 5 * GIB], [0, 0], topology, ANY_LIMITS)
    assert short.needed_bytes == 11 * GIB


def test_page_cache_is_room_only_where_memory_can_be_bound() -> None:
    topology = machine((0, 1, 20))
    assert find_shortages([8 * GIB], [0], topology, ANY_LIMITS) == []
    (short,) = find_shortages([8 * GIB], [0], topology, ANY_LIMITS, reclaims_cache=False)
    assert (short.free_bytes, short.cached_bytes) == (GIB, 20 * GIB)


def test_what_is_unknown_or_needs_nothing_is_no_shortage() -> None:
    topology = machine((0, None, None), (1, 0, 0))
    assert find_shortages([8 * GIB, 0], [0, 1], topology, ANY_LIMITS) == []
    assert find_shortages([8 * GIB], [7], topology, ANY_LIMITS) == []  # no such node


def test_memory_limit_of_a_control_group() -> None:
    limits = replace(
        ANY_LIMITS, memory_bytes=9 * GIB, memory_source="/x/memory.max", memory_left_bytes=8 * GIB
    )
    assert find_shortages([4 * GIB, 4 * GIB], [None, None], machine(), limits) == []
    (short,) = find_shortages([4 * GIB, 4 * GIB + 1], [None, None], machine(), limits)
    assert str(short) == (
        "placement at risk: the weights need 8.0 GiB, and the memory limit of /x/memory.max leaves 8.0 GiB: "
        "raise the limit, or the kernel may end this process"
    )


def test_words() -> None:
    text = str(RoomShortage(3, 10 * GIB, GIB, 512 << 20))
    assert text.startswith(
        "placement at risk: NUMA node 3 needs 10.0 GiB (its share and 2.0 GiB to spare) and has 1.0 GiB free "
        "and 512 MiB of page cache: "
    )


@pytest.mark.parametrize(
    ("mount", "group", "files", "left"),
    [
        (
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "0::/a/b",
            {
                "a/memory.max": "1000",
                "a/memory.current": "700",
                "a/memory.stat": "anon 400\ninactive_file 200\nactive_file 50",
                "a/b/memory.max": "5000",
                "a/b/memory.current": "600",
            },
            550,  # of a: 1000 - (700 - 250); of b 4400
        ),
        (
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
            "3:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "1000",
                "memory/a/memory.usage_in_bytes": "1500",
                "memory/a/memory.stat": "cache 9\ntotal_inactive_file 100\ntotal_active_file 0",
            },
            0,
        ),
        (
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "0::/a",
            {"a/memory.max": "max", "a/memory.current": "7"},
            None,
        ),
        (
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "0::/a",
            {"a/memory.max": "1000"},  # the rest can't be read
            1000,
        ),
    ],
)
def test_what_control_groups_leave(
    mount: str, group: str, files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    root, proc = tmp_path / "sys", tmp_path / "proc"
    write(proc / "self/mountinfo", mount)
    write(proc / "self/cgroup", group)
    for name, text in files.items():
        write(root / "fs/cgroup" / name, text)
    assert read_cgroup_limits(root, proc).memory_left_bytes == left


def test_a_shortage_is_logged_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torch_numa_moe")
    log = ShortageLog()
    first, second = RoomShortage(0, 5, 1), RoomShortage(1, 5, 1)
    log.log([first])
    log.log([first])
    assert caplog.messages == [str(first)]
    log.log([first, second])
    assert caplog.messages == [str(first), str(second)]
    log.log([])
    log.log([second])
    assert caplog.messages == [str(first), str(second), str(second)]


def test_the_plan_says_which_node_lacks_room(tmp_path: Path) -> None:
    topology, limits = read_machine(MACHINES["odd and even"], tmp_path)  # 32 GiB a node, 16 free
    plan = make_plan(topology, limits, Settings(), weight_bytes=30 * GIB)
    assert plan.split
    assert [reason for reason in plan.reasons if "at risk" in reason] == [
        str(RoomShortage(node, 17 * GIB, 16 * GIB, 3 << 20)) for node in (0, 1)
    ]
    for weight_bytes in (None, 0, 28 * GIB):
        fits = make_plan(topology, limits, Settings(), weight_bytes=weight_bytes)
        assert not any("at risk" in reason for reason in fits.reasons)


@pytest.mark.parametrize("split", [None, "1"])
def test_a_node_that_can_never_hold_its_share_rules_the_split_out(split: str | None, tmp_path: Path) -> None:
    small = Machine({0: Node("0-3"), 1: Node("4-7", gib=4, free_gib=4)}, "0-7")
    topology, limits = read_machine(small, tmp_path)
    assert make_plan(topology, limits, Settings(split=split), weight_bytes=8 * GIB).split
    plan = make_plan(topology, limits, Settings(split=split), weight_bytes=8 * GIB + 2)
    assert not plan.split
    reason = "no split: NUMA node 1 has 4.0 GiB of memory, less than its share of the weights (4.0 GiB)"
    assert reason in plan.reasons
    assert any(line.text.endswith(reason) for line in plan.log_lines)
