"""Where packed weights really are, and what to say about it."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_numa_moe import _C
from torch_numa_moe.sizes import size_text
from torch_numa_moe.sysfs import read_number, read_text
from torch_numa_moe.topology import read_topology

logger = logging.getLogger("torch_numa_moe")

SAMPLED_PAGES_PER_SLICE = 4096
"""Pages asked of the kernel per slice and tensor; a share of 95 % is then known to within 1 %."""

LOWEST_LOCAL_SHARE = 0.95
"""Below this share of a slice's pages on its node, placement has failed: a dual-socket study dropped
such starts, since reads over the link then hold up every barrier."""


LOWEST_HUGE_PAGE_SHARE = 0.5
"""Below this share of large slices in huge pages, a line says what keeps them out."""

_LARGE_SLICE_BYTES = 16 << 20  # smaller ones have too few pages to miss


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
        huge_page_share: share of its memory in huge pages, transparent or explicit, 0 to 1; None if unknown.
    """

    slice: int
    node: int | None
    bytes: int
    pages_sampled: int
    pages_on_node: dict[int, int]
    error: int
    bind_error: int
    huge_page_share: float | None = None

    @property
    def local_share(self) -> float | None:
        """Share of the pages on their node, 0 to 1; None when unknown or when no node was asked for."""
        if self.node is None or self.error or self.pages_sampled == 0:
            return None
        return self.pages_on_node.get(self.node, 0) / self.pages_sampled

    @property
    def failed(self) -> bool:
        """Whether fewer pages are on the node than :data:`LOWEST_LOCAL_SHARE`."""
        share = self.local_share
        return share is not None and share < LOWEST_LOCAL_SHARE

    def __str__(self) -> str:
        text = f"slice {self.slice}: {size_text(self.bytes)}"
        if self.node is None:
            text += ", no node asked for"
        elif self.local_share is not None:
            text += f" for node {self.node}, {self.local_share:.1%} on it"
        else:
            text += f" for node {self.node}, unverified ({_reason(self.error)})"
        if self.huge_page_share is not None:
            text += f", {self.huge_page_share:.0%} in huge pages"
        return text


def _reason(error: int) -> str:
    return errno.errorcode.get(error, str(error)) if error else "no page was touched"


@dataclass(frozen=True)
class PlacedTensors:
    """Packed tensors of a layer, and where they were to be.

    Attributes:
        tensors: packed tensors, dimension 0 the slice.
        nodes: per slice, the node it is meant for or None.
        bind_errors: per slice, errno of binding it, or 0.
    """

    tensors: tuple[torch.Tensor, ...]
    nodes: tuple[int | None, ...]
    bind_errors: tuple[int, ...]

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Address and bytes of each tensor's part in a slice."""
        parts = [tensor[index] for tensor in self.tensors]
        return [(part.data_ptr(), part.numel() * part.element_size()) for part in parts]


def measure_placements(layers: Sequence[PlacedTensors]) -> list[tuple[SlicePlacement, ...]]:
    """Asks the kernel where the slices of some layers are: per layer, an entry per slice."""
    slices = [(layer, index) for layer in layers for index in range(len(layer.nodes))]
    spans = [layer.spans(index) for layer, index in slices]
    # In one go: the kernel walks all pages of the process for it.
    huge_pages = iter(_C.count_huge_pages([span for parts in spans for span in parts]))
    measured = iter(
        [
            _measure_slice(layer, index, parts, [next(huge_pages) for _ in parts])
            for (layer, index), parts in zip(slices, spans, strict=True)
        ]
    )
    return [tuple(next(measured) for _ in layer.nodes) for layer in layers]


def _measure_slice(
    layer: PlacedTensors,
    index: int,
    spans: Sequence[tuple[int, int]],
    huge_pages: Sequence[_C.HugePageUse],
) -> SlicePlacement:
    sampled = error = 0
    on_node: dict[int, int] = {}
    for address, size in spans:
        found = _C.query_page_placement(address, size, SAMPLED_PAGES_PER_SLICE)
        if found.source == _C.PlacementSource.NONE:
            error = error or found.error
        sampled += found.pages_sampled - found.pages_absent
        for node, pages in found.pages_on_node.items():
            on_node[node] = on_node.get(node, 0) + pages
    resident = sum(use.resident_bytes for use in huge_pages)
    known = resident > 0 and all(use.found for use in huge_pages)
    return SlicePlacement(
        index,
        layer.nodes[index],
        sum(size for _, size in spans),
        sampled,
        on_node,
        error,
        layer.bind_errors[index],
        sum(use.huge_bytes for use in huge_pages) / resident if known else None,
    )


def sum_placements(placements: Iterable[SlicePlacement]) -> tuple[SlicePlacement, ...]:
    """Several layers' placements together: one entry per slice and node."""
    sums: dict[tuple[int, int | None], SlicePlacement] = {}
    for one in placements:
        key = (one.slice, one.node)
        total = sums.get(key)
        sums[key] = one if total is None else _add(total, one)
    return tuple(sums.values())


def _add(first: SlicePlacement, second: SlicePlacement) -> SlicePlacement:
    size = first.bytes + second.bytes
    huge = None
    if first.huge_page_share is not None and second.huge_page_share is not None and size:
        huge = (first.huge_page_share * first.bytes + second.huge_page_share * second.bytes) / size
    return dataclasses.replace(
        first,
        bytes=size,
        pages_sampled=first.pages_sampled + second.pages_sampled,
        pages_on_node={
            node: first.pages_on_node.get(node, 0) + second.pages_on_node.get(node, 0)
            for node in sorted({*first.pages_on_node, *second.pages_on_node})
        },
        error=first.error or second.error,
        bind_error=first.bind_error or second.bind_error,
        huge_page_share=huge,
    )


