"""The plan on made-up machines: groups, CPUs, reasons and log lines, exactly."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from sys_tree import MACHINES, Machine, Node, numbers, read_machine
from torch_numa_moe.plan import (
    DEFAULT_DISPATCHER_SPIN_US,
    DEFAULT_DISPATCHER_YIELDS,
    DEFAULT_WORKER_SPIN_US,
    MAX_WORKERS_PER_GROUP,
    Plan,
    make_plan,
)
from torch_numa_moe.settings import LogLine, Settings

if TYPE_CHECKING:
    from torch_numa_moe.limits import ProcessLimits
    from torch_numa_moe.topology import Topology

INFO, WARNING = logging.INFO, logging.WARNING


PlanOf = Callable[..., Plan]


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> PlanOf:
    """Plans for a machine, by name or described, with settings and changed limits."""
    machines: dict[str, tuple[Topology, ProcessLimits]] = {}

    def plan(
        machine: str | Machine,
        settings: Settings | None = None,
        *,
        unpinnable: str | None = None,
        **limits: float | str | None,
    ) -> Plan:
        described = MACHINES[machine] if isinstance(machine, str) else machine
        if repr(described) not in machines:
            machines[repr(described)] = read_machine(described, tmp_path_factory.mktemp("machine"))
        topology, read = machines[repr(described)]
        changed = replace(read, **limits)  # type: ignore[arg-type]
        return make_plan(topology, changed, settings or Settings(), unpinnable=unpinnable)

    return plan


class Expected(NamedTuple):
    """What the plan of a machine is without any setting."""

    groups: tuple[tuple[int | None, str], ...]  # node, CPUs
    host: int | None
    spare: tuple[int, ...]
    helps: bool
    reasons: tuple[str, ...]
    log: tuple[LogLine, ...] = ()


LOPSIDED = (
    "no split: NUMA nodes 0-1 have 3 + 1 cores for equal slices, the smallest less than 0.5 of the largest"
)
MEMS = "node 1 has memory that this process may not use (Mems_allowed): its CPUs work for node 0"
PHANTOM = "node {} has neither CPUs nor memory: no slice there"
ONE_NODE = "no split: this machine has one NUMA node"


def split_line(text: str) -> tuple[LogLine, ...]:
    return (LogLine(INFO, text),)


DEFAULTS = {
    "single socket": Expected(((None, "1-7"),), 0, (), False, (ONE_NODE,)),
    "dual Genoa": Expected(
        ((0, "1-31"), (1, "33-63")), 0, (32,), False, ("split across NUMA nodes 0-1: 31 + 31 workers",)
    ),
    "odd and even": Expected(
        ((0, "2,4,6"), (1, "3,5,7")), 0, (1,), False, ("split across NUMA nodes 0-1: 3 + 3 workers",)
    ),
    "nosmt": Expected(((0, "2"), (1, "6")), 0, (4,), False, ("split across NUMA nodes 0-1: 1 + 1 workers",)),
    "adjacent siblings": Expected(
        ((None, "8"),), 0, (), True, (ONE_NODE, "the calling thread computes too: few cores (2)")
    ),
    # Node 1 is the larger one: the calling thread's core comes from there.
    "offline CPU": Expected(
        ((0, "1,3"), (1, "5-7")), 4, (0,), False, ("split across NUMA nodes 0-1: 2 + 3 workers",)
    ),
    "2970WX": Expected(
        ((0, "1-11"), (2, "13-23")),
        0,
        (12,),
        False,
        (
            "split across NUMA nodes 0,2: 11 + 11 workers",
            "node 1 has no memory: its CPUs work for node 0",
            "node 3 has no memory: its CPUs work for node 2",
        ),
    ),
    "CXL memory": Expected(
        ((None, "1-7"),),
        0,
        (),
        False,
        ("no split: one of 2 NUMA nodes can be used (node 1 has no CPUs: no slice there)",),
    ),
    "phantom nodes": Expected(
        ((None, "1"),),
        0,
        (),
        True,
        (
            f"no split: one of 3 NUMA nodes can be used ({PHANTOM.format(1)}; {PHANTOM.format(2)})",
            "the calling thread computes too: few cores (2)",
        ),
    ),
    "nodes 0 and 2": Expected(
        ((0, "1-3"), (2, "5-7")), 0, (4,), False, ("split across NUMA nodes 0,2: 3 + 3 workers",)
    ),
    "four nodes": Expected(
        ((0, "1-3"), (1, "5-7"), (2, "8-11"), (3, "12-15")),
        0,
        (4,),
        False,
        ("split across NUMA nodes 0-3: 3 + 3 + 4 + 4 workers",),
    ),
    "NPS4": Expected(
        ((0, "1-7"), (1, "9-15"), *((node, f"{8 * node}-{8 * node + 7}") for node in range(2, 8))),
        0,
        (8,),
        False,
        ("split across NUMA nodes 0-7: 7 + 7 + 8 + 8 + 8 + 8 + 8 + 8 workers",),
    ),
    "lopsided": Expected(
        ((None, "1-3"),),
        0,
        (),
        True,
        (
            LOPSIDED,
            "the calling thread computes too: few cores (4)",
        ),
        (
            LogLine(
                INFO,
                LOPSIDED,
            ),
        ),
    ),
    "hybrid ARM": Expected(((None, "1-7"),), 0, (), False, (ONE_NODE,)),
    "hybrid x86": Expected(((None, "2,4,6,8,10,12,14,16-31"),), 0, (), False, (ONE_NODE,)),
    "host's /sys": Expected(
        ((None, "5"),),
        3,
        (),
        True,
        (
            "no split: one of 2 NUMA nodes can be used (node 1: none of its CPUs 36-71 may be used)",
            "the calling thread computes too: few cores (2)",
        ),
    ),
    "memory of one node": Expected(
        ((None, "1-7"),),
        0,
        (),
        False,
        (f"no split: one of 2 NUMA nodes can be used ({MEMS})",),
    ),
    "CPUs of one node": Expected(
        ((None, "5-7"),),
        4,
        (),
        True,
        (
            "no split: one of 2 NUMA nodes can be used (node 0: none of its CPUs 0-3 may be used)",
            "the calling thread computes too: few cores (4)",
        ),
    ),
    "no nodes": Expected(
        ((None, "1-3"),),
        0,
        (),
        True,
        (
            ONE_NODE,
            "the calling thread computes too: few cores (4)",
            "the kernel tells of no NUMA node: taken as one",
        ),
    ),
    "no /sys": Expected(
        ((None, "1-2"),),
        0,
        (),
        True,
        (
            ONE_NODE,
            "the calling thread computes too: few cores (3)",
            "/sys tells of no CPUs: taken as those that this process may use",
            "the kernel tells of no NUMA node: taken as one",
        ),
    ),
    "isolated": Expected(
        ((None, "1-7"),), 0, (), False, (ONE_NODE, "CPUs 8-15 are isolated from the scheduler: not used")
    ),
}


def groups_of(plan: Plan) -> list[tuple[int | None, tuple[int, ...]]]:
    return [(group.node, group.worker_cpus) for group in plan.groups]


def check_sound(plan: Plan) -> None:
    """What holds for every plan."""
    assert plan.num_slices == len(plan.groups) >= 1
    assert plan.num_workers == sum(len(group.worker_cpus) for group in plan.groups)
    pinned = [cpu for group in plan.groups for cpu in group.worker_cpus if cpu >= 0]
    assert max(Counter(pinned).values(), default=1) == 1, "two workers on a CPU"
    assert plan.limits.cpus is None or set(pinned) <= set(plan.limits.cpus)
    for index, group in enumerate(plan.groups):
        assert group.worker_cpus or (index == 0 and plan.caller_helps), "tasks that nobody runs"
        assert list(group.worker_cpus) == sorted(group.worker_cpus)
    free = {*plan.spare_cpus, *(() if plan.host_cpu is None else (plan.host_cpu,))}
    assert not free & set(pinned)
    assert plan.split == (len(plan.groups) > 1 and plan.groups[0].node is not None)
    if plan.split:
        nodes = [group.node for group in plan.groups]
        assert len(set(nodes)) == len(nodes)
        assert not plan.caller_helps
    assert all(reason and reason.isprintable() for reason in plan.reasons)
    assert str(plan) == plan.describe()


@pytest.mark.parametrize("name", MACHINES)
def test_without_settings(name: str, plan_of: PlanOf) -> None:
    expected = DEFAULTS[name]
    plan = plan_of(name)
    check_sound(plan)
    assert groups_of(plan) == [(node, numbers(cpus)) for node, cpus in expected.groups]
    assert plan.split == (len(expected.groups) > 1)
    assert (plan.host_cpu, plan.spare_cpus, plan.caller_helps) == (
        expected.host,
        expected.spare,
        expected.helps,
    )
    assert plan.reasons == expected.reasons
    # One node, or one that can be used: not a word. A split says so.
    assert plan.log_lines == (expected.log or (split_line(expected.reasons[0]) if plan.split else ()))


@pytest.mark.parametrize("name", MACHINES)
def test_split_0(name: str, plan_of: PlanOf) -> None:
    plan = plan_of(name, Settings(split="0"))
    check_sound(plan)
    assert len(plan.groups) == 1
    assert plan.groups[0].node is None
    assert plan.reasons[0] == "no split: NUMA_MOE_SPLIT=0"
    assert plan.log_lines == ()


def test_split_0_uses_the_cores_of_all_nodes(plan_of: PlanOf) -> None:
    assert groups_of(plan_of("dual Genoa", Settings(split="0"))) == [(None, numbers("1-63"))]
    assert groups_of(plan_of("2970WX", Settings(split="0"))) == [(None, numbers("1-23"))]


@pytest.mark.parametrize("name", MACHINES)
def test_split_1(name: str, plan_of: PlanOf) -> None:
    """As without a setting, but a machine that can't says why."""
    plan = plan_of(name, Settings(split="1"))
    check_sound(plan)
    usual = plan_of(name)
    if name == "lopsided":
        # A matter of judgement, so what was asked for is done.
        assert groups_of(plan) == [(0, (2,)), (1, (3,))]
        assert plan.log_lines == (
            LogLine(INFO, "split across NUMA nodes 0-1: 1 + 1 workers"),
            LogLine(
                WARNING,
                "NUMA nodes 0-1 have 3 + 1 cores for equal slices: the smallest node sets the pace",
            ),
        )
        return
    assert plan.groups == usual.groups
    assert plan.reasons == usual.reasons
    if usual.split:
        assert plan.log_lines == usual.log_lines
    else:
        assert plan.log_lines == (LogLine(WARNING, f"NUMA_MOE_SPLIT=1, but {usual.reasons[0]}"),)


