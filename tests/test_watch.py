"""Intruders on the workers' CPUs are named: by made-up accounts, and by a real program."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import torch_numa_moe
from torch_numa_moe import runtime, watch
from torch_numa_moe.watch import Account, Glance, Watcher, suspicious_cpus

WORKERS = {501: 2, 502: 3}


def glance(
    seconds: float, busy: dict[int, float], ran: dict[int, tuple[float, float]], throttled: int = 0
) -> Glance:
    return Glance(seconds, busy, {cpu: Account(*account) for cpu, account in ran.items()}, throttled)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        # Workers alone.
        (glance(12, {2: 7.0, 3: 9.0}, {2: (2.0, 0), 3: (4.0, 0)}), {}),
        # Somebody used 0.1 of 2 s: less than a tenth. And 0.2 of them.
        (glance(12, {2: 7.1, 3: 9.0}, {2: (2.0, 0), 3: (4.0, 0)}), {}),
        (glance(12, {2: 7.2, 3: 9.0}, {2: (2.0, 0), 3: (4.0, 0)}), {2: 0.0}),
        # A worker that was ready for 0.3 s and didn't run.
        (glance(12, {2: 7.0, 3: 9.0}, {2: (2.0, 0), 3: (4.0, 0.3)}), {3: 0.15}),
        # The same, but the quota stopped it.
        (glance(12, {2: 7.0, 3: 9.0}, {2: (2.0, 0), 3: (4.0, 0.3)}, throttled=1), {}),
        # No time has passed; a worker's account, or a CPU, is gone.
        (glance(10, {2: 9.0, 3: 9.0}, {2: (1.0, 0), 3: (2.0, 0)}), {}),
        (glance(12, {2: 9.0, 3: 9.0}, {3: (4.0, 0)}), {}),
        (glance(12, {2: 7.0}, {2: (2.0, 0), 3: (2.0, 0)}), {}),
    ],
)
def test_cpus_that_others_used(after: Glance, expected: dict[int, float]) -> None:
    before = glance(10, {2: 6.0, 3: 7.0}, {2: (1.0, 0), 3: (2.0, 0)})
    assert suspicious_cpus(before, after) == pytest.approx(expected)


class MadeUpMachine:
    """Writes /proc for a watcher, whose waits move its time on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0
        self.ticks = os.sysconf("SC_CLK_TCK")
        self.ran = dict.fromkeys(WORKERS.values(), 0.0)
        self.waited = dict.fromkeys(WORKERS.values(), 0.0)
        self.threads: dict[int, tuple[int, str, int, float, float]] = {}  # tid: pid, name, CPU, share, used
        self.last = 5.0
        self.cost = 0.0
        self.throttled = 0
        self.write()

    def add(self, tid: int, pid: int, name: str, cpu: int, share: float) -> None:
        self.threads[tid] = (pid, name, cpu, share, 0.0)

    def wait(self, seconds: float) -> bool:
        self.seconds += seconds
        for tid, (pid, name, cpu, share, used) in self.threads.items():
            self.threads[tid] = (pid, name, cpu, share, used + share * seconds)
        self.write()
        return self.seconds > self.last

    def write(self) -> None:
        self.folder.mkdir(exist_ok=True)
        lines = []
        for cpu in range(4):
            used = sum(thread[4] for thread in self.threads.values() if thread[2] == cpu)
            lines.append(f"cpu{cpu} {round((used + self.ran.get(cpu, 0)) * self.ticks)} 0 0 0 0 0 0 0 0 0")
        (self.folder / "stat").write_text("\n".join(lines))
        for tid, cpu in WORKERS.items():
            task = self.folder / f"self/task/{tid}"
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"{int(self.ran[cpu] * 1e9)} {int(self.waited[cpu] * 1e9)} 1")
        for tid, (pid, name, cpu, _, used) in self.threads.items():
            task = self.folder / f"{pid}/task/{tid}"
            task.mkdir(parents=True, exist_ok=True)
            fields = ["0"] * 50
            fields[13], fields[38] = str(round(used * self.ticks)), str(cpu)
            (task / "stat").write_text(f"{tid} ({name}) R " + " ".join(fields[3:]))
        (self.folder / "cpu.stat").write_text(f"nr_periods 9\nnr_throttled {self.throttled}\n")

    def watcher(self, quota: bool = False) -> Watcher:
        return Watcher(
            WORKERS,
            (0, 1),
            str(self.folder / "cpu.max") if quota else "",
            proc=self.folder,
            wait=self.wait,
            clock=lambda: self.seconds,
            own_time=lambda: self.cost,
        )


@pytest.fixture
def machine(tmp_path: Path) -> MadeUpMachine:
    return MadeUpMachine(tmp_path / "proc")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "torch_numa_moe")
    return lambda: [record.getMessage() for record in caplog.records]


def test_an_intruder_is_named_once(machine: MadeUpMachine, lines: Any) -> None:
    machine.add(900, 900, "busy (1) loop", 2, 1.0)
    machine.watcher().run()
    (line,) = lines()
    assert line == (
        "process 900 (busy (1) loop) uses up to 100% of CPUs 2, where workers run, and all workers wait for "
        "the slowest: taskset -apc 0-1 900, or see python -m torch_numa_moe doctor --fence"
    )


