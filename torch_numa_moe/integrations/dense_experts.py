"""Blocks whose router scales the experts' inputs, by zero for experts that weren't chosen (Llama-4).

The model's own code runs all experts on all tokens; here only those chosen run, on inputs scaled alike.
"""

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

_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")


def matches(module: nn.Module) -> bool:
    """Whether it is such a block: a router, a shared expert, and stacked experts that take rows alone."""
    experts = module._modules.get("experts")
    return (
        isinstance(experts, nn.Module)
        and {"router", "shared_expert"} <= module._modules.keys()
        and isinstance(getattr(module, "top_k", None), int)
        and experts._parameters.keys() == {"gate_up_proj", "down_proj"}
        and all(parameter is not None and parameter.dim() == 3 for parameter in experts._parameters.values())
    )


def check(module: nn.Module) -> ReplacementSpec:
    """How to pack the block. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    check_source(module, _PARAMETERS)
    weights = _layout(module)
    check_weights(weights)
    experts = module.get_submodule("experts")
    gate = find_activation(experts, weights[0].gate.shape[1])

    def run_reference(rows: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        return reference_experts(weights, gate, rows, ids, scales).to(rows.dtype)

    dtype = experts.get_parameter("down_proj").dtype
    hidden_states = random_rows(TRIAL_ROWS, weights[0].gate.shape[2], dtype)[None]
    with inference(module):
        try:
            expected, _ = _run_block(module, run_reference, hidden_states)
        except Exception as error:  # the model's own code may raise anything
            raise UnsupportedExpertsError(f"its router isn't understood: {error}") from error
        check_trial(lambda: module(hidden_states)[0], expected, dtype, "its forward")
    return ReplacementSpec(module, _layout, _PARAMETERS, gate, (MethodReplacement("", "forward", _forward),))


def _layout(module: nn.Module) -> list[ExpertWeights]:
    gate_up = module.get_parameter("experts.gate_up_proj").detach().transpose(1, 2)
    down = module.get_parameter("experts.down_proj").detach().transpose(1, 2)
    size = gate_up.shape[1] // 2
    return [ExpertWeights(gate_up[:, :size], gate_up[:, size:], down)]


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    packed, _ = packed_of(self)
    return _run_block(self, packed, hidden_states)


def _run_block(block: Any, run_experts: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = block.router(rows)
    top_scores, ids = scores.topk(block.top_k, dim=1)
    # The scale is on the input, before the activation: a row for each pair of token and expert.
    scaled = rows.repeat_interleave(block.top_k, dim=0) * top_scores.reshape(-1, 1)
    ones = torch.ones_like(top_scores).reshape(-1, 1)
    routed = run_experts(scaled, ids.reshape(-1, 1), ones).reshape(*ids.shape, -1).sum(dim=1)
    return block.shared_expert(rows) + routed, logits