@pytest.mark.parametrize(
    ("machine", "slices", "expected"),
    [
        # Two cores, two slices: a core each. Four cores: one is left free.
        (Machine({0: Node("0-1")}, "0-1"), 2, [(1,), (0,)]),
        (Machine({0: Node("0-3")}, "0-3"), 2, [(1, 3), (2,)]),
        (Machine({0: Node("0-3")}, "0-3"), 3, [(1,), (2,), (3,)]),
        (Machine({0: Node("0-3")}, "0-3"), 4, [(1,), (2,), (3,), (0,)]),
        (Machine({0: Node("0-3")}, "0-3"), 1, [(1, 2, 3)]),
        (Machine({0: Node("0-1")}, "0-1"), 3, [(-1,), (-1,), (-1,)]),
        (Machine({0: Node("0")}, "0"), 2, [(-1,), (-1,)]),
        # Real nodes don't matter, and second threads are used before workers are left unpinned.
        ("nodes 0 and 2", 2, [(1, 2, 3, 7), (4, 5, 6)]),
        ("adjacent siblings", 3, [(8,), (0,), (1,)]),
        ("host's /sys", 2, [(5,), (3,)]),
    ],
)
def test_split_test(
    machine: str | Machine, slices: int, expected: list[tuple[int, ...]], plan_of: PlanOf
) -> None:
    plan = plan_of(machine, Settings(split="test", test_slices=slices))
    check_sound(plan)
    assert not plan.split
    if machine != "nodes 0 and 2":
        assert groups_of(plan) == [(None, cpus) for cpus in expected]
    else:
        assert sorted(map(len, (group.worker_cpus for group in plan.groups))) == [3, 4]
    assert f"NUMA_MOE_SPLIT=test: {slices} slices that may lie anywhere" in plan.reasons
    assert plan.log_lines == ()
    assert not plan.caller_helps


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("slices", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("workers", [None, 1, 5, 100])
def test_split_test_works_anywhere(name: str, slices: int, workers: int | None, plan_of: PlanOf) -> None:
    plan = plan_of(name, Settings(split="test", test_slices=slices, workers=workers))
    check_sound(plan)
    assert plan.num_slices == slices
    assert all(group.node is None for group in plan.groups)
    sizes = [len(group.worker_cpus) for group in plan.groups]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("workers", "expected", "host"),
    [
        (2, ["2", "3"], 0),
        (3, ["2,4", "3"], 0),
        (4, ["2,4", "3,5"], 0),
        (6, ["2,4,6", "3,5,7"], 0),
        (7, ["2,4,6", "1,3,5,7"], 0),  # the spare core first,
        (8, ["0,2,4,6", "1,3,5,7"], None),  # then the calling thread's
    ],
)
def test_workers_are_dealt_out_to_nodes_in_turn(
    workers: int, expected: list[str], host: int | None, plan_of: PlanOf
) -> None:
    plan = plan_of("odd and even", Settings(workers=workers))
    check_sound(plan)
    assert groups_of(plan) == [(node, numbers(cpus)) for node, cpus in enumerate(expected)]
    assert plan.host_cpu == host


