"""Reads what the pool's threads have counted."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe import _C
from torch_numa_moe.statistics.durations import Durations
from torch_numa_moe.statistics.snapshot import Share, Statistics, WorkerStatistics
from torch_numa_moe.sysfs import read_text
from torch_numa_moe.watch import read_account

if TYPE_CHECKING:
    from torch_numa_moe.packing import PackedExperts

OTHERS = "others"

COUNTERS = (
    *("dispatches", "dispatcher_spins", "dispatcher_yields", "dispatcher_parks", "worker_parks"),
    *("wakes_sent", "wakes_skipped", "late_tasks", "late_tasks_won"),
)

_packed: weakref.WeakSet[PackedExperts] = weakref.WeakSet()
_packed_lock = threading.Lock()  # a model may be packed while another thread reads statistics


def remember(experts: PackedExperts) -> None:
    """Has statistics of these experts go by their name, for as long as they exist."""
    with _packed_lock:
        _packed.add(experts)


def stats() -> Statistics:
    """What the pool has done since it started, by worker and by layer.

    Counting is always on; reading it stops nobody. ``print(torch_numa_moe.stats())`` shows tables,
    :meth:`Statistics.plot` draws them, and ``later.since(earlier)`` tells what came between two moments. A
    call is counted for a worker when the worker comes to the next one. Empty when no pool is running.
    """
    from torch_numa_moe import runtime

    running = runtime.running()
    if running is None:
        return Statistics(0.0)
    plan = running.plan
    names = _site_names()
    by_thread: dict[int, dict[str, Share]] = defaultdict(dict)
    times: dict[str, Durations] = {}
    for counted in sorted(_C.statistics(), key=lambda counted: counted.site):
        name = names.get(counted.site, OTHERS if counted.site == _C.MOST_SITES - 1 else f"{counted.site}")
        durations = Durations(counted.counts, counted.max_ns)
        if counted.thread < 0:
            times[name] = durations
        else:
            by_thread[counted.thread][name] = Share(
                counted.tasks, counted.late_tasks, counted.busy_ns / 1e9, durations
            )
    workers = []
    positions: dict[int, int] = defaultdict(int)
    for thread, state in enumerate(_C.workers()):
        name = f"numa_moe/{state.group}.{positions[state.group]}"
        positions[state.group] += 1
        node = plan.groups[state.group].node if state.group < len(plan.groups) else None
        account = read_account(Path("/proc"), state.thread_id)
        delay = None if account is None else account.waited
        preempted = _preempted(Path(f"/proc/self/task/{state.thread_id}"))
        cpu = state.requested_cpu if state.pinned else None
        workers.append(
            WorkerStatistics(name, node, cpu, state.thread_id, by_thread[thread], delay, preempted)
        )
    if plan.caller_helps:
        node = plan.groups[0].node
        workers.append(WorkerStatistics("calling thread", node, None, None, by_thread[len(workers)]))
    counters = _C.counters()
    return Statistics(
        time.monotonic() - running.started,
        tuple(workers),
        times,
        {name: int(getattr(counters, name)) for name in COUNTERS},
    )


def _site_names() -> dict[int, str]:
    """By site; unique."""
    with _packed_lock:
        packed = list(_packed)
    by_address = {experts.gate_up_proj.data_ptr(): experts.name for experts in packed if experts.name}
    names: dict[int, str] = {}
    for site, address in enumerate(_C.sites()):
        name = by_address.get(address) or f"experts {site}"
        names[site] = name if name not in names.values() else f"{name} ({site})"
    return names


def _preempted(task: Path) -> int | None:
    """A thread's involuntary switches, as in proc(5)."""
    for line in (read_text(task / "status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "nonvoluntary_ctxt_switches" and value.strip().isdecimal():
            return int(value)
    return None
