"""Experts whose outputs are normalised one by one before they are weighted and summed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torch_numa_moe.packing import PackedExperts


def run_normalised(
    packed: PackedExperts,
    norm: Callable[[Tensor], Tensor],
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
) -> Tensor:
    """The packed experts with a norm on each one's output.

    The op sums over a token's experts, so each pair of token and expert is given to it as a token of its own.

    Args:
        packed: the experts.
        norm: of ``[n, hidden_size]``, each row by itself.
        hidden_states: ``[num_tokens, hidden_size]``.
        topk_ids: ``[num_tokens, top_k]``; an id >= num_experts adds nothing, if its weight is 0.
        topk_weights: ``[num_tokens, top_k]``.

    Returns:
        ``[num_tokens, hidden_size]``, dtype of hidden_states.
    """
    top_k = topk_ids.shape[1]
    outputs = packed(
        hidden_states.repeat_interleave(top_k, dim=0),
        topk_ids.reshape(-1, 1),
        topk_weights.new_ones((topk_ids.numel(), 1)),
    )
    normalised = norm(outputs).reshape(*topk_ids.shape, hidden_states.shape[1]).float()
    return (normalised * topk_weights.unsqueeze(-1).float()).sum(dim=1).to(hidden_states.dtype)