def test_second_threads_come_last(plan_of: PlanOf) -> None:
    machine = Machine({0: Node("0-3"), 1: Node("4-7")}, "0-7", cores=("0-1", "2-3", "4-5", "6-7"))
    expected = {
        2: ("2", "6"),
        3: ("2", "4,6"),
        4: ("0,2", "4,6"),
        5: ("0-2", "4,6"),
        6: ("0-2", "4-6"),
        7: ("0-3", "4-6"),
        8: ("0-3", "4-7"),
    }
    for workers, (first, second) in expected.items():
        plan = plan_of(machine, Settings(workers=workers))
        check_sound(plan)
        assert groups_of(plan) == [(0, numbers(first)), (1, numbers(second))], workers


def test_adjacent_siblings_in_one_group(plan_of: PlanOf) -> None:
    machine = Machine({0: Node("0-3")}, "0-3", cores=("0-1", "2-3"))
    for workers, cpus in ((1, "2"), (2, "0,2"), (3, "0-2"), (4, "0-3")):
        assert groups_of(plan_of(machine, Settings(workers=workers))) == [(None, numbers(cpus))]


def test_a_core_of_which_only_the_second_thread_is_allowed(plan_of: PlanOf) -> None:
    machine = Machine({0: Node("0-7")}, "0-7", cores=("0,4", "1,5", "2,6", "3,7"), allowed="1-5")
    plan = plan_of(machine)
    check_sound(plan)
    # Cores 0 (thread 4), 1 (threads 1, 5), 2 and 3.
    assert groups_of(plan) == [(None, (2, 3, 4))]
    assert plan.host_cpu == 1