def test_threads_of_a_process_are_told_together(machine: MadeUpMachine, lines: Any) -> None:
    machine.add(901, 900, "one", 2, 0.3)
    machine.add(902, 900, "two", 3, 0.5)
    machine.watcher().run()
    (line,) = lines()
    assert line.startswith("process 900 (one, two) uses up to 50% of CPUs 2-3,")


@pytest.mark.parametrize(("cpu", "share"), [(1, 1.0), (2, 0.05)])
def test_others_are_not_told(machine: MadeUpMachine, lines: Any, cpu: int, share: float) -> None:
    """Off the workers' CPUs, or hardly there."""
    machine.add(900, 900, "elsewhere", cpu, share)
    machine.watcher().run()
    assert lines() == []


@pytest.mark.parametrize("waiting", [False, True])
def test_own_threads_are_told_if_workers_wait_for_them(
    machine: MadeUpMachine, lines: Any, waiting: bool
) -> None:
    machine.add(900, os.getpid(), "python", 2, 0.5)
    wait = machine.wait

    def wait_with_delay(seconds: float) -> bool:
        machine.waited[2] += 0.2 * seconds * waiting
        return wait(seconds)

    machine.wait = wait_with_delay  # type: ignore[method-assign]
    machine.watcher().run()
    assert len(lines()) == waiting
    if waiting:
        assert lines()[0].startswith(
            "threads of this process (python) use up to 50% of CPUs 2, where workers"
        )
        assert "(CPUs 0-1)" in lines()[0]


def test_an_intruder_that_comes_back_is_told_again(machine: MadeUpMachine, lines: Any) -> None:
    machine.last = 60
    wait = machine.wait

    def wait_and_come_and_go(seconds: float) -> bool:
        machine.threads.clear()
        if machine.seconds < 5 or machine.seconds > 40:
            machine.add(900, 900, "visitor", 2, 0.0)
            machine.threads[900] = (900, "visitor", 2, 1.0, machine.seconds)
        return wait(seconds)

    machine.wait = wait_and_come_and_go  # type: ignore[method-assign]
    machine.watcher().run()
    assert len(lines()) == 2


def test_a_quota_is_told_apart(machine: MadeUpMachine, lines: Any) -> None:
    wait = machine.wait

    def wait_throttled(seconds: float) -> bool:
        machine.waited[2] += 0.5 * seconds
        machine.throttled += 3
        return wait(seconds)

    machine.wait = wait_throttled  # type: ignore[method-assign]
    machine.watcher(quota=True).run()
    (line,) = lines()
    assert line.startswith(f"the CPU quota ({machine.folder / 'cpu.max'}) stops the pool's threads")


def test_looking_closely_stays_within_its_cost(
    machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs 0.1 s here. Seen to fail with: the credit not charged."""
    machine.last = 1000
    machine.add(900, 900, "busy", 2, 1.0)
    looks = 0
    read_threads = watch.read_threads

    def expensive(proc: Path) -> Any:
        nonlocal looks
        looks += 1
        machine.cost += 0.05
        return read_threads(proc)

    monkeypatch.setattr(watch, "read_threads", expensive)
    machine.watcher().run()
    # 1000 s allow 1 s, and what there is at the start 0.06: ten looks of 0.1, and one that overdraws.
    assert 8 <= looks / 2 <= 12


def test_nothing_that_can_be_read() -> None:
    """A /proc that shows nothing: no lines, no exception."""
    left = iter([False, False, True])
    Watcher(WORKERS, (), proc="/nowhere", wait=lambda _: next(left)).run()


PROGRAM = "import os\nos.sched_setaffinity(0, [{cpu}])\nprint('here', flush=True)\nwhile True: pass"


@pytest.mark.usefixtures("fresh_runtime")
def test_a_real_program_is_named_in_two_seconds(lines: Any) -> None:
    plan = torch_numa_moe.configure(watch=True)
    cpus = [cpu for group in plan.groups for cpu in group.worker_cpus if cpu >= 0]
    if not cpus:
        pytest.skip("no worker has a CPU of its own")
    runtime.ensure_started()
    program = PROGRAM.format(cpu=cpus[-1])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            end = time.monotonic() + 30  # for machines that do much else
            found: list[str] = []
            while not found and time.monotonic() < end:
                time.sleep(0.05)
                found = [line for line in lines() if line.startswith(f"process {process.pid} (")]
        finally:
            process.kill()
    assert len(found) == 1


@pytest.mark.usefixtures("fresh_runtime")
def test_the_thread_comes_and_goes_with_the_pool() -> None:
    def watching() -> int:
        return sum(thread.name == "numa_moe/watch" for thread in threading.enumerate())

    plan = torch_numa_moe.configure(watch=True)
    pinned = any(cpu >= 0 for group in plan.groups for cpu in group.worker_cpus)
    assert watching() == 0 or runtime._running is not None
    runtime.ensure_started()
    assert watching() == pinned
    torch_numa_moe.configure(spin_us=10)
    assert watching() == pinned
    child = os.fork()
    if child == 0:
        os._exit(watching())  # the child has no such thread until it starts a pool
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch_numa_moe.configure(watch=False)
    assert watching() == 0
    torch_numa_moe.configure(watch=True)
    torch_numa_moe.stop()
    assert watching() == 0
