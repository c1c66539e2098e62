"""Gives every arm and every probe the same number of threads."""

from __future__ import annotations

import os

import torch

import torch_numa_moe
from torch_numa_moe import runtime


def set_threads(requested: int | None = None) -> list[int]:
    """Sets the threads of torch to those of the pool, the calling thread included where it helps.

    Args:
        requested: number of threads; None: what torch_numa_moe plans.

    Returns:
        The CPUs of the pinned workers, and for the other threads CPUs that those leave free (as far as there
        are any).
    """
    if requested is not None and torch_numa_moe.configure(workers=requested).caller_helps and requested > 1:
        torch_numa_moe.configure(workers=requested - 1)
    plan = runtime.ensure_started().plan
    pinned = [cpu for group in plan.groups for cpu in group.worker_cpus]
    num_threads = len(pinned) + plan.caller_helps
    cpus = [cpu for cpu in pinned if cpu >= 0]
    free = sorted(os.sched_getaffinity(0) - set(cpus))
    torch.set_num_threads(num_threads)
    return cpus + free[: num_threads - len(cpus)]