def test_an_explicit_number_of_workers_is_that_of_threads_that_compute(plan_of: PlanOf) -> None:
    plan = plan_of(Machine({0: Node("0-3")}, "0-3"), Settings(workers=1))
    assert groups_of(plan) == [(None, (1,))]
    assert not plan.caller_helps


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("split", [None, "0", "1", "test"])
@pytest.mark.parametrize("workers", [1, 2, 3, 1000])
def test_any_number_of_workers(name: str, split: str | None, workers: int, plan_of: PlanOf) -> None:
    plan = plan_of(name, Settings(split=split, workers=workers))
    check_sound(plan)
    usable = len(numbers(MACHINES[name].allowed or MACHINES[name].online or ""))
    if name == "isolated":
        usable = 8
    wanted = max(2, workers) if split == "test" else workers
    assert plan.num_workers == min(wanted, usable)
    clamped = [line for line in plan.log_lines if "is lowered" in line.text]
    if workers > usable:
        assert clamped == [
            LogLine(
                WARNING,
                f"NUMA_MOE_WORKERS={workers} is lowered to {usable}: this process may use {usable} CPUs",
            )
        ]
    else:
        assert clamped == []


def test_fewer_workers_than_nodes(plan_of: PlanOf) -> None:
    plan = plan_of("four nodes", Settings(workers=3))
    assert groups_of(plan) == [(None, (1, 4, 8))]
    reason = "no split: NUMA_MOE_WORKERS=3 are fewer than the 4 NUMA nodes"
    assert plan.reasons[0] == reason
    assert plan.log_lines == (LogLine(INFO, reason),)


