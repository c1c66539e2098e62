"""Whether the NUMA nodes, and the process, have room for weights: looked at before anything is allocated."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_numa_moe.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_numa_moe.limits import ProcessLimits
    from torch_numa_moe.topology import Topology

logger = logging.getLogger("torch_numa_moe")

NODE_RESERVE_BYTES = 2 << 30
"""Memory that a node should keep beside its slices, in bytes: for the kernel, activations, attention's
key-value cache, and for what other programs allocate while weights are loaded."""


@dataclass(frozen=True)
class RoomShortage:
    """A node, or the process, that lacks room for what is to be placed.

    Attributes:
        node: the NUMA node; None for the memory limit of the process's control group.
        needed_bytes: the slices' share and, of a node, :data:`NODE_RESERVE_BYTES`.
        free_bytes: memory that nobody uses.
        cached_bytes: page cache of files, which the kernel gives up for memory bound to the node.
        limit_source: the file with the limit, if node is None.
    """

    node: int | None
    needed_bytes: int
    free_bytes: int
    cached_bytes: int = 0
    limit_source: str = ""

    def __str__(self) -> str:
        if self.node is None:
            return (
                f"placement at risk: the weights need {size_text(self.needed_bytes)}, and the memory limit "
                f"of {self.limit_source} leaves {size_text(self.free_bytes)}: raise the limit, or the kernel "
                "may end this process"
            )
        return (
            f"placement at risk: NUMA node {self.node} needs {size_text(self.needed_bytes)} (its share and "
            f"{size_text(NODE_RESERVE_BYTES)} to spare) and has {size_text(self.free_bytes)} free and "
            f"{size_text(self.cached_bytes)} of page cache: end what uses memory there (numactl --hardware, "
            "numastat -p), or what doesn't fit lands on another node"
        )


def find_shortages(
    slice_bytes: Sequence[int],
    nodes: Sequence[int | None],
    topology: Topology,
    limits: ProcessLimits,
    *,
    reclaims_cache: bool = True,
) -> list[RoomShortage]:
    """What lacks room for slices that are to be placed.

    Nodes whose free memory isn't known are taken to have room.

    Args:
        slice_bytes: per slice, its bytes yet to be placed.
        nodes: per slice, its node, or None if it may lie anywhere.
        topology: the machine as it is now.
        limits: of this process as it is now.
        reclaims_cache: whether page cache counts as room: it does where memory can be bound to a node, since
            the kernel then gives it up rather than going to another node.
    """
    shares: dict[int, int] = defaultdict(int)
    for share, node in zip(slice_bytes, nodes, strict=True):
        if node is not None and share > 0:
            shares[node] += share
    shortages = []
    known = {node.id: node for node in topology.nodes}
    for node_id, share in sorted(shares.items()):
        found = known.get(node_id)
        if found is None or found.free_bytes is None:
            continue
        needed = share + NODE_RESERVE_BYTES
        cached = found.cached_bytes or 0
        if found.free_bytes + (cached if reclaims_cache else 0) < needed:
            shortages.append(RoomShortage(node_id, needed, found.free_bytes, cached))
    total = sum(slice_bytes)
    left = limits.memory_left_bytes
    if left is not None and left < total:
        shortages.append(RoomShortage(None, total, left, limit_source=limits.memory_source))
    return shortages


class ShortageLog:
    """Logs each shortage once, until it is over."""

    def __init__(self) -> None:
        self._logged: set[int | None] = set()

    def log(self, shortages: Sequence[RoomShortage]) -> None:
        """Warns of those that weren't there the last time."""
        for shortage in shortages:
            if shortage.node not in self._logged:
                logger.warning("%s", shortage)
        self._logged = {shortage.node for shortage in shortages}
