"""Notices other programs on the workers' CPUs while the pool is up, and names them.

A thread looks once a second, from a CPU without a worker. A glance at /proc/stat and at the workers' own
accounts tells whether anybody else used their CPUs; only then are all threads of the machine read, twice, to
find out who. What is found is logged once, and again when it has been away for a while. ``NUMA_MOE_WATCH=0``
turns it off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch_numa_moe.doctor.sampling import read_cpu_times
from torch_numa_moe.doctor.threads import Intruder, compare_threads, read_threads
from torch_numa_moe.sysfs import format_list, read_text

if TYPE_CHECKING:
    from torch_numa_moe.plan import Plan

logger = logging.getLogger("torch_numa_moe")

INTERVAL_SECONDS = 1.0
"""Between two glances."""

LOOK_SECONDS = 0.3
"""How long threads are watched to find out which one it is: thirty clock ticks."""

BUSY_SHARE = 0.1
"""Share of a worker's CPU that somebody else uses from which on it is told."""

WAITING_SHARE = 0.05
"""Share of the time that a worker is ready to run and doesn't from which on threads of the pool's own process
are told: they may well use a worker's CPU while it sleeps."""

AWAY_GLANCES = 10
"""An intruder that comes back after so many glances without one is told again."""

COST_SHARE = 0.001
"""Most CPU time per time that watching may take."""

COST_RESERVE_SECONDS = 0.06
"""CPU time that may be saved up, and is there at the start: what a minute allows."""


class Account(NamedTuple):
    """A thread's time so far, in seconds: on a CPU, and ready to run but waiting for one."""

    ran: float
    waited: float


@dataclass(frozen=True)
class Glance:
    """What is read every second.

    Attributes:
        seconds: when, on a clock that only goes forward.
        busy: by CPU, seconds that threads ran there.
        workers: by CPU, the account of the worker that is pinned to it.
        throttled: how often the CPU quota stopped the process, or 0.
    """

    seconds: float
    busy: dict[int, float]
    workers: dict[int, Account]
    throttled: int = 0


def read_account(proc: Path, tid: int) -> Account | None:
    """The account of a thread of this process, or None if the kernel doesn't tell; see proc_pid_schedstat."""
    words = (read_text(proc / f"self/task/{tid}/schedstat") or "").split()
    if len(words) < 2 or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    return Account(int(words[0]) / 1e9, int(words[1]) / 1e9)


def suspicious_cpus(before: Glance, after: Glance) -> dict[int, float]:
    """Workers' CPUs that others used, and for each the share of the time that its worker waited there."""
    seconds = after.seconds - before.seconds
    if seconds <= 0:
        return {}
    found = {}
    for cpu, account in after.workers.items():
        earlier = before.workers.get(cpu)
        if earlier is None or cpu not in before.busy or cpu not in after.busy:
            continue
        others = (after.busy[cpu] - before.busy[cpu] - (account.ran - earlier.ran)) / seconds
        # A quota makes workers wait as well.
        waited = 0.0 if after.throttled != before.throttled else (account.waited - earlier.waited) / seconds
        if others >= BUSY_SHARE or waited >= WAITING_SHARE:
            found[cpu] = waited
    return found