def test_lopsided_is_judged_by_what_was_asked_for(plan_of: PlanOf) -> None:
    assert groups_of(plan_of("lopsided", Settings(workers=2))) == [(0, (2,)), (1, (3,))]
    plan = plan_of("lopsided", Settings(workers=4))
    assert groups_of(plan) == [(None, (0, 1, 2, 3))]
    assert plan.reasons[0].startswith("no split: NUMA nodes 0-1 have 3 + 1 cores")


@pytest.mark.parametrize(("small", "is_split"), [("8-11", True), ("8-10", False)])
def test_just_lopsided_enough(small: str, is_split: bool, plan_of: PlanOf) -> None:
    plan = plan_of(Machine({0: Node("0-7"), 1: Node(small)}, "0-11"))
    assert plan.split == is_split


def test_small_nodes_have_no_core_to_leave(plan_of: PlanOf) -> None:
    plan = plan_of(Machine({node: Node(str(node)) for node in range(4)}, "0-3"))
    check_sound(plan)
    assert groups_of(plan) == [(node, (node,)) for node in range(4)]
    assert plan.host_cpu is None
    assert plan.reasons[1] == "no core is left to the calling thread: it sleeps while workers compute"


@pytest.mark.parametrize(
    ("cores", "workers", "helps"),
    [
        (1, 0, True),
        (2, 1, True),
        (4, 3, True),
        (5, 4, False),
        (16, 15, False),
        (200, MAX_WORKERS_PER_GROUP, False),
    ],
)
def test_one_node(cores: int, workers: int, helps: bool, plan_of: PlanOf) -> None:
    plan = plan_of(Machine({0: Node(f"0-{cores - 1}")}, f"0-{cores - 1}"))
    check_sound(plan)
    assert plan.num_workers == workers
    assert plan.caller_helps == helps
    capped = f"at most {MAX_WORKERS_PER_GROUP} workers in a group, unless NUMA_MOE_WORKERS asks for more"
    assert (capped in plan.reasons) == (cores == 200)


def test_cap_per_group(plan_of: PlanOf) -> None:
    machine = Machine({0: Node("0-199"), 1: Node("200-399")}, "0-399")
    assert [len(cpus) for _, cpus in groups_of(plan_of(machine))] == [MAX_WORKERS_PER_GROUP] * 2
    assert plan_of(machine, Settings(workers=300)).num_workers == 300


def test_the_calling_threads_core_is_free_when_capped(plan_of: PlanOf) -> None:
    plan = plan_of(Machine({0: Node("0-199")}, "0-199"))
    assert plan.host_cpu == 0
    assert 0 not in plan.groups[0].worker_cpus


@pytest.mark.parametrize(
    ("quota", "workers", "helps"),
    [
        (0.1, 0, True),
        (1, 0, True),
        (1.5, 1, True),
        (4, 3, True),
        (4.01, 4, False),
        (7.5, 7, False),
        (100, 15, False),
    ],
)
def test_quota_on_one_node(quota: float, workers: int, helps: bool, plan_of: PlanOf) -> None:
    machine = Machine({0: Node("0-15")}, "0-15")
    plan = plan_of(machine, cpu_quota=quota, cpu_quota_source="/x/cpu.max")
    check_sound(plan)
    assert (plan.num_workers, plan.caller_helps) == (workers, helps)
    budget = workers + 1
    said = f"the CPU quota of {quota:g} (/x/cpu.max) pays for {budget} of 16 cores"
    assert (said in plan.reasons) == (quota < 16)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(2, [1, 1]), (3, [1, 1]), (5, [2, 2]), (6, [3, 2]), (64, [31, 31]), (128, [31, 31])],
)
def test_quota_and_split(quota: float, expected: list[int], plan_of: PlanOf) -> None:
    plan = plan_of("dual Genoa", cpu_quota=quota, cpu_quota_source="/x/cpu.max")
    check_sound(plan)
    assert [len(cpus) for _, cpus in groups_of(plan)] == expected
    assert plan.split


def test_quota_of_fewer_cpus_than_nodes(plan_of: PlanOf) -> None:
    plan = plan_of("NPS4", cpu_quota=4, cpu_quota_source="/x/cpu.max")
    check_sound(plan)
    assert not plan.split
    assert plan.num_workers == 3
    reason = "no split: the CPU quota of 4 (/x/cpu.max) leaves 4 CPUs for 8 NUMA nodes"
    assert plan.reasons[0] == reason
    assert plan.log_lines == (LogLine(INFO, reason),)


