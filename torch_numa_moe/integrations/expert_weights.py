"""Views of experts' weights, wherever a module keeps them, in the shapes that packing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.activation_probe import GateFunction, apply_gate_function
from torch_numa_moe.packing import PackedExperts


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of some consecutive experts, of any strides.

    Attributes:
        gate: ``[n, intermediate_size, hidden_size]``; the only projection if up is None.
        up: the same shape, or None.
        down: ``[n, hidden_size, intermediate_size]``.
        gate_bias, up_bias: ``[n, intermediate_size]``, or None.
        down_bias: ``[n, hidden_size]``, or None.
    """

    gate: Tensor
    up: Tensor | None
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """Experts in these weights."""
        return self.gate.shape[0]

    @property
    def shapes(self) -> tuple[torch.Size | None, ...]:
        """Of one expert's weights, None where there are none."""
        tensors = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return tuple(None if tensor is None else tensor.shape[1:] for tensor in tensors)


WeightLayout = Callable[[nn.Module], list[ExpertWeights]]
"""Finds all experts' weights in a module, in order. They are views: writing to them changes the module."""


def pack_weights(packed: PackedExperts, weights: Sequence[ExpertWeights]) -> None:
    """Copies all experts' weights into packed ones."""
    first_expert = 0
    for some in weights:
        packed.pack_gate_up(first_expert, some.gate, some.up)
        packed.pack_down(first_expert, some.down)
        first_expert += some.num_experts
    gate_bias, up_bias, down_bias = (
        _joined([getattr(some, name) for some in weights]) for name in ("gate_bias", "up_bias", "down_bias")
    )
    if packed.gate_up_bias is not None and gate_bias is not None:
        packed.pack_gate_up_bias(gate_bias, up_bias)
    if packed.down_bias is not None and down_bias is not None:
        packed.pack_down_bias(down_bias)


def unpack_weights(packed: PackedExperts, weights: Sequence[ExpertWeights]) -> None:
    """Copies packed experts' weights back into views."""
    first_expert = 0
    for some in weights:
        packed.unpack_experts(first_expert, some.gate, some.up, some.down)
        first_expert += some.num_experts
    gate_bias, up_bias = packed.unpack_gate_up_bias()
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": packed.unpack_down_bias()}
    for name, bias in biases.items():
        first_expert = 0
        for some in weights:
            if bias is None:
                break
            getattr(some, name).copy_(bias[first_expert : first_expert + some.num_experts])
            first_expert += some.num_experts


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    there = [bias for bias in biases if bias is not None]
    return torch.cat(there) if there else None


def reference_experts(
    weights: Sequence[ExpertWeights],
    function: GateFunction,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
) -> Tensor:
    """What the op will compute, in torch and in fp32, for a few tokens: to compare a module with.

    Args:
        weights: of all experts.
        function: their activation.
        hidden_states: ``[num_tokens, hidden_size]``.
        topk_ids: ``[num_tokens, top_k]``.
        topk_weights: ``[num_tokens, top_k]``.

    Returns:
        ``[num_tokens, hidden_size]`` fp32.
    """
    starts = [0]
    for some in weights:
        starts.append(starts[-1] + some.num_experts)
    result = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token, route in [(t, k) for t in range(topk_ids.shape[0]) for k in range(topk_ids.shape[1])]:
        expert = int(topk_ids[token, route])
        if expert >= starts[-1]:
            continue
        index = next(i for i in range(len(weights)) if expert < starts[i + 1])
        output = _one_expert(weights[index], expert - starts[index], function, hidden_states[token].float())
        result[token] += output * topk_weights[token, route].float()
    return result


def _one_expert(weights: ExpertWeights, index: int, function: GateFunction, row: Tensor) -> Tensor:
    def project(matrix: Tensor, bias: Tensor | None, values: Tensor) -> Tensor:
        product = matrix[index].float() @ values
        return product if bias is None else product + bias[index].float()

    gate = project(weights.gate, weights.gate_bias, row)
    up = None if weights.up is None else project(weights.up, weights.up_bias, row)
    return project(weights.down, weights.down_bias, apply_gate_function(function, gate, up))
