"""Starts and stops the process-wide worker pool according to the plan."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch_numa_moe import _C
from torch_numa_moe.limits import read_limits
from torch_numa_moe.plan import Plan, make_plan
from torch_numa_moe.room import RoomShortage, ShortageLog, find_shortages
from torch_numa_moe.settings import Settings, override, read_settings
from torch_numa_moe.statistics import stats
from torch_numa_moe.statistics.server import StatisticsServer
from torch_numa_moe.topology import read_topology
from torch_numa_moe.watch import Watch

logger = logging.getLogger("torch_numa_moe")


@dataclass(frozen=True)
class RunningRuntime:
    """The pool that is running.

    Attributes:
        plan: what it was started from.
        nodes: per slice, the NUMA node of new packed experts, or None if they may lie anywhere.
        instruction_set: the kernels in use.
        started: when, on the monotonic clock, in seconds.
    """

    plan: Plan
    nodes: tuple[int | None, ...]
    instruction_set: str
    started: float


_EXIT_GRACE_SECONDS = 0.02

_lock = threading.RLock()
_settings: Settings | None = None  # None: from the environment
_running: RunningRuntime | None = None
_watch: Watch | None = None
_server: StatisticsServer | None = None
_shortages = ShortageLog()


def _forget_after_fork() -> None:
    # The child has no worker threads (the C++ side has let go of them) and may have been forked while
    # another thread held the lock.
    global _lock, _running, _watch, _server
    _lock = threading.RLock()
    _running = None
    _watch = None
    if _server is not None:
        _server.forget()
    _server = None


os.register_at_fork(after_in_child=_forget_after_fork)


def _begin_exit() -> None:
    # From here on calls on daemon threads don't return (csrc/ops/exit_guard.h). Those that have just
    # returned get the interpreter for a moment, to make their next call or to end.
    _C.begin_process_exit()
    _stop_watch()
    if threading.active_count() > 1:
        time.sleep(_EXIT_GRACE_SECONDS)


atexit.register(_begin_exit)


def current_settings() -> Settings:
    """The settings in force: those of :func:`configure`, else of the environment."""
    return _settings if _settings is not None else read_settings()


def plan(weight_bytes: int | None = None) -> Plan:
    """What the pool is, or would be, started with: groups, workers, slices and the reasons.

    Allocates and starts nothing. ``print(torch_numa_moe.plan())`` shows it.

    Args:
        weight_bytes: size of the packed weights to be placed, in bytes, if the plan is to say whether the
            nodes have room for them: a node that could never hold its share rules the split out.

    Raises:
        ValueError: if weight_bytes is negative.
    """
    if weight_bytes is not None and weight_bytes < 0:
        raise ValueError(f"weight_bytes must be at least 0, got {weight_bytes}")
    with _lock:
        if _running is not None and weight_bytes is None:
            return _running.plan
        return _make_plan(current_settings(), weight_bytes)


def _make_plan(settings: Settings, weight_bytes: int | None = None) -> Plan:
    return make_plan(read_topology(), read_limits(), settings, weight_bytes=weight_bytes)


def huge_pages() -> _C.HugePages:
    """The kind of pages that weights are to lie in: explicit ones as far as the user reserved some."""
    kinds = {
        "explicit": _C.HugePages.EXPLICIT,
        "transparent": _C.HugePages.TRANSPARENT,
        "none": _C.HugePages.NONE,
    }
    return kinds[current_settings().huge_pages or "explicit"]


def huge_pages_wanted() -> bool:
    """Whether anybody would want to know that there are none."""
    return current_settings().huge_pages != "none"


def check_room(slice_bytes: Sequence[int]) -> list[RoomShortage]:
    """Warns, once each, of nodes and limits that lack room for slices yet to be placed.

    Args:
        slice_bytes: per slice of the running pool, bytes yet to be placed.
    """
    running = ensure_started()
    shortages = find_shortages(slice_bytes, running.nodes, read_topology(), read_limits())
    _shortages.log(shortages)
    return shortages


def configure(
    *,
    split: str | bool | None = None,
    workers: int | None = None,
    spin_us: int | None = None,
    dispatcher_yields: int | None = None,
    isa: str | None = None,
    huge_pages: str | None = None,
    watch: bool | None = None,
    sched: str | None = None,
) -> Plan:
    """Sets from code what the ``NUMA_MOE_*`` variables set, and restarts a running pool with it.

    Arguments left out keep what the environment (or an earlier call) says. Packed experts keep their
    slices: pack again after changing ``split``.

    Args:
        split: ``"0"``/False, ``"1"``/True, ``"test"`` or ``"test:N"`` (``NUMA_MOE_SPLIT``).
        workers: number of pinned workers (``NUMA_MOE_WORKERS``).
        spin_us: how long an idle worker spins before it sleeps, in microseconds (``NUMA_MOE_SPIN_US``).
        dispatcher_yields: how often a waiting call yields before it sleeps (``NUMA_MOE_DISPATCHER_YIELDS``).
        isa: highest instruction set to use (``NUMA_MOE_ISA``).
        huge_pages: ``"explicit"``, ``"transparent"`` or ``"none"``, for weights packed from now on
            (``NUMA_MOE_HUGE_PAGES``).
        watch: whether to look for other programs on the workers' CPUs, and log who they are; and to answer
            ``python -m torch_numa_moe top`` (``NUMA_MOE_WATCH``).
        sched: ``"normal"``, ``"fifo"`` or ``"rr"``: whether workers go before other programs on their CPUs
            (``NUMA_MOE_SCHED``).

    Returns:
        The plan now in force.

    Raises:
        ValueError, TypeError: naming the argument, what it was and what is accepted.
    """
    global _settings
    if isinstance(split, bool):
        split = "1" if split else "0"
    with _lock:
        settings = override(
            current_settings(),
            split=split,
            workers=workers,
            spin_us=spin_us,
            dispatcher_yields=dispatcher_yields,
            isa=isa,
            huge_pages=huge_pages,
            watch=watch,
            sched=sched,
        )
        _choose_instruction_set(settings)
        _settings = settings
        if _running is not None:
            _start()
        return plan()


def ensure_started() -> RunningRuntime:
    """Starts the pool if it isn't running, and tells what is running."""
    with _lock:
        if _running is None or not _C.is_running():
            _start()
        assert _running is not None
        return _running


