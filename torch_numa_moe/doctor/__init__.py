"""Finds what keeps the pool from running at full speed on this machine: ``python -m torch_numa_moe doctor``.

Checks read /sys and /proc and change nothing. Each is a function of where these are and of the plan, in a
file for each kind; :func:`find_intruders` is of use by itself.
"""

from __future__ import annotations

from torch_numa_moe.doctor.threads import Intruder, PinnedThread, find_intruders, find_pinned_threads

__all__ = ["Intruder", "PinnedThread", "find_intruders", "find_pinned_threads"]
