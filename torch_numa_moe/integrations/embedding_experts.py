"""Experts of one neuron each, looked up in a pair of embeddings (Doge; product-key memories): refused."""

from __future__ import annotations

from torch import nn

from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError


def matches(module: nn.Module) -> bool:
    """Whether it has two embeddings of one row per expert, and a linear layer that routes."""
    num_experts = getattr(module, "num_experts", None)
    tables = [
        child
        for child in module.children()
        if isinstance(child, nn.Embedding) and child.num_embeddings == num_experts
    ]
    return len(tables) == 2


def check(module: nn.Module) -> None:
    """Refuses.

    Raises:
        UnsupportedExpertsError: always.
    """
    raise UnsupportedExpertsError(
        "each expert is a single neuron, one row of two embedding tables: there are no matrices to cut into "
        "slices, and packing would pad every row to 16"
    )