def test_quota_and_workers(plan_of: PlanOf) -> None:
    plan = plan_of("dual Genoa", Settings(workers=10), cpu_quota=5.5, cpu_quota_source="/x/cpu.max")
    check_sound(plan)
    assert [len(cpus) for _, cpus in groups_of(plan)] == [3, 3]
    assert plan.log_lines[0] == LogLine(
        WARNING, "NUMA_MOE_WORKERS=10 is lowered to 6: the CPU quota of 5.5 (/x/cpu.max) pays for 6"
    )


def test_fast_cores_first(plan_of: PlanOf) -> None:
    """Case hybrid-cores: all cores work, since tasks are claimed; a smaller number goes to the fast ones."""
    assert groups_of(plan_of("hybrid ARM", Settings(workers=4))) == [(None, (4, 5, 6, 7))]
    assert groups_of(plan_of("hybrid x86", Settings(workers=7))) == [(None, (2, 4, 6, 8, 10, 12, 14))]


def test_isolated_cpus_are_used_by_who_is_on_them_alone(plan_of: PlanOf) -> None:
    plan = plan_of(replace(MACHINES["isolated"], allowed="8-15"))
    assert groups_of(plan) == [(None, numbers("9-15"))]
    assert plan.reasons == (ONE_NODE,)


def test_lent_cpus_go_to_the_nearest_node(plan_of: PlanOf) -> None:
    machine = Machine(
        {
            0: Node("0-3", distances="10 20 30"),
            1: Node("4-7", gib=0, distances="20 10 15"),
            2: Node("8-11", distances="30 15 10"),
        },
        "0-11",
    )
    plan = plan_of(machine, Settings(split="1"))
    assert groups_of(plan) == [(0, (0, 1, 2, 3)), (2, numbers("6-11"))]
    assert "node 1 has no memory: its CPUs work for node 2" in plan.reasons


def test_own_cores_before_lent_ones(plan_of: PlanOf) -> None:
    machine = Machine(
        {0: Node("4-7", distances="10 20"), 1: Node("0-3", gib=0, distances="20 10"), 2: Node("8-11")}, "0-11"
    )
    assert groups_of(plan_of(machine, Settings(workers=4))) == [(0, (4, 5)), (2, (8, 9))]


def test_threads_that_cannot_be_pinned(plan_of: PlanOf) -> None:
    """Cases affinity-lies and affinity-eperm."""
    plan = plan_of("dual Genoa", unpinnable="sched_setaffinity: EPERM")
    check_sound(plan)
    assert groups_of(plan) == [(None, (-1,) * 63)]
    assert plan.reasons[0] == "no split: workers can't be kept on their nodes (sched_setaffinity: EPERM)"
    sentence = "workers aren't pinned: sched_setaffinity: EPERM"
    assert sentence in plan.reasons
    assert plan.log_lines == (LogLine(WARNING, sentence),)
    forced = plan_of("dual Genoa", Settings(split="1"), unpinnable="EPERM")
    assert "workers aren't pinned: EPERM" in forced.reasons
    assert forced.log_lines == (
        LogLine(WARNING, "NUMA_MOE_SPLIT=1, but no split: workers can't be kept on their nodes (EPERM)"),
    )
    single = plan_of("single socket", unpinnable="EPERM")
    assert groups_of(single) == [(None, (-1,) * 7)]
    assert single.log_lines == (LogLine(WARNING, "workers aren't pinned: EPERM"),)
    test = plan_of("single socket", Settings(split="test"), unpinnable="EPERM")
    assert groups_of(test) == [(None, (-1,) * 4), (None, (-1,) * 3)]


def test_machine_without_any_usable_node(plan_of: PlanOf) -> None:
    plan = plan_of(Machine({0: Node("0-3", gib=0), 1: Node("", gib=8)}, "0-3"))
    check_sound(plan)
    assert groups_of(plan) == [(None, (1, 2, 3))]
    assert plan.reasons[0] == (
        "no split: none of 2 NUMA nodes can be used "
        "(node 1 has no CPUs: no slice there; node 0 has no memory)"
    )


