"""Blocks of two stacks of linear layers around an activation, whose router sorts rows by expert (JetMoE)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.expert_weights import ExpertWeights, reference_experts
from torch_numa_moe.integrations.replaced_module import (
    MethodReplacement,
    ReplacementSpec,
    check_source,
    check_weights,
    packed_of,
)
from torch_numa_moe.integrations.trial import (
    TRIAL_ROWS,
    check_trial,
    find_activation,
    inference,
    random_rows,
)
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError

_PARAMETERS = ("input_linear.weight", "output_linear.weight")


def matches(module: nn.Module) -> bool:
    """Whether it is such a block, with an activation between its two stacks (not experts of attention)."""
    if not {"input_linear", "output_linear", "router"} <= module._modules.keys():
        return False
    first, second = (module.get_submodule(name)._parameters.get("weight") for name in _STACKS)
    if first is None or second is None or first.dim() != 3 or second.dim() != 3:
        return False
    # Gate and up: of attention's experts, the first's outputs are the second's inputs.
    return first.shape[1] == 2 * second.shape[2]


_STACKS = ("input_linear", "output_linear")


def check(module: nn.Module) -> ReplacementSpec:
    """How to pack the block. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    check_source(module, _PARAMETERS)
    weights = _layout(module)
    check_weights(weights)
    gate = find_activation(module, weights[0].gate.shape[1])

    def run_reference(rows: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        return reference_experts(weights, gate, rows, ids, scales).to(rows.dtype)

    dtype = module.get_parameter(_PARAMETERS[0]).dtype
    hidden_states = random_rows(TRIAL_ROWS, weights[0].gate.shape[2], dtype)[None]
    with inference(module):
        try:
            expected = _run_block(module, run_reference, hidden_states)
        except Exception as error:  # the model's own code may raise anything
            raise UnsupportedExpertsError(f"its router isn't understood: {error}") from error
        check_trial(lambda: module(hidden_states), expected, dtype, "its forward")
    return ReplacementSpec(module, _layout, _PARAMETERS, gate, (MethodReplacement("", "forward", _forward),))


def _layout(module: nn.Module) -> list[ExpertWeights]:
    gate_up, down = (module.get_parameter(name).detach() for name in _PARAMETERS)
    size = gate_up.shape[1] // 2
    return [ExpertWeights(gate_up[:, :size], gate_up[:, size:], down)]


def _forward(self: nn.Module, layer_input: Tensor) -> Tensor:
    packed, _ = packed_of(self)
    return _run_block(self, packed, layer_input)


def _run_block(block: Any, run_experts: Any, layer_input: Tensor) -> Tensor:
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    sorted_pairs, _, sorted_gates, expert_sizes, _ = block.router(rows)
    sizes = torch.as_tensor(expert_sizes)
    sorted_ids = torch.repeat_interleave(torch.arange(sizes.numel()), sizes).to(rows.device)
    ids, gates = torch.empty_like(sorted_ids), torch.empty_like(sorted_gates)
    ids[sorted_pairs], gates[sorted_pairs] = sorted_ids, sorted_gates
    output = run_experts(rows, ids.reshape(rows.shape[0], -1), gates.reshape(rows.shape[0], -1))
    bias = getattr(block, "bias", None)
    return (output if bias is None else output + bias).reshape(layer_input.shape)
