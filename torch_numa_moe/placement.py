"""Where packed weights really are, and what to say about it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_numa_moe import _C

logger = logging.getLogger("torch_numa_moe")

SAMPLED_PAGES_PER_SLICE = 4096
"""Pages asked of the kernel per slice and tensor; a share of 95 % is then known to within 1 %."""

LOWEST_LOCAL_SHARE = 0.95
"""Below this share of a slice's pages on its node, placement has failed: a dual-socket study dropped
such starts, since reads over the link then hold up every barrier."""


@dataclass(frozen=True)
class SlicePlacement:
    """Where one slice of a layer's weights is.

    Attributes:
        slice: index into dimension 0 of the packed tensors.
        node: the NUMA node it was meant for, or None if it may lie anywhere.
        bytes: size of the slice, in bytes.
        pages_sampled: pages that the kernel was asked about, those never touched left out.
        pages_on_node: how many sampled pages lie on each node.
        error: errno when the kernel didn't say (EPERM in many containers), else 0. Where move_pages is
            refused but /proc/self/numa_maps tells, pages count as sampled and this is 0.
        bind_error: errno when the slice's memory couldn't be bound to the node, else 0.
    """

    slice: int
    node: int | None
    bytes: int
    pages_sampled: int
    pages_on_node: dict[int, int]
    error: int
    bind_error: int

    @property
    def local_share(self) -> float | None:
        """Share of the pages on their node, 0 to 1; None when unknown or when no node was asked for."""
        if self.node is None or self.error or self.pages_sampled == 0:
            return None
        return self.pages_on_node.get(self.node, 0) / self.pages_sampled

    def __str__(self) -> str:
        if self.node is None:
            return f"slice {self.slice}: {self.bytes / 2**20:.1f} MiB, no node asked for"
        share = self.local_share
        told = f"{share:.1%} on it" if share is not None else f"unverified ({_reason(self.error)})"
        return f"slice {self.slice}: {self.bytes / 2**20:.1f} MiB for node {self.node}, {told}"


def _reason(error: int) -> str:
    return errno.errorcode.get(error, str(error)) if error else "no page was touched"


def measure_placement(
    tensors: Sequence[torch.Tensor], nodes: Sequence[int | None], bind_errors: Sequence[int]
) -> tuple[SlicePlacement, ...]:
    """Asks the kernel where the slices of some packed tensors are.

    Args:
        tensors: packed tensors, dimension 0 the slice.
        nodes: per slice, the node it is meant for or None.
        bind_errors: per slice, errno of binding it, or 0.
    """
    placements = []
    for index, node in enumerate(nodes):
        size = sampled = error = 0
        on_node: dict[int, int] = {}
        for tensor in tensors:
            part = tensor[index]
            part_bytes = part.numel() * part.element_size()
            found = _C.query_page_placement(part.data_ptr(), part_bytes, SAMPLED_PAGES_PER_SLICE)
            size += part_bytes
            if found.source == _C.PlacementSource.NONE:
                error = error or found.error
            sampled += found.pages_sampled - found.pages_absent
            for where, pages in found.pages_on_node.items():
                on_node[where] = on_node.get(where, 0) + pages
        placements.append(SlicePlacement(index, node, size, sampled, on_node, error, bind_errors[index]))
    return tuple(placements)


_unverified_logged = False


def report_placement(placements: Sequence[SlicePlacement]) -> None:
    """Logs what a user has to know: slices off their node, or (once) that nothing can be verified."""
    global _unverified_logged
    for placement in placements:
        share = placement.local_share
        if placement.node is not None and share is None and not _unverified_logged:
            _unverified_logged = True
            logger.warning(
                "placement on NUMA nodes is unverified: the kernel refused to say where pages are (%s). "
                "Containers need CAP_SYS_NICE, or a seccomp profile that allows move_pages and mbind.",
                _reason(placement.error),
            )
        if share is not None and share < LOWEST_LOCAL_SHARE:
            elsewhere = {node: n for node, n in placement.pages_on_node.items() if node != placement.node}
            logger.error(
                "placement FAILED: only %.1f %% of slice %d is on NUMA node %d (the rest on %s). The node "
                "is likely full, often of cached files: free memory there (numactl --hardware shows it) and "
                "load the model again.",
                100 * share,
                placement.slice,
                placement.node,
                ", ".join(f"node {node}" for node in sorted(elsewhere)),
            )
