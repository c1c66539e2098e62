"""Experts that lie one after another in three matrices w1 (gate), v1 (up) and w2 (down) (DBRX).

Each matrix is ``[num_experts * intermediate_size, hidden_size]``.
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

_PARAMETERS = ("mlp.w1", "mlp.v1", "mlp.w2")


def matches(module: nn.Module) -> bool:
    """Whether it is such a module: a number of experts, and an ``mlp`` with the three matrices."""
    mlp = module._modules.get("mlp")
    return (
        isinstance(mlp, nn.Module)
        and isinstance(getattr(module, "num_experts", None), int)
        and mlp._parameters.keys() == {"w1", "v1", "w2"}
        and all(parameter is not None and parameter.dim() == 2 for parameter in mlp._parameters.values())
    )


def check(module: nn.Module) -> ReplacementSpec:
    """How to pack the module. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    check_source(module, _PARAMETERS)
    num_experts: Any = module.num_experts
    rows = module.get_parameter("mlp.w1").shape[0]
    if num_experts < 1 or rows % num_experts:
        raise UnsupportedExpertsError(f"mlp.w1 has {rows} rows, which aren't {num_experts} experts'")
    weights = _layout(module)
    check_weights(weights)
    gate = find_activation(module.get_submodule("mlp"), weights[0].gate.shape[1])
    dtype = module.get_parameter("mlp.w1").dtype
    hidden_states = random_rows(TRIAL_ROWS, weights[0].gate.shape[2], dtype)
    ids = torch.arange(2 * TRIAL_ROWS).reshape(TRIAL_ROWS, 2) % num_experts
    scales = random_rows(TRIAL_ROWS, 2, dtype).abs()
    expected = reference_experts(weights, gate, hidden_states, ids, scales)
    with inference(module):
        check_trial(lambda: module(hidden_states[None], ids, scales)[0], expected, dtype, "its forward")
    return ReplacementSpec(module, _layout, _PARAMETERS, gate, (MethodReplacement("", "forward", _forward),))


def _layout(module: nn.Module) -> list[ExpertWeights]:
    num_experts: Any = module.num_experts
    gate, up, down = (
        module.get_parameter(name).detach().unflatten(0, (num_experts, -1)) for name in _PARAMETERS
    )
    return [ExpertWeights(gate, up, down.transpose(1, 2))]


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    packed, _ = packed_of(self)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return packed(rows, top_k_index, top_k_weights).view(hidden_states.shape)
