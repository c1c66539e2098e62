"""Asks the kernel for what the pool needs, for a moment, to see whether it is refused."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import torch

from torch_numa_moe import _C
from torch_numa_moe.doctor.affinity import KernelAnswers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_numa_moe.plan import Plan

_PROBED_BYTES = 4096


def ask_kernel(plan: Plan) -> KernelAnswers:
    """Pins a thread that ends at once, and binds a page to each node. Never raises."""
    workers = [cpu for group in plan.groups for cpu in group.worker_cpus if cpu >= 0]
    allowed = plan.limits.memory_nodes
    nodes = [
        node.id
        for node in plan.topology.nodes
        if node.memory_bytes and (allowed is None or node.id in allowed)
    ]
    bind_errors, query_error = _bind_pages(nodes)
    return KernelAnswers(try_to_pin(workers[0]) if workers else None, bind_errors, query_error)


def try_to_pin(cpu: int) -> str | None:
    """Why a thread can't be pinned to a CPU, or None if it can. Success is what the kernel reads back."""
    reasons: list[str | None] = []

    def pin() -> None:
        try:
            os.sched_setaffinity(0, {cpu})
            mask = os.sched_getaffinity(0)
        except OSError as error:
            reasons.append(f"sched_setaffinity: {_name(error.errno or 0)}")
            return
        reasons.append(None if mask == {cpu} else "the kernel reads back another mask")

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()
    return reasons[0] if reasons else "the thread ended early"


def _bind_pages(nodes: Sequence[int]) -> tuple[dict[int, str], str | None]:
    errors: dict[int, str] = {}
    query_error = None
    for node in nodes:
        try:
            region = _C.PlacedRegion(_PROBED_BYTES, [node], _C.HugePages.NONE)
            errors[node] = _name(region.bindings[0].bind_error)
            page = torch.frombuffer(region, dtype=torch.uint8)
            page[0] = 1
            found = _C.query_page_placement(page.data_ptr(), _PROBED_BYTES, 1)
        except (MemoryError, OSError, RuntimeError, ValueError):
            continue  # no memory for a page: said by others
        unknown = found.source == _C.PlacementSource.NONE
        query_error = _name(found.error) or "no answer" if unknown else query_error or ""
    return errors, query_error


def _name(error: int) -> str:
    return errno.errorcode.get(error, str(error)) if error else ""
