"""One start: a process that packs the load, decodes, and says how long that took and where the weights lay.

``python -m torch_numa_moe.study.start`` reads a :class:`StartRequest` as JSON from its standard input and
writes a :class:`StartResult` as JSON to its standard output.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_numa_moe import _C, runtime
from torch_numa_moe.packing import PackedExperts, pack_experts
from torch_numa_moe.placement import SlicePlacement, measure_placements, report_placement, sum_placements
from torch_numa_moe.plan import GroupPlan
from torch_numa_moe.study.load import LoadShape, Routings, make_routings, make_source, parse_shape

SAMPLES = 3
"""Decode samples of a start."""

WARM_UP_SAMPLES = 0.25
"""Length of the warm-up before them, in samples."""


@dataclass(frozen=True)
class StartRequest:
    """What to do.

    Attributes:
        shape: sizes of a layer, as :func:`torch_numa_moe.study.load.parse_shape` takes them.
        format: weight format.
        layers: how many.
        seconds: length of a sample.
        cpus: CPUs that the process is confined to, or None.
        placed: whether weights are put on their nodes, where the plan has nodes for them.
    """

    shape: str
    format: str
    layers: int
    seconds: float
    cpus: list[int] | None = None
    placed: bool = True


@dataclass(frozen=True)
class StartResult:
    """What came of it.

    Attributes:
        token_ms: per sample, the time of a token through all layers, in ms (the mean over the sample).
        tokens: per sample, how many.
        workers: of each group; the calling thread isn't counted.
        caller_helps: whether the calling thread computes too.
        nodes: per slice, the node that the plan has for it, None if it may lie anywhere.
        pages_on_node: per slice, how many of the sampled pages lie on each NUMA node (its number as text),
            after the last sample.
        local_shares: per slice, the share of its pages on its node, None if unknown or if it has none.
        unverified: why it isn't known where pages are, or "".
        huge_page_share: share of the weights in huge pages, None if unknown.
        weight_bytes: of all layers, padding included.
        pack_seconds: how long packing took.
        instruction_set: of the kernels.
        plan: in words.
    """

    token_ms: list[float]
    tokens: list[int]
    workers: list[int]
    caller_helps: bool
    nodes: list[int | None]
    pages_on_node: list[dict[str, int]]
    local_shares: list[float | None]
    unverified: str
    huge_page_share: float | None
    weight_bytes: int
    pack_seconds: float
    instruction_set: str
    plan: str

    @property
    def lowest_local_share(self) -> float | None:
        """Of all slices, None if it isn't known of any."""
        known = [share for share in self.local_shares if share is not None]
        return min(known) if known else None


def run_start(request: StartRequest) -> StartResult:
    """Does it in this process.

    Raises:
        OSError: if the process can't be confined to the CPUs.
        MemoryError, RuntimeError, ValueError: what packing and computing raise.
    """
    if request.cpus is not None:
        os.sched_setaffinity(0, request.cpus)  # no other thread has started yet
    torch.set_num_threads(1)  # the cores are the pool's
    shape = parse_shape(request.shape)
    running = runtime.ensure_started()
    nodes = running.nodes
    if not request.placed:
        # Packed experts ask here for the nodes of their slices. Workers stay where they are.
        runtime._running = dataclasses.replace(running, nodes=(None,) * len(nodes))
    started = time.perf_counter()
    layers = _pack(shape, request, running.plan.groups)
    pack_seconds = time.perf_counter() - started
    with torch.inference_mode():
        samples = _decode(layers, make_routings(shape, request.layers), request.seconds)
    slices = sum_placements(
        one
        for placement in measure_placements([layer.placed_tensors for layer in layers])
        for one in placement
    )
    report_placement(slices, huge_pages_wanted=runtime.huge_pages_wanted())
    return StartResult(
        token_ms=[milliseconds for milliseconds, _ in samples],
        tokens=[tokens for _, tokens in samples],
        workers=[len(group.worker_cpus) for group in running.plan.groups],
        caller_helps=running.plan.caller_helps,
        nodes=list(nodes),
        pages_on_node=[
            {str(node): pages for node, pages in sorted(one.pages_on_node.items())} for one in slices
        ],
        local_shares=[_local_share(one, nodes[one.slice]) for one in slices],
        unverified=next((errno.errorcode.get(one.error, str(one.error)) for one in slices if one.error), ""),
        huge_page_share=_huge_page_share(slices),
        weight_bytes=sum(layer.nbytes for layer in layers),
        pack_seconds=pack_seconds,
        instruction_set=_C.running_instruction_set(),
        plan=str(running.plan),
    )


def _pack(shape: LoadShape, request: StartRequest, groups: Sequence[GroupPlan]) -> list[PackedExperts]:
    gate_up, down = make_source(shape)
    layers = []
    for _ in range(request.layers):
        if request.placed:
            packed = pack_experts(gate_up, down, format=request.format, verify_placement=False)
        else:
            packed = _pack_where_one_thread_writes(gate_up, down, request.format, groups[0].worker_cpus)
        layers.append(packed)
    return layers


def _pack_where_one_thread_writes(
    gate_up: torch.Tensor, down: torch.Tensor, format: str, cpus: Sequence[int]
) -> PackedExperts:
    """Packs into memory whose pages the calling thread, on some CPUs, has written first."""
    packed = PackedExperts(
        num_experts=down.shape[0],
        hidden_size=down.shape[1],
        intermediate_size=down.shape[2],
        format=format,
        activation="silu",
        alpha=None,
        limit=None,
        gated=True,
        gate_up_bias=False,
        down_bias=False,
    )
    own = os.sched_getaffinity(0)
    pinned = [cpu for cpu in cpus if cpu >= 0]
    if pinned:
        os.sched_setaffinity(0, pinned)
    try:
        packed.gate_up_proj.zero_()
        packed.down_proj.zero_()
    finally:
        os.sched_setaffinity(0, own)
    gate, up = gate_up.chunk(2, dim=1)
    packed.pack_gate_up(0, gate, up)
    packed.pack_down(0, down)
    return packed


def _decode(layers: Sequence[PackedExperts], routings: Routings, seconds: float) -> list[tuple[float, int]]:
    """Warms up, then per sample: ms of a token, and tokens."""
    # Views are made before the clock runs.
    calls = [
        list(zip(layers, ids.unbind(0), weights.unbind(0), strict=True))
        for ids, weights in zip(routings.topk_ids, routings.topk_weights, strict=True)
    ]
    done = 0

    def sample(length: float) -> tuple[float, int]:
        nonlocal done
        tokens = 0
        started = time.perf_counter()
        while True:
            for layer, ids, weights in calls[done % len(calls)]:
                layer(routings.hidden_states, ids, weights)
            done += 1
            tokens += 1
            elapsed = time.perf_counter() - started
            if elapsed >= length:
                return 1e3 * elapsed / tokens, tokens

    sample(WARM_UP_SAMPLES * seconds)
    return [sample(seconds) for _ in range(SAMPLES)]


def _local_share(placement: SlicePlacement, node: int | None) -> float | None:
    """As the property of this name, of a node that the slice wasn't bound to."""
    return dataclasses.replace(placement, node=node).local_share


def _huge_page_share(slices: Sequence[SlicePlacement]) -> float | None:
    shares = [(one.huge_page_share, one.bytes) for one in slices]
    if any(share is None for share, _ in shares):
        return None
    return sum((share or 0.0) * size for share, size in shares) / sum(size for _, size in shares)


def main() -> int:
    """Returns the exit status."""
    result = run_start(StartRequest(**json.load(sys.stdin)))
    json.dump(dataclasses.asdict(result), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
