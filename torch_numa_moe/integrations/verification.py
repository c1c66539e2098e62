"""Asks the kernel where a patched model's weights are, all layers in one go."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from torch_numa_moe import runtime
from torch_numa_moe.integrations.packed_module import PackedState, find_packed
from torch_numa_moe.packing import PackedExperts
from torch_numa_moe.placement import (
    SlicePlacement,
    measure_placements,
    report_placement,
    sum_placements,
)


def verify_modules(states: Collection[PackedState]) -> tuple[SlicePlacement, ...]:
    """Measures, keeps the result in each ``packed.placement``, and logs what is wrong with all together."""
    before = sum_placements(one for state in states for one in state.packed.placement)
    measured = measure_placements([state.packed.placed_tensors for state in states])
    for state, placement in zip(states, measured, strict=True):
        state.packed.placement = placement
    total = sum_placements(one for placement in measured for one in placement)
    report_placement(total, before, huge_pages_wanted=runtime.huge_pages_wanted())
    return total


def verify_placement(model: nn.Module | PackedExperts) -> tuple[SlicePlacement, ...]:
    """Asks the kernel again where packed weights are, logs what is wrong, and keeps it in ``placement``.

    Pages can be moved after they were placed: by automatic NUMA balancing where they couldn't be bound to
    their nodes, by ``migratepages``, by a changed cpuset.

    Args:
        model: a patched model, any module of one, or the packed experts of a layer.

    Returns:
        One entry per slice and node, all layers together; empty if nothing in the model is packed.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(model, PackedExperts):
        return model.verify_placement()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module or torch_numa_moe.PackedExperts, got {type(model).__name__}"
        )
    return verify_modules(find_packed(model).values())
