"""The threads of the machine, as /proc tells: where they ran last, and how long.

Nothing is printed or logged here.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe.sysfs import parse_list, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

LOWEST_SHARE = 0.02
"""Threads that used less of a CPU's time than this aren't intruders, unless the caller asks for less. Kernel
threads that run for moments stay below it; a sample of a second is exact to one clock tick, 0.01."""

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, of include/linux/sched.h
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, of include/linux/proc_ns.h


@dataclass(frozen=True)
class Thread:
    """A thread at one moment.

    Attributes:
        pid: its process.
        tid: its own number.
        comm: its name, with characters that can't be printed replaced.
        cpu: the CPU that it ran on last.
        ticks: CPU time used so far, in clock ticks.
        started: when it started, in clock ticks since boot: tells it from a later one with the same number.
        kernel: whether it is a thread of the kernel.
    """

    pid: int
    tid: int
    comm: str
    cpu: int
    ticks: int
    started: int
    kernel: bool


@dataclass(frozen=True)
class Intruder:
    """A thread that ran on one of the CPUs that were looked at.

    Attributes:
        pid: its process.
        tid: its own number.
        comm: its name.
        cpu: the CPU that it ran on last.
        share: CPU time that it used, per time: 1.0 is all of a CPU. If it moved meanwhile, part of that was
            on other CPUs.
        own: whether it belongs to the process that asks.
        kernel: whether it is a thread of the kernel.
    """

    pid: int
    tid: int
    comm: str
    cpu: int
    share: float
    own: bool
    kernel: bool


@dataclass(frozen=True)
class PinnedThread:
    """A thread that may run on nothing but CPUs that were looked at, busy or not.

    Attributes:
        pid: its process.
        tid: its own number.
        comm: its name.
        cpus: the CPUs that it may run on.
        own: whether it belongs to the process that asks.
    """

    pid: int
    tid: int
    comm: str
    cpus: tuple[int, ...]
    own: bool


def read_threads(proc: str | Path = "/proc") -> dict[int, Thread]:
    """All threads that can be seen, by their number. Never raises; those that end meanwhile are left out."""
    threads = {}
    for pid, tid in _thread_numbers(Path(proc)):
        thread = _read_thread(Path(proc), pid, tid)
        if thread is not None:
            threads[tid] = thread
    return threads


def _numbers(folder: str | Path) -> Iterator[int]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return
    yield from (int(name) for name in names if name.isdecimal())


def _thread_numbers(proc: Path) -> Iterator[tuple[int, int]]:
    for pid in _numbers(proc):
        for tid in _numbers(f"{proc}/{pid}/task"):
            yield pid, tid


def _read_thread(proc: Path, pid: int, tid: int) -> Thread | None:
    # See proc_pid_stat(5). The name stands in parentheses and may hold some, and spaces.
    head, _, tail = (read_text(proc / f"{pid}/task/{tid}/stat") or "").rpartition(")")
    fields = tail.split()  # from the third one on: the state
    if len(fields) < 37:
        return None
    try:
        flags, user, system, started, cpu = (int(fields[index - 3]) for index in (9, 14, 15, 22, 39))
    except ValueError:
        return None
    comm = re.sub(r"[^ -~]", "?", head.partition("(")[2])
    return Thread(pid, tid, comm, cpu, user + system, started, bool(flags & _KERNEL_THREAD))


def compare_threads(
    before: Mapping[int, Thread],
    after: Mapping[int, Thread],
    seconds: float,
    cpus: Collection[int],
    *,
    ignore: Collection[int] = (),
    lowest_share: float = LOWEST_SHARE,
    own_pid: int | None = None,
) -> tuple[Intruder, ...]:
    """The threads that ran on some CPUs between two samples, the busiest first.

    Args:
        before: the first sample.
        after: the second one.
        seconds: the time between them.
        cpus: the CPUs that matter.
        ignore: thread numbers that belong there: the pool's workers.
        lowest_share: CPU time per time below which a thread is left out.
        own_pid: the process that asks; ``os.getpid()`` if None.
    """
    own_pid = os.getpid() if own_pid is None else own_pid
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    found = []
    for tid, thread in after.items():
        if thread.cpu not in cpus or tid in ignore or seconds <= 0:
            continue
        earlier = before.get(tid)
        used = thread.ticks
        if earlier is not None and earlier.started == thread.started:
            used -= earlier.ticks
        share = used / ticks_per_second / seconds
        if used > 0 and share >= lowest_share:
            own = thread.pid == own_pid
            found.append(Intruder(thread.pid, tid, thread.comm, thread.cpu, share, own, thread.kernel))
    return tuple(sorted(found, key=lambda intruder: (-intruder.share, intruder.tid)))


def find_intruders(
    cpus: Collection[int],
    *,
    proc: str | Path = "/proc",
    interval_seconds: float = 1.0,
    ignore: Collection[int] = (),
    lowest_share: float = LOWEST_SHARE,
    own_pid: int | None = None,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Intruder, ...]:
    """Watches some CPUs for a while: the threads that ran there, the busiest first.

    Never raises. Sees what this process's PID namespace shows (:func:`sees_all_processes`).

    Args:
        cpus: the CPUs that matter.
        proc: where procfs is.
        interval_seconds: how long to watch. CPU time is counted in clock ticks, of 10 ms mostly.
        ignore: thread numbers that belong there: the pool's workers.
        lowest_share: CPU time per time below which a thread is left out.
        own_pid: the process that asks; ``os.getpid()`` if None.
        sleep: what waits; it gets the seconds.
        clock: what tells the time in seconds.
    """
    begin, before = clock(), read_threads(proc)
    sleep(interval_seconds)
    seconds, after = clock() - begin, read_threads(proc)
    return compare_threads(
        before, after, seconds, cpus, ignore=ignore, lowest_share=lowest_share, own_pid=own_pid
    )


def find_pinned_threads(
    cpus: Collection[int],
    *,
    proc: str | Path = "/proc",
    ignore: Collection[int] = (),
    own_pid: int | None = None,
) -> tuple[PinnedThread, ...]:
    """The threads that may run on nothing but some CPUs, the kernel's own left out; by process and thread.

    Args:
        cpus: the CPUs that matter.
        proc: where procfs is.
        ignore: thread numbers that belong there: the pool's workers.
        own_pid: the process that asks; ``os.getpid()`` if None.
    """
    own_pid = os.getpid() if own_pid is None else own_pid
    wanted = set(cpus)
    found = []
    for pid, tid in _thread_numbers(Path(proc)):
        if tid in ignore:
            continue
        for line in (read_text(Path(proc) / f"{pid}/task/{tid}/status") or "").splitlines():
            name, _, value = line.partition(":")
            if name != "Cpus_allowed_list":
                continue
            allowed = parse_list(value)
            thread = _read_thread(Path(proc), pid, tid) if allowed and wanted.issuperset(allowed) else None
            if allowed and thread is not None and not thread.kernel:
                found.append(PinnedThread(pid, tid, thread.comm, tuple(allowed), pid == own_pid))
    return tuple(sorted(found, key=lambda thread: (thread.pid, thread.tid)))


def sees_all_processes(proc: str | Path = "/proc") -> bool | None:
    """Whether this process's PID namespace is the machine's; None if that can't be told."""
    try:
        namespace = str((Path(proc) / "self/ns/pid").readlink())
    except OSError:
        return None
    return namespace == _INITIAL_PID_NAMESPACE