def test_cpus_that_sys_does_not_know(plan_of: PlanOf) -> None:
    plan = plan_of(Machine({0: Node("0-1")}, "0-1", allowed="6-7"))
    check_sound(plan)
    assert groups_of(plan) == [(None, (7,))]
    assert "/sys doesn't know the CPUs 6-7 that this process may use" in plan.reasons


def test_unknown_mask(plan_of: PlanOf) -> None:
    plan = plan_of("odd and even", cpus=None)
    check_sound(plan)
    assert plan.split


def test_waiting(plan_of: PlanOf) -> None:
    def waiting(settings: Settings) -> tuple[int, int, int]:
        plan = plan_of("single socket", settings)
        return plan.worker_spin_us, plan.dispatcher_spin_us, plan.dispatcher_yields

    defaults = (DEFAULT_WORKER_SPIN_US, DEFAULT_DISPATCHER_SPIN_US, DEFAULT_DISPATCHER_YIELDS)
    assert waiting(Settings()) == defaults
    assert waiting(Settings(spin_us=0, dispatcher_yields=0)) == (0, 0, 0)
    assert waiting(Settings(spin_us=1000)) == (1000, DEFAULT_DISPATCHER_SPIN_US, DEFAULT_DISPATCHER_YIELDS)


def test_what_was_wrong_in_the_environment_is_logged_first(plan_of: PlanOf) -> None:
    line = LogLine(WARNING, "NUMA_MOE_ISA is 'sse', ignored")
    plan = plan_of("odd and even", Settings(log_lines=(line,)))
    assert plan.log_lines[0] == line
    assert len(plan.log_lines) == 2


def test_description(plan_of: PlanOf) -> None:
    machine = Machine(
        {0: Node("0-1,4-5", distances="10 21"), 2: Node("2-3,6-7", gib=0.5, distances="21 10")},
        "0-7",
        cores=("0,4", "1,5", "2,6", "3,7"),
        allowed="0-6",
    )
    plan = plan_of(
        machine, cpu_quota=8, cpu_quota_source="/x/cpu.max", memory_bytes=3 << 30, memory_source="/x/m"
    )
    waiting = (
        "  waiting: a worker spins 50 us, then sleeps; "
        "the calling thread spins 20 us, yields 512 times, then sleeps"
    )
    legend = (
        "machine: 2 NUMA nodes; a letter per CPU, a word per core: "
        "W worker, H left to the calling thread, s spare, . not used, x not for this process"
    )
    assert str(plan).splitlines() == [
        "2 slices (across NUMA nodes), 2 workers",
        "  group 0: 1 worker, CPUs 1; memory on node 0",
        "  group 1: 1 worker, CPUs 3; memory on node 2",
        "  calling thread: waits for the workers; the core of CPU 0 is left to it",
        waiting,
        "this process may use: CPUs 0-6 (from sched_getaffinity)",
        "  memory of nodes 0,2",
        "  8 CPUs' time (/x/cpu.max)",
        "  3.0 GiB of memory (/x/m)",
        legend,
        "  node 0: 32.0 GiB, 16.0 GiB free, 3.0 MiB page cache, distance 21 to node 2",
        "    from CPU 0    H. W.",
        "  node 2: 512 MiB, 512 MiB free, 3.0 MiB page cache, distance 21 to node 0",
        "    from CPU 2    s. Wx",
        "why:",
        "  split across NUMA nodes 0,2: 1 + 1 workers",
    ]


def test_description_of_many_cores_is_folded(plan_of: PlanOf) -> None:
    lines = str(plan_of("dual Genoa")).splitlines()
    assert "    from CPU 0    H. " + " ".join(["W."] * 15) in lines
    assert "    from CPU 16   " + " ".join(["W."] * 16) in lines
    assert max(map(len, lines)) < 160


def test_description_of_the_rest(plan_of: PlanOf) -> None:
    assert "  group 0: no worker; memory anywhere" in str(plan_of(Machine({0: Node("0")}, "0")))
    unpinned = str(plan_of("phantom nodes", Settings(split="test", test_slices=3)))
    assert "  group 2: 1 worker, not pinned; memory anywhere" in unpinned
    assert "  node 1: 128.0 GiB, 16.0 GiB free, 3.0 MiB page cache, distance 14 to node 0, no CPUs" in str(
        plan_of("CXL memory")
    )
