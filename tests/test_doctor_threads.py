"""What the doctor sees of a running machine: threads, interrupts, CPU time, between two looks.

The second look is at files that the made-up machine's ``sleep`` has changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sys_tree import Machine, Node, read_machine, write
from torch_numa_moe import _C
from torch_numa_moe.doctor import Intruder, PinnedThread, find_intruders, find_pinned_threads
from torch_numa_moe.doctor.findings import HINT, PROBLEM, Report
from torch_numa_moe.doctor.inspection import Inspection
from torch_numa_moe.doctor.interrupts import InterruptLoad, check_interrupts, find_interrupts
from torch_numa_moe.doctor.intruders import check_intruders
from torch_numa_moe.doctor.pools import WORKER_NAME
from torch_numa_moe.doctor.sampling import Sample, read_cpu_times, read_interrupts, take_samples
from torch_numa_moe.doctor.threads import read_threads, sees_all_processes
from torch_numa_moe.plan import make_plan
from torch_numa_moe.runtime import ensure_started
from torch_numa_moe.settings import Settings

HERTZ = os.sysconf("SC_CLK_TCK")
OWN_PID = os.getpid()
KERNEL_THREAD = 0x00200000


@dataclass
class Clock:
    """A clock that only sleeping moves on, and what happens meanwhile."""

    meanwhile: Callable[[], object] = lambda: None
    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile()

    def read(self) -> float:
        return self.now


@dataclass
class Processes:
    """The threads of a made-up /proc."""

    proc: Path

    def set(
        self,
        pid: int,
        *,
        cpu: int,
        ticks: int,
        tid: int | None = None,
        comm: str = "busy",
        flags: int = 0x400000,
        started: int = 7,
        allowed: str = "0-7",
    ) -> None:
        tid = pid if tid is None else tid
        folder = self.proc / f"{pid}/task/{tid}"
        # Fields of proc_pid_stat(5) from the third one on; ticks are halved between user and system.
        fields = ["S", "1", *["0"] * 4, str(flags), *["0"] * 4, str(ticks - ticks // 2), str(ticks // 2)]
        fields += [*["0"] * 6, str(started), *["0"] * 16, str(cpu), *["0"] * 13]
        write(folder / "stat", f"{tid} ({comm}) {' '.join(fields)}")
        write(folder / "status", f"Name:\t{comm}\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}")


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path / "proc")


@pytest.fixture
def inspection(tmp_path: Path) -> Inspection:
    """Cores of two threads: workers on CPUs 1 to 3, with siblings 5 to 7; CPUs 0 and 4 are left to others."""
    machine = Machine({0: Node("0-7")}, "0-7", cores=("0,4", "1,5", "2,6", "3,7"))
    topology, limits = read_machine(machine, tmp_path)
    plan = make_plan(topology, limits, Settings(workers=3))
    assert plan.groups[0].worker_cpus == (1, 2, 3)
    return Inspection(plan, tmp_path / "sys", tmp_path / "proc")


# --- find_intruders


def test_intruders(processes: Processes) -> None:
    def meanwhile() -> None:
        processes.set(10, cpu=1, ticks=500 + 2 * HERTZ, comm="all of CPU 1")
        processes.set(10, tid=11, cpu=2, ticks=HERTZ // 2, comm="a (strange) name")
        processes.set(12, cpu=3, ticks=9000, comm="asleep")
        processes.set(13, cpu=0, ticks=9000, comm="elsewhere")
        processes.set(OWN_PID, tid=1500000, cpu=2, ticks=HERTZ, comm="own")
        processes.set(16, cpu=1, ticks=2 * HERTZ, comm="worker")
        processes.set(17, cpu=3, ticks=HERTZ, comm="kworker/3:1", flags=KERNEL_THREAD | 0x40)

    processes.set(10, cpu=1, ticks=500)
    processes.set(10, tid=11, cpu=2, ticks=0)
    processes.set(12, cpu=3, ticks=9000)
    processes.set(13, cpu=0, ticks=0)
    processes.set(OWN_PID, tid=1500000, cpu=1, ticks=0)
    processes.set(16, cpu=1, ticks=0)
    processes.set(17, cpu=3, ticks=0, flags=KERNEL_THREAD)
    clock = Clock(meanwhile)
    found = find_intruders(
        (1, 2, 3),
        proc=processes.proc,
        interval_seconds=2.0,
        ignore={16},
        sleep=clock.sleep,
        clock=clock.read,
    )
    assert clock.slept == [2.0]
    # The busiest first; among equals by number.
    own = Intruder(OWN_PID, 1500000, "own", 2, 0.5, own=True, kernel=False)
    assert found == (
        Intruder(10, 10, "all of CPU 1", 1, 1.0, own=False, kernel=False),
        Intruder(17, 17, "kworker/3:1", 3, 0.5, own=False, kernel=True),
        own,
        Intruder(10, 11, "a (strange) name", 2, 0.25, own=False, kernel=False),
    )


def test_shares_that_are_too_small(processes: Processes) -> None:
    def watch(lowest_share: float) -> list[float]:
        processes.set(10, cpu=1, ticks=100)
        clock = Clock(lambda: processes.set(10, cpu=1, ticks=101))
        found = find_intruders(
            {1},
            proc=processes.proc,
            interval_seconds=10.0,
            lowest_share=lowest_share,
            sleep=clock.sleep,
            clock=clock.read,
        )
        return [intruder.share for intruder in found]

    tick = 1 / HERTZ / 10
    assert watch(tick) == [pytest.approx(tick)]
    assert watch(tick * 1.01) == []


def test_a_thread_that_started_meanwhile(processes: Processes) -> None:
    """Also one that has the number of a thread that has ended: its time counts from its own start."""

    def meanwhile() -> None:
        processes.set(10, cpu=1, ticks=HERTZ, started=8)
        processes.set(11, cpu=1, ticks=HERTZ // 2)

    processes.set(10, cpu=1, ticks=100 * HERTZ, started=7)
    clock = Clock(meanwhile)
    found = find_intruders({1}, proc=processes.proc, sleep=clock.sleep, clock=clock.read)
    assert [(intruder.tid, intruder.share) for intruder in found] == [(10, 1.0), (11, 0.5)]


@pytest.mark.parametrize(
    "text", ["", "12", "12 (x", "12 (x) S 1 2", "12 (x) S " + "y " * 50, ")" * 100, "\0" * 100]
)
def test_damaged_stat(text: str, processes: Processes) -> None:
    processes.set(10, cpu=1, ticks=3, comm="whole")
    write(processes.proc / "12/task/12/stat", text)
    (processes.proc / "13/task/13").mkdir(parents=True)
    (processes.proc / "self").mkdir()
    assert list(read_threads(processes.proc)) == [10]


def test_names_are_printable(processes: Processes) -> None:
    (processes.proc / "10/task/10").mkdir(parents=True)
    processes.set(10, cpu=1, ticks=3, comm="plain")
    path = processes.proc / "10/task/10/stat"
    path.write_bytes(path.read_bytes().replace(b"plain", b"\x1b[31m\xc3\xa9\n)"))
    assert read_threads(processes.proc)[10].comm == "?[31m???)"


def test_no_proc(tmp_path: Path) -> None:
    clock = Clock()
    assert find_intruders({0}, proc=tmp_path / "none", sleep=clock.sleep, clock=clock.read) == ()
    assert find_pinned_threads({0}, proc=tmp_path / "none") == ()
    assert sees_all_processes(tmp_path / "none") is None


def test_pinned_threads(processes: Processes) -> None:
    processes.set(10, cpu=1, ticks=0, comm="pinned", allowed="1")
    processes.set(10, tid=11, cpu=2, ticks=0, comm="to two", allowed="1-2")
    processes.set(12, cpu=1, ticks=0, allowed="0-1")
    processes.set(13, cpu=1, ticks=0, allowed="1", flags=KERNEL_THREAD)
    processes.set(14, cpu=1, ticks=0, allowed="1")
    processes.set(OWN_PID, cpu=1, ticks=0, comm="own", allowed="2")
    expected = {
        PinnedThread(10, 10, "pinned", (1,), own=False),
        PinnedThread(10, 11, "to two", (1, 2), own=False),
        PinnedThread(OWN_PID, OWN_PID, "own", (2,), own=True),
    }
    found = find_pinned_threads((1, 2, 3), proc=processes.proc, ignore={14})
    assert set(found) == expected and len(found) == 3


@pytest.fixture
def spinner() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that keeps one CPU busy, and which one."""
    cpu = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process, cpu
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_real_spinner(spinner: tuple[subprocess.Popen[bytes], int]) -> None:
    process, cpu = spinner
    for _ in range(50):  # others may be on its CPU too
        found = find_intruders({cpu}, interval_seconds=0.1, lowest_share=0.0)
        mine = [intruder for intruder in found if intruder.pid == process.pid]
        if mine:
            break
    (intruder,) = mine
    assert (intruder.tid, intruder.cpu, intruder.own, intruder.kernel) == (process.pid, cpu, False, False)
    assert 0 < intruder.share < 1.5
    pinned = {thread.tid: thread.cpus for thread in find_pinned_threads({cpu})}
    assert pinned[process.pid] == (cpu,)
    assert process.pid not in {thread.tid for thread in find_pinned_threads({cpu + 1})}


