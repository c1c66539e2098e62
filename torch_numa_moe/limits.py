"""What this process may use of the machine: CPUs, memory nodes, CPU time, memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe.cgroup import read_cgroup_limits
from torch_numa_moe.sysfs import parse_list, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class ProcessLimits:
    """What this process may use.

    Attributes:
        cpus: CPUs of its affinity mask (which a cpuset cuts down), ascending; None if nothing tells.
        cpus_source: where they are from, in words.
        memory_nodes: NUMA nodes that it may take memory from, ascending; None if nothing tells.
        cpu_quota: CPU time per time that its control groups grant, such as 1.5, or None.
        cpu_quota_source: the file that says so, or "".
        memory_bytes: most memory that its control groups grant, or None.
        memory_source: the file that says so, or "".
        real_time_us: microseconds of each period that the kernel grants real-time threads, -1: all of it,
            or None if nothing tells.
        memory_left_bytes: what they still leave, page cache that can be given up included, or None.
    """

    cpus: tuple[int, ...] | None
    cpus_source: str = "sched_getaffinity"
    memory_nodes: tuple[int, ...] | None = None
    cpu_quota: float | None = None
    cpu_quota_source: str = ""
    memory_bytes: int | None = None
    memory_source: str = ""
    memory_left_bytes: int | None = None
    real_time_us: int | None = None


def read_limits(
    root: str | Path = "/sys",
    proc: str | Path = "/proc",
    get_affinity: Callable[[int], Iterable[int]] | None = None,
) -> ProcessLimits:
    """Reads the limits of the calling thread. Never raises.

    Args:
        root: where sysfs is.
        proc: where procfs is.
        get_affinity: what returns the CPUs of a thread's affinity mask; ``os.sched_getaffinity`` if None.
    """
    allowed: dict[str, list[int]] = {}
    for line in (read_text(Path(proc) / "self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name in {"Cpus_allowed_list", "Mems_allowed_list"}:
            numbers = parse_list(value)
            if numbers:
                allowed[name] = numbers
    cpus, source = _affinity(get_affinity or os.sched_getaffinity, allowed.get("Cpus_allowed_list"))
    nodes = allowed.get("Mems_allowed_list")
    cgroup = read_cgroup_limits(root, proc)
    return ProcessLimits(
        cpus=cpus,
        cpus_source=source,
        memory_nodes=None if nodes is None else tuple(nodes),
        cpu_quota=cgroup.cpu_quota,
        cpu_quota_source=cgroup.cpu_quota_source,
        memory_bytes=cgroup.memory_bytes,
        memory_source=cgroup.memory_source,
        memory_left_bytes=cgroup.memory_left_bytes,
        real_time_us=_number(read_text(Path(proc) / "sys/kernel/sched_rt_runtime_us")),
    )


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _affinity(
    get_affinity: Callable[[int], Iterable[int]], from_status: list[int] | None
) -> tuple[tuple[int, ...] | None, str]:
    try:
        return tuple(sorted(get_affinity(0))), "sched_getaffinity"
    except (OSError, OverflowError, MemoryError) as error:
        # Refused, or (EINVAL whatever the size) the mask never seems large enough.
        reason = str(error) or type(error).__name__
    if from_status is not None:
        return tuple(from_status), f"/proc/self/status, since sched_getaffinity failed ({reason})"
    return None, f"nothing: sched_getaffinity failed ({reason}), and /proc/self/status doesn't tell"