def running() -> RunningRuntime | None:
    """What is running, or None."""
    with _lock:
        return _running if _C.is_running() else None


def stop() -> None:
    """Stops the pool: its threads end when running calls have. The next call starts it again."""
    global _running
    with _lock:
        _stop_watch()
        _running = None
        _C.stop()


def _choose_instruction_set(settings: Settings) -> str:
    """The best supported instruction set, not above the cap of NUMA_MOE_ISA."""
    supported = _C.supported_instruction_sets()
    if settings.isa is None:
        return str(supported[-1])
    order = _C.instruction_set_names()
    allowed = [name for name in supported if order.index(name) <= order.index(settings.isa)]
    if settings.isa not in supported:
        logger.warning(
            "NUMA_MOE_ISA=%s is not what this CPU offers (%s): using %s",
            settings.isa,
            ", ".join(supported),
            allowed[-1],
        )
    return str(allowed[-1])


def _stop_watch() -> None:
    global _watch, _server
    watch, _watch = _watch, None
    if watch is not None:
        watch.stop()
    server, _server = _server, None
    if server is not None:
        server.stop()


def _start_watch(settings: Settings, chosen: Plan) -> None:
    """Of workers with CPUs of their own, which somebody else may come to; and tells ``top`` about all."""
    global _watch, _server
    if settings.watch is False:
        return
    try:
        _server = StatisticsServer(lambda: stats().to_json())
    except OSError as error:
        logger.info("`python -m torch_numa_moe top` can't ask this process: %s", error)
    workers = {worker.thread_id: worker.requested_cpu for worker in _C.workers() if worker.pinned}
    if workers:
        _watch = Watch(workers, chosen)


def _start() -> None:
    global _running
    _stop_watch()
    settings = current_settings()
    instruction_set = _choose_instruction_set(settings)
    chosen = _make_plan(settings)
    _start_pool(chosen, instruction_set)
    unpinnable = _why_unpinned()
    if unpinnable is not None:
        # Success is what the kernel reads back. Workers that wander can't be said to work on a node.
        chosen = make_plan(chosen.topology, chosen.limits, settings, unpinnable=unpinnable)
        _start_pool(chosen, instruction_set)
    for level, line in chosen.log_lines:
        logger.log(level, "%s", line)
    if chosen.scheduling != "normal":
        _log_scheduling(chosen.scheduling)
    nodes = tuple(group.node for group in chosen.groups)
    _running = RunningRuntime(chosen, nodes, instruction_set, time.monotonic())
    _start_watch(settings, chosen)


_SCHEDULING = {"normal": _C.Scheduling.NORMAL, "fifo": _C.Scheduling.FIFO, "rr": _C.Scheduling.RR}


def pool_options(chosen: Plan) -> _C.PoolOptions:
    """The plan as the pool takes it."""
    options = _C.PoolOptions()
    options.cpus_per_group = [list(group.worker_cpus) for group in chosen.groups]
    options.caller_helps = chosen.caller_helps
    options.worker_spin_us = chosen.worker_spin_us
    options.dispatcher_spin_us = chosen.dispatcher_spin_us
    options.dispatcher_yields = chosen.dispatcher_yields
    options.scheduling = _SCHEDULING[chosen.scheduling]
    return options


def _start_pool(chosen: Plan, instruction_set: str) -> None:
    options = pool_options(chosen)
    _C.start(options, [-1 if group.node is None else group.node for group in chosen.groups], instruction_set)


def _log_scheduling(wanted: str) -> None:
    # As with pinning, success is what the kernel reads back.
    lacking = [
        worker for worker in _C.workers() if worker.pinned and worker.scheduling != _SCHEDULING[wanted]
    ]
    if not lacking:
        logger.info("workers go before other programs on their CPUs (SCHED_%s)", wanted.upper())
        return
    error = lacking[0].scheduling_error
    logger.warning(
        "NUMA_MOE_SCHED=%s is not permitted (%s): it takes CAP_SYS_NICE, or `ulimit -r` of 1 or more. "
        "%d workers take turns with other programs",
        wanted,
        os.strerror(error) if error else "the kernel reads back another policy",
        len(lacking),
    )


def _why_unpinned() -> str | None:
    """Why some worker isn't where it was to be pinned, or None if all are."""
    for worker in _C.workers():
        if worker.requested_cpu >= 0 and not worker.pinned:
            cause = (
                os.strerror(worker.pin_error) if worker.pin_error else "the kernel reads back another mask"
            )
            return f"a worker can't be pinned to CPU {worker.requested_cpu} ({cause})"
    return None


_C.set_starter(ensure_started)