_logged: set[str] = set()
"""What is said once in a process."""


def report_placement(
    placements: Sequence[SlicePlacement],
    before: Sequence[SlicePlacement] = (),
    *,
    huge_pages_wanted: bool = True,
) -> None:
    """Logs what a user has to know: slices off their node, and (once) what can't be verified or had.

    Args:
        placements: as measured.
        before: what was measured of the same slices earlier, to tell pages that were moved since from pages
            that never were on their node.
        huge_pages_wanted: whether to say so when the kernel gave none.
    """
    for placement in placements:
        if placement.failed:
            logger.error("%s", describe_failure(placement, _same_slice(placement, before)))
    lines = [_describe_refusals([one for one in placements if one.node is not None and one.bytes])]
    if huge_pages_wanted:
        lines.append(describe_lack_of_huge_pages(placements))
    for line in filter(None, lines):
        if line not in _logged:
            _logged.add(line)
            logger.warning("%s", line)


def describe_lack_of_huge_pages(placements: Sequence[SlicePlacement], *, root: str | Path = "/sys") -> str:
    """What to say if the kernel gave large slices few huge pages, or "".

    Args:
        placements: as measured.
        root: where sysfs is.
    """
    large = [one for one in placements if one.bytes >= _LARGE_SLICE_BYTES]
    shares = [one.huge_page_share for one in large if one.huge_page_share is not None]
    if not shares or min(shares) >= LOWEST_HUGE_PAGE_SHARE:
        return ""
    mode = read_text(Path(root) / "kernel/mm/transparent_hugepage/enabled")
    if mode is None:
        cause = "this kernel has no transparent huge pages"
    elif "[never]" in mode:
        cause = "transparent huge pages are off; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    else:
        cause = "free memory is in small pieces; echo 1 > /proc/sys/vm/compact_memory before loading"
    return (
        "weights lie in small pages, which costs read bandwidth for misses of the translation buffers "
        f"({cause}; NUMA_MOE_HUGE_PAGES=none silences this)"
    )


def _describe_refusals(placements: Sequence[SlicePlacement]) -> str:
    """What the kernel refused to do or to tell, or ""."""
    unbound = next((one.bind_error for one in placements if one.bind_error), 0)
    unverified = [one.error for one in placements if one.local_share is None]
    sentences = []
    if unbound:
        sentences.append(
            f"weights can't be bound to their NUMA nodes ({_reason(unbound)}): pages stay where the nodes' "
            "pinned workers first wrote them, as long as there is free memory and automatic NUMA balancing "
            "is off"
        )
    if unverified:
        sentences.append(
            "placement on NUMA nodes is unverified: the kernel refused to say where pages are "
            f"({_reason(unverified[0])})"
        )
    if sentences:
        sentences.append(
            "containers need CAP_SYS_NICE, or a seccomp profile that allows mbind and move_pages"
        )
    return "; ".join(sentences)


def _same_slice(placement: SlicePlacement, others: Sequence[SlicePlacement]) -> SlicePlacement | None:
    return next((one for one in others if (one.slice, one.node) == (placement.slice, placement.node)), None)


def describe_failure(
    placement: SlicePlacement,
    before: SlicePlacement | None = None,
    *,
    root: str | Path = "/sys",
    proc: str | Path = "/proc",
) -> str:
    """The line about a slice that is off its node: the likely cause, and what to do.

    Args:
        placement: of the slice; its node is not None.
        before: what was measured of it earlier, or None.
        root: where sysfs is.
        proc: where procfs is.
    """
    share = placement.local_share or 0.0
    others = sorted(placement.pages_on_node.keys() - {placement.node})
    elsewhere = ", ".join(f"node {node}" for node in others)
    text = (
        f"placement FAILED: only {100 * share:.1f} % of slice {placement.slice} is on NUMA node "
        f"{placement.node} (the rest on {elsewhere or 'none that is known'}). "
    )
    if before is not None and not before.failed and before.local_share is not None:
        if read_number(Path(proc) / "sys/kernel/numa_balancing"):
            return text + (
                f"It was {100 * before.local_share:.1f} %: automatic NUMA balancing moves pages. Turn it off "
                "(sysctl kernel.numa_balancing=0) and load the model again."
            )
        return text + (
            f"It was {100 * before.local_share:.1f} %: something moved its pages since (migratepages, a "
            "changed cpuset, memory pressure). Load the model again."
        )
    facts = ""
    for node in read_topology(root, proc).nodes:
        if node.id == placement.node and node.free_bytes is not None:
            facts = f" ({size_text(node.free_bytes)} free, {size_text(node.cached_bytes or 0)} page cache)"
    if placement.bind_error:
        return text + (
            f"The memory couldn't be bound to the node ({_reason(placement.bind_error)}), and the node was "
            f"likely full, often of cached files{facts}: free memory there (sync; echo 1 > "
            "/proc/sys/vm/drop_caches) and load the model again, or allow mbind (CAP_SYS_NICE in containers)."
        )
    return text + (
        f"The node is likely full{facts}: free memory there (numactl --hardware and numastat -p show what "
        "uses it; sync; echo 1 > /proc/sys/vm/drop_caches drops cached files) and load the model again."
    )
