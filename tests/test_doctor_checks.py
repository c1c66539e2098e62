"""The doctor's checks of what files say: each on a made-up machine that has it, and on one that doesn't."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sys_tree import MACHINES, Machine, Node, read_machine, write
from torch_numa_moe.doctor.affinity import KernelAnswers, check_affinity, check_kernel_answers
from torch_numa_moe.doctor.devices import check_gpus
from torch_numa_moe.doctor.findings import HINT, PROBLEM, Finding, Report
from torch_numa_moe.doctor.frequency import check_frequency
from torch_numa_moe.doctor.inspection import Inspection, hex_mask, shell_numbers
from torch_numa_moe.doctor.isolation import check_isolation
from torch_numa_moe.doctor.memory import (
    LOWEST_SWAP_BYTES,
    check_huge_pages,
    check_numa_balancing,
    check_paging,
    check_room,
)
from torch_numa_moe.doctor.scheduling import check_real_time, check_torch_threads
from torch_numa_moe.doctor.throttling import check_throttling
from torch_numa_moe.plan import make_plan
from torch_numa_moe.settings import Settings

Inspect = Callable[..., Inspection]

# Two nodes of two cores with two threads each. Workers go to CPUs 1 and 3.
TWO_NODES = Machine(
    {0: Node("0-1,4-5", distances="10 21"), 1: Node("2-3,6-7", distances="21 10")},
    "0-7",
    cores=("0,4", "1,5", "2,6", "3,7"),
)
ONE_NODE = Machine({0: Node("0-3")}, "0-3")


@pytest.fixture
def inspect(tmp_path: Path) -> Inspect:
    """A made-up machine as the checks look at it, with settings and changed limits."""

    def make(machine: str | Machine, settings: Settings | None = None, **changed) -> Inspection:
        described = MACHINES[machine] if isinstance(machine, str) else machine
        topology, limits = read_machine(described, tmp_path)
        unpinnable = changed.pop("unpinnable", None)
        plan = make_plan(topology, replace(limits, **changed), settings or Settings(), unpinnable=unpinnable)
        return Inspection(plan, tmp_path / "sys", tmp_path / "proc")

    return make


def only(report: Report) -> Finding:
    (finding,) = report.findings
    assert finding.seen and finding.why
    return finding


def set_all(inspection: Inspection, name: str, values: dict[int, str]) -> None:
    for cpu, value in values.items():
        write(inspection.root / f"devices/system/cpu/cpu{cpu}/cpufreq" / name, value)


def test_inspection(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    assert inspection.worker_cpus == (1, 3)
    assert inspection.sibling_cpus == (5, 7)
    assert inspection.core_cpus == (1, 3, 5, 7)
    assert inspection.other_cpus == (0, 2, 4, 6)
    assert inspection.move_command("taskset -apc {others} 7") == "taskset -apc 0,2,4,6 7"


def test_nothing_left_to_others(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE, Settings(workers=4))
    assert inspection.other_cpus == ()
    assert inspection.move_command("taskset -apc {others} 7") == (
        "# there is a worker on every core, so no CPU is left to others: NUMA_MOE_WORKERS=3 leaves one"
    )


def test_unpinned_workers_are_nowhere(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES, unpinnable="EPERM")
    assert inspection.worker_cpus == inspection.core_cpus == ()


@pytest.mark.parametrize(
    ("cpus", "numbers", "mask"),
    [
        ((0,), "0", "1"),
        ((1, 2, 3, 8), "$(seq 1 3) 8", "10e"),
        ((0, 31, 32), "0 $(seq 31 32)", "1,80000001"),
        ((1, 32, 66), "1 32 66", "4,00000001,00000002"),
        (tuple(range(64, 96)), "$(seq 64 95)", "ffffffff,00000000,00000000"),
    ],
)
def test_ways_to_write_cpus(cpus: tuple[int, ...], numbers: str, mask: str) -> None:
    assert shell_numbers(cpus) == numbers
    assert hex_mask(cpus) == mask


# --- CPU frequency


def test_governor(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    # CPU 0 has no worker.
    set_all(inspection, "scaling_governor", {0: "ondemand", 1: "powersave", 3: "performance"})
    finding = only(check_frequency(inspection))
    assert finding.severity == PROBLEM
    assert finding.seen == "cpufreq/scaling_governor: performance on CPUs 3; powersave on CPUs 1"
    assert finding.commands == (
        "for cpu in 1; do echo performance > /sys/devices/system/cpu/cpu$cpu/cpufreq/scaling_governor; done",
        "# or: cpupower -c 1 frequency-set -g performance",
    )


def test_energy_preference(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    set_all(inspection, "scaling_governor", dict.fromkeys(range(4), "performance"))
    set_all(inspection, "energy_performance_preference", dict.fromkeys(range(4), "balance_performance"))
    finding = only(check_frequency(inspection))
    assert finding.severity == HINT
    assert "balance_performance on CPUs 1-3" in finding.seen
    assert finding.commands[0].startswith("for cpu in $(seq 1 3); do echo performance > ")
    assert finding.commands[0].endswith("/cpufreq/energy_performance_preference; done")


def test_performance_governor(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    set_all(inspection, "scaling_governor", {1: "performance", 2: "performance", 3: "performance"})
    set_all(inspection, "energy_performance_preference", {1: "performance"})
    report = check_frequency(inspection)
    assert report.findings == []
    assert report.facts == ["cpufreq/scaling_governor: performance on CPUs 1-3"]


def test_no_governor(inspect: Inspect) -> None:
    report = check_frequency(inspect(ONE_NODE))
    assert report.findings == []
    assert len(report.not_checked) == 1 and "can't be read" in report.not_checked[0]


# --- Huge pages


def set_huge_pages(inspection: Inspection, mode: str) -> None:
    write(inspection.root / "kernel/mm/transparent_hugepage/enabled", mode)


def reserve(inspection: Inspection, node: int, total: int, free: int) -> None:
    folder = inspection.root / f"devices/system/node/node{node}/hugepages/hugepages-2048kB"
    write(folder / "nr_hugepages", str(total))
    write(folder / "free_hugepages", str(free))


def test_no_huge_pages(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    set_huge_pages(inspection, "always madvise [never]")
    finding = only(check_huge_pages(inspection, "explicit"))
    assert finding.severity == PROBLEM
    assert finding.seen.endswith("transparent_hugepage/enabled is never")
    assert finding.commands == ("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",)
    assert check_huge_pages(inspection, "none").findings == []
    reserve(inspection, 0, 512, 500)
    reserve(inspection, 1, 512, 0)
    assert only(check_huge_pages(inspection, "explicit")).severity == PROBLEM
    reserve(inspection, 1, 512, 12)
    report = check_huge_pages(inspection, "explicit")
    assert only(report).severity == HINT
    assert report.facts == ["reserved pages of 2 MiB: node 0: 512 (500 free), node 1: 512 (12 free)"]
    assert only(check_huge_pages(inspection, "transparent")).severity == PROBLEM


@pytest.mark.parametrize("mode", ["always [madvise] never", "[always] madvise never"])
def test_huge_pages(mode: str, inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    set_huge_pages(inspection, mode)
    report = check_huge_pages(inspection, "explicit")
    assert report.findings == [] and report.not_checked == []
    assert report.facts == [f"transparent huge pages: {mode}"]


@pytest.mark.parametrize(("enabled", "fires"), [("0", True), ("1", False)])
def test_huge_pages_of_this_process(enabled: str, fires: bool, inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    set_huge_pages(inspection, "[always] madvise never")
    write(inspection.proc / "self/status", f"Name:\tpython\nTHP_enabled:\t{enabled}\nThreads:\t1")
    findings = check_huge_pages(inspection, "explicit").findings
    assert [finding.seen.endswith("THP_enabled is 0") for finding in findings] == [True] * fires


# --- Automatic NUMA balancing


@pytest.mark.parametrize(
    ("split", "binding_works", "severity"),
    [(None, True, HINT), (None, None, HINT), (None, False, PROBLEM), ("0", True, PROBLEM)],
)
def test_numa_balancing(
    split: str | None, binding_works: bool | None, severity: str, inspect: Inspect
) -> None:
    inspection = inspect(TWO_NODES, Settings(split=split))
    write(inspection.proc / "sys/kernel/numa_balancing", "1")
    finding = only(check_numa_balancing(inspection, binding_works=binding_works))
    assert finding.severity == severity
    assert finding.seen.endswith("sys/kernel/numa_balancing is 1")
    assert finding.commands == ("sysctl kernel.numa_balancing=0",)


def test_numa_balancing_is_off_or_irrelevant(inspect: Inspect, tmp_path: Path) -> None:
    inspection = inspect(TWO_NODES)
    report = check_numa_balancing(inspection)
    assert report.findings == [] and len(report.not_checked) == 1
    write(inspection.proc / "sys/kernel/numa_balancing", "0")
    assert check_numa_balancing(inspection).findings == []


def test_numa_balancing_with_one_node(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    write(inspection.proc / "sys/kernel/numa_balancing", "1")
    assert check_numa_balancing(inspection) == Report()


# --- Memory


def with_page_cache(inspection: Inspection, node: int, cached_gib: int) -> Inspection:
    topology = inspection.plan.topology
    nodes = tuple(
        replace(one, cached_bytes=cached_gib << 30) if one.id == node else one for one in topology.nodes
    )
    return replace(inspection, plan=replace(inspection.plan, topology=replace(topology, nodes=nodes)))


FULL_NODE = replace(TWO_NODES, nodes={**TWO_NODES.nodes, 1: Node("2-3,6-7", free_gib=1)})


@pytest.mark.parametrize(
    ("cached_gib", "binding_works", "severity", "command"),
    [
        (20, True, HINT, "sync; echo 1 > /proc/sys/vm/drop_caches"),
        (20, False, PROBLEM, "sync; echo 1 > /proc/sys/vm/drop_caches"),
        (0, True, PROBLEM, "numactl --hardware; numastat -p  # shows what to end"),
    ],
)
def test_full_node(
    cached_gib: int, binding_works: bool, severity: str, command: str, inspect: Inspect
) -> None:
    inspection = with_page_cache(inspect(FULL_NODE), 1, cached_gib)
    finding = only(check_room(inspection, binding_works=binding_works))
    assert finding.severity == severity
    assert "node1/meminfo: 1.0 GiB free" in finding.seen
    assert finding.commands[-1] == command


def test_room(inspect: Inspect) -> None:
    assert check_room(inspect(TWO_NODES)) == Report()


@pytest.mark.parametrize(("left_gib", "fires"), [(1, True), (3, False)])
@pytest.mark.parametrize(
    ("source", "command"),
    [("/x/memory.max", "echo max > /x/memory.max"), ("/x/memory.limit_in_bytes", "echo -1 > /x/")],
)
def test_memory_limit(left_gib: int, fires: bool, source: str, command: str, inspect: Inspect) -> None:
    inspection = inspect(
        TWO_NODES, memory_bytes=8 << 30, memory_left_bytes=left_gib << 30, memory_source=source
    )
    findings = check_room(inspection).findings
    assert [finding.severity for finding in findings] == [PROBLEM] * fires
    if fires:
        assert findings[0].seen == f"{source} leaves 1.0 GiB"
        assert findings[0].commands[0].startswith(command)


def set_memory(inspection: Inspection, swapped: int, available: int) -> None:
    total = 8 << 30
    lines = {
        "MemAvailable": available,
        "SwapTotal": total,
        "SwapFree": total - swapped,
        "CommitLimit": 10 << 30,
        "Committed_AS": 7 << 30,
    }
    write(inspection.proc / "meminfo", "\n".join(f"{name}: {size >> 10} kB" for name, size in lines.items()))


def test_swap(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    set_memory(inspection, LOWEST_SWAP_BYTES - (1 << 20), 64 << 30)
    assert check_paging(inspection) == Report()
    set_memory(inspection, 1 << 30, 64 << 30)
    finding = only(check_paging(inspection))
    assert finding.severity == HINT
    assert finding.seen.endswith("meminfo: 1.0 GiB of swap in use")
    assert finding.commands == ("swapoff -a  # until swapon -a",)
    set_memory(inspection, 1 << 30, 1 << 30)
    assert only(check_paging(inspection)).commands[0].startswith("# end what uses memory first (1.0 GiB")


@pytest.mark.parametrize(("mode", "fires"), [("0", False), ("1", False), ("2", True)])
def test_overcommit(mode: str, fires: bool, inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    set_memory(inspection, 0, 64 << 30)
    write(inspection.proc / "sys/vm/overcommit_memory", mode)
    findings = check_paging(inspection).findings
    assert [finding.commands for finding in findings] == [("sysctl vm.overcommit_memory=0",)] * fires
    if fires:
        assert findings[0].seen.endswith("overcommit_memory is 2; 3.0 GiB of 10.0 GiB may yet be committed")


# --- CPU quota


def set_throttled(inspection: Inspection, text: str, file: str = "cpu.max", quota: float = 2) -> Inspection:
    folder = inspection.root / "fs/cgroup/pod"
    write(folder / "cpu.stat", text)
    limits = replace(inspection.plan.limits, cpu_quota=quota, cpu_quota_source=str(folder / file))
    return replace(inspection, plan=replace(inspection.plan, limits=limits))


@pytest.mark.parametrize(
    ("text", "file", "severity", "seen", "command"),
    [
        (
            "usage_usec 1\nnr_periods 1000\nnr_throttled 10\nthrottled_usec 2500000",
            "cpu.max",
            PROBLEM,
            "stopped in 10 of 1000 periods, 2.5 s in all",
            "echo max > ",
        ),
        (
            "nr_periods 1000\nnr_throttled 9\nthrottled_time 1500000000",
            "cpu.cfs_quota_us",
            HINT,
            "stopped in 9 of 1000 periods, 1.5 s in all",
            "echo -1 > ",
        ),
    ],
)
def test_throttling(text: str, file: str, severity: str, seen: str, command: str, inspect: Inspect) -> None:
    finding = only(check_throttling(set_throttled(inspect(ONE_NODE), text, file)))
    assert finding.severity == severity
    assert finding.seen.endswith(seen)
    assert finding.topic == "CPU quota"
    assert finding.commands[0].startswith(command) and f"/pod/{file}" in finding.commands[0]


def test_no_throttling(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    assert check_throttling(inspection) == Report()
    never = set_throttled(inspection, "nr_periods 1000\nnr_throttled 0\nthrottled_usec 0")
    report = check_throttling(never)
    assert report.findings == [] and report.facts[0].endswith("cpu.stat: never throttled")
    (never.root / "fs/cgroup/pod/cpu.stat").unlink()
    assert len(check_throttling(never).not_checked) == 1


def test_a_group_above_is_throttled(inspect: Inspect) -> None:
    inspection = set_throttled(inspect(ONE_NODE), "nr_periods 10\nnr_throttled 0")
    write(inspection.root / "fs/cgroup/cpu.stat", "nr_periods 10\nnr_throttled 5\nthrottled_usec 1")
    assert only(check_throttling(inspection)).seen.startswith(f"{inspection.root}/fs/cgroup/cpu.stat")


# --- Isolation


def set_fences(inspection: Inspection, system: str, user: str, init: str = "") -> None:
    for unit, cpus in {"system.slice": system, "user.slice": user, "init.scope": init}.items():
        if cpus:
            write(inspection.root / f"fs/cgroup/{unit}/cpuset.cpus.effective", cpus)


@pytest.mark.parametrize(
    ("system", "user", "seen"),
    [
        ("", "", "nothing keeps other programs off the workers' CPUs 1,3"),
        ("0,2,4,6", "", "nothing keeps other programs off the workers' CPUs 1,3"),
        ("0-7", "0,2,4,6", "nothing keeps other programs off the workers' CPUs 1,3"),
        ("0,2", "0-1,4-6", "nothing keeps other programs off the workers' CPUs 1"),
        ("0,2,4-7", "0,2", "the workers' CPUs are fenced, but not CPUs 5,7 on the same cores"),
        ("0,2,4,6", "0,2,4,6", None),
    ],
)
def test_fences(system: str, user: str, seen: str | None, inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    set_fences(inspection, system, user)
    report = check_isolation(inspection)
    if seen is None:
        assert report.findings == []
        assert report.facts == ["other programs are kept off the workers' cores"]
    else:
        finding = only(report)
        assert (finding.severity, finding.seen) == (HINT, seen)
        assert finding.commands[0].startswith("python -m torch_numa_moe doctor --fence")


def test_isolated_cpus_are_fenced(inspect: Inspect) -> None:
    inspection = inspect(replace(MACHINES["isolated"], allowed="8-15"))
    write(inspection.root / "devices/system/cpu/nohz_full", "9-15")
    report = check_isolation(inspection)
    assert report.findings == []
    assert report.facts == [
        "CPUs 8-15 are isolated (isolcpus)",
        "CPUs 9-15 run without the scheduler's tick (nohz_full)",
        "other programs are kept off the workers' cores",
    ]


def test_smt_is_a_fact(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    write(inspection.root / "devices/system/cpu/smt/active", "1")
    write(inspection.root / "devices/system/cpu/nohz_full", "(null)")
    assert check_isolation(inspection).facts == [
        "SMT is on; CPUs 5,7 share a core with a worker and have none themselves"
    ]


def test_no_core_for_others(inspect: Inspect) -> None:
    finding = only(check_isolation(inspect(ONE_NODE, Settings(workers=4))))
    assert finding.seen == "there is a worker on every core, so no CPU is left to others"
    assert finding.commands == ("# NUMA_MOE_WORKERS=3 leaves one",)


# --- Affinity


def test_hidden_node(inspect: Inspect) -> None:
    finding = only(check_affinity(inspect("CPUs of one node")))
    assert finding.severity == HINT
    assert finding.seen == ("the affinity mask (sched_getaffinity) leaves out CPUs 0-3, all of NUMA nodes 0")
    assert finding.commands[0].startswith("taskset -c 0-7 COMMAND")


def test_hidden_cpus_of_a_node_that_is_used(inspect: Inspect) -> None:
    report = check_affinity(inspect(replace(TWO_NODES, allowed="0-6")))
    assert report.findings == []
    assert report.facts == ["the affinity mask (sched_getaffinity) leaves out CPUs 7"]


def test_memory_of_one_node(inspect: Inspect) -> None:
    finding = only(check_affinity(inspect("memory of one node")))
    assert finding.severity == PROBLEM
    assert finding.seen.endswith("Mems_allowed_list is 0, without node 1")
    assert "AllowedMemoryNodes=0-1" in finding.commands[0]


def test_whole_machine(inspect: Inspect) -> None:
    assert check_affinity(inspect(TWO_NODES)) == Report()


@pytest.mark.parametrize(
    ("offline", "present", "smt", "command"),
    [
        ("2", "0-7", "on", "for cpu in 2; do"),
        ("2,8-255", "0-7", "notsupported", "for cpu in 2; do"),
        ("8-255", "0-7", "on", None),
        ("", "0-7", "on", None),
        ("1,3", "0-7", "off", None),
    ],
)
def test_offline_cpus(offline: str, present: str, smt: str, command: str | None, inspect: Inspect) -> None:
    inspection = inspect("offline CPU")
    folder = inspection.root / "devices/system/cpu"
    write(folder / "offline", offline)
    write(folder / "present", present)
    write(folder / "smt/control", smt)
    report = check_affinity(inspection)
    if command is None:
        assert report.findings == []
        assert any("SMT is off" in fact for fact in report.facts) == (smt == "off")
    else:
        assert only(report).commands[0].startswith(command)
        assert only(report).severity == HINT


def test_kernel_refuses(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    answers = KernelAnswers("sched_setaffinity: EPERM", {0: "EPERM", 1: "EPERM"}, "EPERM")
    assert answers.binding_works is False
    pinning, binding, verification = check_kernel_answers(inspection, answers).findings
    assert (pinning.severity, binding.severity, verification.severity) == (PROBLEM, PROBLEM, HINT)
    assert pinning.seen == "a thread can't be pinned to a CPU (sched_setaffinity: EPERM)"
    assert binding.seen == "memory can't be bound to NUMA nodes 0-1 (mbind: EPERM)"
    assert verification.seen == (
        "the kernel doesn't tell where pages are (move_pages: EPERM; numa_maps neither)"
    )
    assert pinning.commands == ("# in containers: a seccomp profile that allows sched_setaffinity",)
    (command,) = binding.commands
    assert command.startswith("# in containers: docker run --cap-add SYS_NICE, or a seccomp profile that ")


def test_binding_matters_with_the_split(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES, Settings(split="0"))
    assert only(check_kernel_answers(inspection, KernelAnswers(None, {0: "ENOSYS"}))).severity == HINT


def test_refusals_that_do_not_matter_with_one_node(inspect: Inspect) -> None:
    report = check_kernel_answers(inspect(ONE_NODE), KernelAnswers(None, {0: "EPERM"}, "EPERM"))
    assert report.findings == []
    assert report.facts == [
        "memory can't be bound to NUMA nodes 0 (mbind: EPERM); with one node it makes no difference"
    ]


def test_kernel_grants(inspect: Inspect) -> None:
    answers = KernelAnswers(None, {0: "", 1: ""}, "")
    assert answers.binding_works is True
    assert KernelAnswers().binding_works is None
    report = check_kernel_answers(inspect(TWO_NODES), answers)
    assert report.findings == []
    assert report.facts == ["memory can be bound to NUMA nodes 0-1"]


# --- GPUs


def add_gpu(inspection: Inspection, files: dict[str, str], group: str | None = None) -> None:
    folder = inspection.root / "bus/pci/devices/0000:17:00.0"
    for name, text in {"class": "0x030200", "vendor": "0x10de", **files}.items():
        write(folder / name, text)
    if group is not None:
        (folder / "iommu_group").symlink_to("../../../../kernel/iommu_groups/42")
        write(inspection.root / "kernel/iommu_groups/42/type", group)


@pytest.mark.parametrize("mode", ["DMA", "DMA-FQ"])
def test_translated_gpu(mode: str, inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    add_gpu(inspection, {"numa_node": "1"}, mode)
    write(inspection.proc / "cmdline", "quiet intel_iommu=on splash")
    report = check_gpus(inspection)
    finding = only(report)
    assert (finding.severity, finding.topic) == (HINT, "IOMMU")
    assert finding.seen == (
        f"NVIDIA GPU 0000:17:00.0: {inspection.root}/kernel/iommu_groups/42/type is {mode} (intel_iommu=on)"
    )
    assert "grubby --update-kernel=ALL --args=iommu=pt  # Fedora, RHEL" in finding.commands
    assert report.facts == ["NVIDIA GPU 0000:17:00.0 is at NUMA node 1"]


@pytest.mark.parametrize(
    ("group", "fact"),
    [
        ("identity", "AMD GPU 0000:17:00.0: its IOMMU passes addresses through"),
        (None, "AMD GPU 0000:17:00.0: no IOMMU"),
    ],
)
def test_gpu_without_translation(group: str | None, fact: str, inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    add_gpu(inspection, {"vendor": "0x1002", "class": "0x120000", "numa_node": "-1"}, group)
    report = check_gpus(inspection)
    assert report.findings == []
    assert report.facts == ["AMD GPU 0000:17:00.0 is at a NUMA node that the firmware doesn't tell", fact]


@pytest.mark.parametrize("files", [{"class": "0x020000"}, {"vendor": "0x1234"}])
def test_other_devices(files: dict[str, str], inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    add_gpu(inspection, {"current_link_width": "1", "max_link_width": "16", **files}, "DMA")
    assert check_gpus(inspection) == Report()


@pytest.mark.parametrize(
    ("width", "speed", "seen"),
    [
        ("8", "16.0 GT/s PCIe", ["current_link_width is 8 of 16 lanes"]),
        ("16", "2.5 GT/s PCIe", ["current_link_speed is 2.5 GT/s PCIe of 16.0 GT/s PCIe"]),
        ("16", "16.0 GT/s PCIe", []),
        ("255", "Unknown", []),
    ],
)
def test_pcie_link(width: str, speed: str, seen: list[str], inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    files = {"current_link_width": width, "max_link_width": "16", "current_link_speed": speed}
    add_gpu(inspection, {**files, "max_link_speed": "16.0 GT/s PCIe"}, "identity")
    findings = check_gpus(inspection).findings
    assert [finding.seen[finding.seen.index("current") :] for finding in findings] == seen
    assert all(finding.severity == HINT for finding in findings)


# --- Scheduling


def test_real_time_is_told(inspect: Inspect) -> None:
    inspection = inspect(ONE_NODE)
    assert check_real_time(inspection) == Report()
    write(inspection.proc / "sys/kernel/sched_rt_runtime_us", "950000")
    write(
        inspection.proc / "self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max realtime priority     5                    99                              ",
    )
    report = check_real_time(inspection)
    assert report.findings == []
    assert report.facts == [
        "kernel.sched_rt_runtime_us is 950000",
        "highest real-time priority for this process: 5 (ulimit -r)",
    ]


def test_torch_threads(inspect: Inspect) -> None:
    inspection = inspect(TWO_NODES)
    finding = only(check_torch_threads(inspection, 3))
    assert finding.severity == HINT
    assert finding.seen == "torch.get_num_threads() is 3, and workers leave 2 cores"
    assert finding.commands == ("export OMP_NUM_THREADS=2  # or, in the program: torch.set_num_threads(2)",)
    report = check_torch_threads(inspection, 2)
    assert report.findings == []
    assert report.facts == ["torch.get_num_threads() is 2"]


def test_torch_threads_get_what_this_process_may_use(inspect: Inspect) -> None:
    # Cores of CPUs 2-3 aren't this process's.
    inspection = inspect(replace(TWO_NODES, allowed="0-1"))
    assert inspection.worker_cpus == (1,)
    assert only(check_torch_threads(inspection, 2)).seen.endswith("workers leave 1 core")


def test_torch_threads_beside_unpinned_workers(inspect: Inspect) -> None:
    assert check_torch_threads(inspect(TWO_NODES, unpinnable="EPERM"), 100).findings == []
