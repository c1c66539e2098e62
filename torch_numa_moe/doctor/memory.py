"""Huge pages, automatic NUMA balancing, room on the nodes, swap and overcommit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.room import NODE_RESERVE_BYTES
from torch_numa_moe.sizes import size_text
from torch_numa_moe.sysfs import read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

    from torch_numa_moe.doctor.inspection import Inspection

LOWEST_SWAP_BYTES = 256 << 20
"""Swap in use from here on is told. Less is common, and of programs that sleep."""

_KIB = 1024


def check_huge_pages(inspection: Inspection, wanted: str) -> Report:
    """Looks at what keeps weights out of huge pages.

    Args:
        inspection: what to look at.
        wanted: ``NUMA_MOE_HUGE_PAGES`` as it holds.
    """
    report = Report()
    reserved = _reserved_huge_pages(inspection)
    if any(total for total, _ in reserved.values()):
        shown = ", ".join(f"node {node}: {total} ({free} free)" for node, (total, free) in reserved.items())
        report.facts.append(f"reserved pages of 2 MiB: {shown}")
    if wanted == "none":
        return report
    path = inspection.root / "kernel/mm/transparent_hugepage/enabled"
    mode = read_text(path)
    why = "weights in pages of 4 KiB cost read bandwidth for misses of the translation buffers"
    if mode is None:
        report.not_checked.append(f"transparent huge pages: {path} can't be read")
    elif "[never]" in mode:
        command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        if wanted == "explicit" and reserved and all(free for _, free in reserved.values()):
            report.hint(
                "huge pages",
                f"{path} is never, and some pages of 2 MiB are reserved",
                f"what doesn't fit into the reserved ones lies in small pages: {why}",
                command,
            )
        else:
            report.problem("huge pages", f"{path} is never", why, command)
    else:
        report.facts.append(f"transparent huge pages: {mode}")
    if "THP_enabled:\t0" in (read_text(inspection.proc / "self/status") or ""):
        report.problem(
            "huge pages",
            f"{inspection.proc / 'self/status'}: THP_enabled is 0",
            f"what started this process has turned transparent huge pages off for it (prctl): {why}",
            "# start it from another shell or service manager",
        )
    return report


def _reserved_huge_pages(inspection: Inspection) -> dict[int, tuple[int, int]]:
    found = {}
    for node in inspection.plan.topology.nodes:
        folder = inspection.root / f"devices/system/node/node{node.id}" / "hugepages/hugepages-2048kB"
        total = read_number(folder / "nr_hugepages")
        if total is not None:
            found[node.id] = total, read_number(folder / "free_hugepages") or 0
    return found


def check_numa_balancing(inspection: Inspection, *, binding_works: bool | None = None) -> Report:
    """Looks at the kernel's own idea of where pages belong.

    Pages that are bound to a node stay there. Without the split, and where a container refuses to bind,
    nothing binds them.

    Args:
        inspection: what to look at.
        binding_works: whether memory can be bound to nodes, if that is known.
    """
    report = Report()
    if len([node for node in inspection.plan.topology.nodes if node.has_memory]) < 2:
        return report
    path = inspection.proc / "sys/kernel/numa_balancing"
    mode = read_number(path)
    if mode is None:
        report.not_checked.append(f"automatic NUMA balancing: {path} can't be read")
    elif mode == 0:
        report.facts.append("automatic NUMA balancing is off")
    elif inspection.plan.split and binding_works is not False:
        report.hint(
            "NUMA balancing",
            f"{path} is {mode}",
            "weights are bound to their nodes and stay, but the rest of the process is slowed by faults that "
            "the kernel makes to see who reads what",
            "sysctl kernel.numa_balancing=0",
        )
    else:
        unbound = "can't be bound to their nodes here" if inspection.plan.split else "aren't split"
        report.problem(
            "NUMA balancing",
            f"{path} is {mode}",
            f"weights {unbound}: the kernel unmaps their pages to see who reads them, and moves them about",
            "sysctl kernel.numa_balancing=0",
        )
    return report


def check_room(inspection: Inspection, *, binding_works: bool | None = None) -> Report:
    """Looks for nodes that are full, and for a memory limit that is nearly used up.

    Args:
        inspection: what to look at.
        binding_works: whether memory can be bound to nodes, if that is known.
    """
    report = Report()
    plan = inspection.plan
    wanted = {group.node for group in plan.groups if group.node is not None}
    for node in plan.topology.nodes:
        total, free, cached = node.memory_bytes or 0, node.free_bytes, node.cached_bytes or 0
        if free is None or total <= NODE_RESERVE_BYTES or free >= NODE_RESERVE_BYTES:
            continue
        if wanted and node.id not in wanted:
            continue
        seen = (
            f"{inspection.root}/devices/system/node/node{node.id}/meminfo: {size_text(free)} free, "
            f"{size_text(cached)} page cache"
        )
        if free + cached >= NODE_RESERVE_BYTES and binding_works is not False:
            report.hint(
                "memory",
                seen,
                f"node {node.id} is full of cached files: the kernel gives them up for bound weights, and "
                "patch() releases those of the checkpoint, but loading is slower for it",
                "# only if placement fails all the same",
                "sync; echo 1 > /proc/sys/vm/drop_caches",
            )
        elif free + cached >= NODE_RESERVE_BYTES:
            report.problem(
                "memory",
                seen,
                f"node {node.id} is full of cached files, and where memory can't be bound to a node "
                "the kernel goes to another one before it gives them up",
                "sync; echo 1 > /proc/sys/vm/drop_caches",
            )
        else:
            report.problem(
                "memory",
                seen,
                f"programs use node {node.id}'s memory: weights for it don't fit, or land on another node",
                "numactl --hardware; numastat -p  # shows what to end",
            )
    left = plan.limits.memory_left_bytes
    if left is not None and left < NODE_RESERVE_BYTES:
        report.problem(
            "memory",
            f"{plan.limits.memory_source} leaves {size_text(left)}",
            "the kernel ends a process that goes over the memory limit of its control group",
            _raise_limit(plan.limits.memory_source),
        )
    return report


def _raise_limit(path: str) -> str:
    unlimited = "-1" if path.endswith("limit_in_bytes") else "max"
    return f"echo {unlimited} > {path}  # in containers on the host, or: docker run --memory"


def check_paging(inspection: Inspection) -> Report:
    """Looks at swap and at overcommit."""
    report = Report()
    sizes = _sizes(inspection.proc / "meminfo")
    swapped = sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    if swapped >= LOWEST_SWAP_BYTES:
        available = sizes.get("MemAvailable", 0)
        fits = available > 2 * swapped
        report.hint(
            "swap",
            f"{inspection.proc / 'meminfo'}: {size_text(swapped)} of swap in use",
            "memory is or was short; weights that are swapped out are read back from disk in the middle of "
            "a call",
            "swapoff -a  # until swapon -a"
            if fits
            else f"# end what uses memory first ({size_text(available)} are available), then: swapoff -a",
        )
    path = inspection.proc / "sys/vm/overcommit_memory"
    if read_number(path) == 2:
        limit, committed = sizes.get("CommitLimit", 0), sizes.get("Committed_AS", 0)
        report.hint(
            "overcommit",
            f"{path} is 2; {size_text(max(0, limit - committed))} of {size_text(limit)} may yet be committed",
            "the kernel refuses memory beyond this bound however much is free: packing then ends with "
            "out of memory",
            "sysctl vm.overcommit_memory=0",
        )
    return report


def _sizes(path: Path) -> dict[str, int]:
    """Sizes in bytes of /proc/meminfo."""
    found = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * _KIB
    return found