# --- What is said about them


def look(inspection: Inspection, meanwhile: Callable[[], object]) -> tuple[Sample, Sample]:
    clock = Clock(meanwhile)
    return take_samples(1.0, proc=inspection.proc, sleep=clock.sleep, clock=clock.read)


def test_intruder_on_a_worker(inspection: Inspection, processes: Processes) -> None:
    def meanwhile() -> None:
        processes.set(10, cpu=4, ticks=0, comm="llama-server")
        processes.set(10, tid=11, cpu=1, ticks=HERTZ, comm="decode")
        processes.set(10, tid=12, cpu=2, ticks=HERTZ // 2, comm="decode")

    processes.set(10, cpu=4, ticks=0, comm="llama-server")
    processes.set(10, tid=11, cpu=1, ticks=0)
    processes.set(10, tid=12, cpu=2, ticks=0)
    (finding,) = check_intruders(inspection, *look(inspection, meanwhile)).findings
    assert finding.severity == PROBLEM
    assert finding.seen == (
        f"{inspection.proc}/10/task: 2 threads (decode) of process 10 (llama-server) on CPUs 1-2, "
        "up to 100% of CPU 1"
    )
    assert finding.commands == ("taskset -apc 0,4 10",)


@pytest.mark.parametrize(
    ("cpu", "ticks", "severity"),
    [
        (1, HERTZ // 10, PROBLEM),
        (1, HERTZ // 10 - 1, HINT),
        (1, HERTZ // 50, HINT),
        (1, HERTZ // 50 - 1, None),
        (5, HERTZ, HINT),  # on the other thread of a worker's core
        (0, HERTZ, None),
        (4, HERTZ, None),
    ],
)
def test_how_bad_an_intruder_is(
    cpu: int, ticks: int, severity: str | None, inspection: Inspection, processes: Processes
) -> None:
    processes.set(10, cpu=cpu, ticks=0)
    samples = look(inspection, lambda: processes.set(10, cpu=cpu, ticks=ticks))
    found = [finding.severity for finding in check_intruders(inspection, *samples).findings]
    assert found == ([] if severity is None else [severity])


def test_quiet_machine(inspection: Inspection, processes: Processes) -> None:
    """Case intruder-quiet-machine: kernel threads that run for moments, the pool's own workers, sleepers."""

    def meanwhile() -> None:
        processes.set(10, cpu=1, ticks=1, flags=KERNEL_THREAD, comm="ksoftirqd/1", allowed="1")
        processes.set(OWN_PID, tid=21, cpu=2, ticks=HERTZ, allowed="2")
        processes.set(12, cpu=3, ticks=5000, comm="sleeper")

    processes.set(10, cpu=1, ticks=0, flags=KERNEL_THREAD, comm="ksoftirqd/1", allowed="1")
    processes.set(OWN_PID, tid=21, cpu=2, ticks=0, allowed="2")
    processes.set(12, cpu=3, ticks=5000, comm="sleeper")
    assert check_intruders(inspection, *look(inspection, meanwhile), ignore={21}) == Report()


def test_own_thread_is_named_as_such(inspection: Inspection, processes: Processes) -> None:
    processes.set(OWN_PID, cpu=1, ticks=0, comm="python")
    samples = look(inspection, lambda: processes.set(OWN_PID, cpu=1, ticks=HERTZ, comm="python"))
    (finding,) = check_intruders(inspection, *samples).findings
    assert (finding.severity, finding.topic) == (HINT, "threads beside the pool")
    assert "a thread (python) of this process on CPUs 1, up to 100% of CPU 1" in finding.seen
    assert finding.commands == (f"for tid in {OWN_PID}; do taskset -pc 0,4 $tid; done",)


def test_a_server_that_is_being_looked_at(inspection: Inspection, processes: Processes) -> None:
    """Another process's pool is no intruder, but its other threads are in its way; only these are moved."""

    def set_server(ticks: int) -> None:
        processes.set(10, cpu=0, ticks=0, comm="python")
        for cpu in (1, 2, 3):
            processes.set(
                10, tid=10 + cpu, cpu=cpu, ticks=ticks, comm=f"numa_moe/0.{cpu - 1}", allowed=str(cpu)
            )
        processes.set(10, tid=20, cpu=2, ticks=ticks // 4, comm="python")

    set_server(0)
    report = check_intruders(inspection, *look(inspection, lambda: set_server(HERTZ)))
    assert report.facts == ["process 10 (python) runs a pool on CPUs 1-3; its workers are no intruders"]
    (finding,) = report.findings
    assert (finding.severity, finding.topic) == (HINT, "threads beside the pool")
    assert "a thread (python) of process 10 (python) on CPUs 2, up to 25% of CPU 2" in finding.seen
    assert finding.commands == ("for tid in 20; do taskset -pc 0,4 $tid; done",)


@pytest.mark.parametrize("other", [10, OWN_PID])
@pytest.mark.parametrize(("cpu", "fires"), [(2, True), (3, False)])
def test_two_pools(other: int, cpu: int, fires: bool, inspection: Inspection, processes: Processes) -> None:
    """Case two-processes-same-cpus."""
    for pid, tid, own_cpu in ((other, other, 1), (other, 1500000, 2), (12, 12, cpu)):
        processes.set(pid, tid=tid, cpu=own_cpu, ticks=0, comm="numa_moe/0.0", allowed=str(own_cpu))
    report = check_intruders(inspection, *look(inspection, lambda: None), ignore={other, 1500000})
    found = [(finding.severity, finding.topic) for finding in report.findings]
    assert found == [(PROBLEM, "pools")] * fires
    if fires:
        assert report.findings[0].seen.endswith("are pinned to the same CPUs 2")
        assert f"process {other} " in report.findings[0].seen and "process 12 " in report.findings[0].seen
    else:
        facts = {f"process {pid} (numa_moe/0.0) runs a pool" for pid in {other, 12} - {OWN_PID}}
        assert {fact.partition(" on CPUs")[0] for fact in report.facts} == facts


def test_names_of_workers() -> None:
    """The doctor knows workers by the names that the pool gives them."""
    ensure_started()
    if not _C.workers():
        pytest.skip("the plan has no worker here")
    workers = [worker.thread_id for worker in _C.workers()]
    threads = read_threads()
    assert all(threads[tid].comm.startswith(WORKER_NAME) for tid in workers)


@pytest.mark.parametrize(
    ("comm", "command"),
    [
        ("kworker/u16:3", "echo 11 > /sys/devices/virtual/workqueue/cpumask"),
        ("kworker/1:0", "# a kernel thread: "),
    ],
)
def test_kernel_thread(comm: str, command: str, inspection: Inspection, processes: Processes) -> None:
    processes.set(10, cpu=1, ticks=0, comm=comm, flags=KERNEL_THREAD)
    samples = look(inspection, lambda: processes.set(10, cpu=1, ticks=HERTZ, comm=comm, flags=KERNEL_THREAD))
    (finding,) = check_intruders(inspection, *samples).findings
    assert (finding.severity, finding.topic) == (HINT, "kernel thread")
    assert finding.seen == f"{inspection.proc}/10: {comm} on CPU 1, 100% of it"
    assert finding.commands[0].startswith(command)


def test_idle_pinned_threads_of_another_pool(inspection: Inspection, processes: Processes) -> None:
    """Case two-processes-same-cpus, while the other one is idle."""
    processes.set(10, cpu=0, ticks=0, comm="python", allowed="0-7")
    for cpu in (1, 2, 3):
        processes.set(10, tid=10 + cpu, cpu=cpu, ticks=0, allowed=str(cpu))
    (finding,) = check_intruders(inspection, *look(inspection, lambda: None)).findings
    assert (finding.severity, finding.topic) == (HINT, "pinned threads")
    assert "3 threads of process 10 (python) may run on CPUs 1-3 alone, idle now" in finding.seen
    assert finding.commands == ("taskset -apc 0,4 10",)


def set_cpu_times(proc: Path, ticks: dict[int, tuple[int, int]]) -> None:
    lines = ["cpu  1 2 3 4 5 6 7 8 9 0"]
    lines += [
        f"cpu{cpu} {threads - 2} 1 1 999 9 9 9 {stolen} 0 0" for cpu, (threads, stolen) in ticks.items()
    ]
    write(proc / "stat", "\n".join([*lines, "intr 1 2 3", "ctxt 5"]))


@pytest.mark.parametrize(
    ("busy", "hidden"), [(HERTZ, "1"), (HERTZ // 5 + 2, "1"), (HERTZ // 5 - 2, None), (0, None)]
)
def test_threads_that_cannot_be_seen(
    busy: int, hidden: str | None, inspection: Inspection, processes: Processes
) -> None:
    def meanwhile() -> None:
        set_cpu_times(inspection.proc, {0: (150 + HERTZ, 0), 1: (150 + busy, 0)})
        processes.set(10, cpu=0, ticks=HERTZ)

    set_cpu_times(inspection.proc, {0: (150, 0), 1: (150, 0)})
    processes.set(10, cpu=0, ticks=0)
    findings = check_intruders(inspection, *look(inspection, meanwhile)).findings
    seen = (
        f"{inspection.proc}/stat: CPUs 1 are busy, up to {busy / HERTZ:.0%}, with threads that can't be seen"
    )
    assert [(finding.severity, finding.seen.startswith(seen)) for finding in findings] == (
        [] if hidden is None else [(PROBLEM, True)]
    )


def test_a_thread_that_moved_is_not_an_unseen_one(inspection: Inspection, processes: Processes) -> None:
    def meanwhile() -> None:
        set_cpu_times(inspection.proc, {0: (150, 0), 1: (150 + HERTZ, 0)})
        processes.set(10, cpu=0, ticks=HERTZ)

    set_cpu_times(inspection.proc, {0: (150, 0), 1: (150, 0)})
    processes.set(10, cpu=1, ticks=0)
    assert check_intruders(inspection, *look(inspection, meanwhile)) == Report()


@pytest.mark.parametrize(("stolen", "fires"), [(HERTZ // 2, True), (1, False)])
def test_stolen_time(stolen: int, fires: bool, inspection: Inspection, processes: Processes) -> None:
    def meanwhile() -> None:
        set_cpu_times(inspection.proc, {0: (150, 9 * HERTZ), 2: (150, 7 + stolen)})

    set_cpu_times(inspection.proc, {0: (150, 0), 2: (150, 7)})
    processes.set(10, cpu=0, ticks=0)
    findings = check_intruders(inspection, *look(inspection, meanwhile)).findings
    assert [(finding.severity, finding.topic) for finding in findings] == [(HINT, "hypervisor")] * fires
    if fires:
        assert findings[0].seen == f"{inspection.proc}/stat: up to 50% of the time of CPUs 2 is stolen"


@pytest.mark.parametrize(("inode", "sees"), [("4026531836", True), ("4026532999", False)])
def test_pid_namespace(inode: str, sees: bool, inspection: Inspection, processes: Processes) -> None:
    processes.set(10, cpu=0, ticks=0)
    (inspection.proc / "self/ns").mkdir(parents=True)
    (inspection.proc / "self/ns/pid").symlink_to(f"pid:[{inode}]")
    assert sees_all_processes(inspection.proc) is sees
    report = check_intruders(inspection, *look(inspection, lambda: None))
    assert [what.startswith("processes outside of this container") for what in report.not_checked] == (
        [] if sees else [True]
    )


def test_no_threads_can_be_seen(inspection: Inspection) -> None:
    report = check_intruders(inspection, *look(inspection, lambda: None))
    assert report == Report(not_checked=[f"threads of others: {inspection.proc} shows none"])


# --- Interrupts


def set_interrupts(proc: Path, counts: dict[int, tuple[int, ...]], uptime: float = 1e6) -> None:
    cpus = range(8)
    lines = ["           " + "".join(f"CPU{cpu:<9}" for cpu in cpus)]
    for number, by_cpu in counts.items():
        padded = [*by_cpu, *[0] * 8][:8]
        lines.append(
            f"{number:>4}: {' '.join(map(str, padded))}  PCI-MSI-0000:00:01.0  0-edge   nvme0q{number}"
        )
    lines += [f" NMI: {' '.join(['9'] * 8)}   Non-maskable interrupts", " ERR:          0", " MIS: 0"]
    write(proc / "interrupts", "\n".join(lines))
    write(proc / "uptime", f"{uptime} 1.0")


def set_affinity(
    proc: Path, number: int, *, effective: str | None = None, allowed: str | None = None
) -> None:
    for name, cpus in {"effective_affinity_list": effective, "smp_affinity_list": allowed}.items():
        if cpus is not None:
            write(proc / f"irq/{number}" / name, cpus)


def test_interrupts(inspection: Inspection) -> None:
    def meanwhile() -> None:
        set_interrupts(proc, {30: (5, 2700, 40), 31: (9**9, 7, 0), 32: (0, 1600, 0), 33: (0, 3200, 0, 0, 0)})

    proc = inspection.proc
    set_interrupts(proc, {30: (5, 700, 40), 31: (0, 7, 0), 32: (0, 1500, 0), 33: (0, 200, 0)})
    set_affinity(proc, 30, effective="1", allowed="0-7")
    set_affinity(proc, 31, effective="0", allowed="0-7")
    set_affinity(proc, 32, allowed="1-2")
    set_affinity(proc, 33, effective="0", allowed="0-7")  # has been moved since
    before, after = look(inspection, meanwhile)
    assert find_interrupts((1, 2, 3), before, after, proc=proc) == (
        InterruptLoad(30, "PCI-MSI-0000:00:01.0 0-edge nvme0q30", (1, 2), 2740, 2000.0),
        InterruptLoad(32, "PCI-MSI-0000:00:01.0 0-edge nvme0q32", (1,), 1600, 100.0),
    )
    busy, frequent = check_interrupts(inspection, before, after).findings
    assert (busy.severity, frequent.severity) == (PROBLEM, HINT)
    assert busy.seen == (
        f"{proc}/interrupts: 30 (PCI-MSI-0000:00:01.0 0-edge nvme0q30): 2740 since boot on CPUs 1-2, "
        "2000 a second now"
    )
    assert busy.commands[0] == "for irq in 30; do echo 0,4 > /proc/irq/$irq/smp_affinity_list; done"
    assert len(busy.commands) == 2 and busy.commands[1].startswith("# ")


def test_interrupts_since_boot(inspection: Inspection) -> None:
    set_affinity(inspection.proc, 30, effective="3")
    for count, fires in ((1000, True), (999, False)):
        set_interrupts(inspection.proc, {30: (0, 0, 0, count)}, uptime=100.0)
        before, after = look(inspection, lambda: None)
        found = find_interrupts((1, 2, 3), before, after, proc=inspection.proc)
        assert [load.count for load in found] == [count] * fires


def test_an_interrupt_that_was_not_there_before(inspection: Inspection) -> None:
    """How often it comes isn't known then; since boot it is."""
    before, after = look(
        inspection, lambda: set_interrupts(inspection.proc, {30: (0, 5000), 31: (0, 20)}, uptime=100.0)
    )
    found = find_interrupts((1, 2, 3), before, after, proc=inspection.proc)
    assert [(load.number, load.per_second) for load in found] == [(30, 0.0)]


def test_irqbalance_would_move_them_back(inspection: Inspection, processes: Processes) -> None:
    processes.set(9, cpu=0, ticks=0, comm="irqbalance")
    set_interrupts(inspection.proc, {30: (0, 10**6)}, uptime=100.0)
    (finding,) = check_interrupts(inspection, *look(inspection, lambda: None)).findings
    assert finding.commands[1].startswith("echo IRQBALANCE_BANNED_CPULIST=1-3,5-7 >> /etc/default/irqbalance")
    assert finding.commands[2] == "# an old irqbalance knows IRQBALANCE_BANNED_CPUS=ee only"
    assert finding.commands[3] == "systemctl restart irqbalance"


def test_many_interrupts_are_folded(inspection: Inspection) -> None:
    set_interrupts(inspection.proc, dict.fromkeys(range(30, 60), (0, 10**6)), uptime=100.0)
    (finding,) = check_interrupts(inspection, *look(inspection, lambda: None)).findings
    assert finding.seen.count("nvme0q") == 8 and finding.seen.endswith("; 22 more")
    assert " 59; do" in finding.commands[0]


@pytest.mark.parametrize(
    "text", ["", "garbage", "CPU0\n 1: x chip dev", "CPU0 CPU1\n 1: 5", "\0", "CPU0\n:\n 5:\nNMI: 3"]
)
def test_damaged_interrupts(text: str, tmp_path: Path) -> None:
    write(tmp_path / "interrupts", text)
    assert read_interrupts(tmp_path) == {}
    write(tmp_path / "stat", text)
    assert read_cpu_times(tmp_path) == {}


def test_offline_cpus_have_no_column(tmp_path: Path) -> None:
    write(tmp_path / "interrupts", "   CPU0 CPU2\n 7: 3 4 chip 1-edge dev")
    (interrupt,) = read_interrupts(tmp_path).values()
    assert (interrupt.number, interrupt.device, interrupt.counts) == (7, "chip 1-edge dev", {0: 3, 2: 4})


def test_no_interrupts_can_be_seen(inspection: Inspection) -> None:
    report = check_interrupts(inspection, *look(inspection, lambda: None))
    assert report.findings == [] and report.not_checked[0].startswith("interrupts: ")