class Watcher:
    """Looks at the workers' CPUs, and logs who else is there.

    Args:
        workers: the CPU of each pinned worker, by its thread number.
        other_cpus: CPUs that the process may use and that have no worker.
        quota_source: the file of the CPU quota that holds, or "".
        proc: where procfs is.
        wait: waits for some seconds; returns True when the watch is to end.
        clock: tells the time in seconds.
        own_time: tells the CPU time that the calling thread has used, in seconds.
    """

    def __init__(
        self,
        workers: Mapping[int, int],
        other_cpus: Collection[int],
        quota_source: str = "",
        *,
        proc: str | Path = "/proc",
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
        own_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._workers = dict(workers)
        self._other_cpus = tuple(other_cpus)
        self._quota_source = quota_source
        self._proc = Path(proc)
        self._wait = wait
        self._clock = clock
        self._own_time = own_time
        self._credit = COST_RESERVE_SECONDS
        self._told: dict[int, int] = {}  # process: glances since it was last seen
        self._told_of_quota = False

    def run(self) -> None:
        """Looks until the wait says that it is over. Never raises."""
        before, spent = self.glance(), self._own_time()
        while not self._wait(INTERVAL_SECONDS):
            after = self.glance()
            self._compare(before, after)
            now = self._own_time()
            self._credit += COST_SHARE * (after.seconds - before.seconds) - (now - spent)
            self._credit = min(self._credit, COST_RESERVE_SECONDS)
            before, spent = after, now

    def glance(self) -> Glance:
        """Reads what is read every second."""
        ticks_per_second = os.sysconf("SC_CLK_TCK")
        busy = {cpu: times.threads / ticks_per_second for cpu, times in read_cpu_times(self._proc).items()}
        accounts = {cpu: read_account(self._proc, tid) for tid, cpu in self._workers.items()}
        known = {cpu: account for cpu, account in accounts.items() if account is not None}
        return Glance(self._clock(), busy, known, self._read_throttled())

    def _read_throttled(self) -> int:
        if not self._quota_source:
            return 0
        for line in (read_text(Path(self._quota_source).parent / "cpu.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "nr_throttled" and value.isdecimal():
                return int(value)
        return 0

    def _compare(self, before: Glance, after: Glance) -> None:
        if after.throttled > before.throttled and not self._told_of_quota:
            self._told_of_quota = True
            logger.warning(
                "the CPU quota (%s) stops the pool's threads, all at once, until its next period: no other "
                "program is to blame",
                self._quota_source,
            )
        self._told = {pid: glances + 1 for pid, glances in self._told.items() if glances < AWAY_GLANCES}
        cpus = suspicious_cpus(before, after)
        # Reading all threads of a large machine takes a while: not more often than the cost allows.
        if cpus and self._credit > 0:
            self._look(cpus)

    def _look(self, cpus: Mapping[int, float]) -> None:
        begin, before = self._clock(), read_threads(self._proc)
        if self._wait(LOOK_SECONDS):
            return
        seconds, after = self._clock() - begin, read_threads(self._proc)
        ignore = {*self._workers, threading.get_native_id()}
        found = compare_threads(before, after, seconds, cpus, ignore=ignore, lowest_share=BUSY_SHARE)
        by_process: dict[int, list[Intruder]] = defaultdict(list)
        for intruder in found:
            if not intruder.kernel and (not intruder.own or cpus[intruder.cpu] >= WAITING_SHARE):
                by_process[intruder.pid].append(intruder)
        for pid, threads in by_process.items():
            if pid not in self._told:
                self._tell(pid, threads)
            self._told[pid] = 0

    def _tell(self, pid: int, threads: list[Intruder]) -> None:
        names = ", ".join(sorted({thread.comm for thread in threads}))
        where = f"up to {threads[0].share:.0%} of CPUs {format_list({thread.cpu for thread in threads})}"
        left = format_list(self._other_cpus) if self._other_cpus else ""
        if threads[0].own:
            logger.warning(
                "threads of this process (%s) use %s, where workers have to wait for them: let them run "
                "elsewhere%s, or be fewer (torch.set_num_threads, OMP_NUM_THREADS)",
                names,
                where,
                f" (CPUs {left})" if left else "",
            )
            return
        advice = f"taskset -apc {left} {pid}" if left else "NUMA_MOE_WORKERS with fewer leaves CPUs to others"
        logger.warning(
            "process %d (%s) uses %s, where workers run, and all workers wait for the slowest: %s, or see "
            "python -m torch_numa_moe doctor --fence",
            pid,
            names,
            where,
            advice,
        )


class Watch:
    """The thread that watches, from its start to :meth:`stop`."""

    def __init__(self, workers: Mapping[int, int], plan: Plan) -> None:
        allowed = set(plan.limits.cpus or ())
        others = tuple(sorted(allowed - set(workers.values())))
        self._over = threading.Event()
        self._cpus = others
        self._watcher = Watcher(workers, others, plan.limits.cpu_quota_source, wait=self._over.wait)
        self._thread = threading.Thread(target=self._run, name="numa_moe/watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)  # of this thread alone
        self._watcher.run()

    def stop(self) -> None:
        """Ends the thread; returns when it has ended, or at once when called from a child of a fork."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
