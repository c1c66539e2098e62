"""Experts that are modules of their own, in a ModuleList or ModuleDict.

Each is two or three linear layers: gate_proj, up_proj and down_proj; w1, w3 and w2; fc1 and fc2; or whatever
they are called. Which layer is which, and what the activation is, is found out by running an expert on random
rows. The block around the list keeps its own forward: each expert that it calls becomes a call of the op with
that expert alone, so routers, capacities, scales and shared experts are the model's own.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.activation_probe import PLAIN_ACTIVATIONS, GateFunction
from torch_numa_moe.integrations.expert_weights import ExpertWeights, reference_experts
from torch_numa_moe.integrations.replaced_module import (
    MethodReplacement,
    ReplacementSpec,
    check_source,
    check_weights,
    packed_of,
)
from torch_numa_moe.integrations.trial import inference, random_rows, relative_error
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError

_TRIAL_TOLERANCE = 2e-5
"""In fp32. The two nearest candidates, gelu and its tanh form, differ by 2e-4."""


def matches(name: str, module: nn.Module) -> bool:
    """Whether it is a list of routed experts, by its name: other lists may hold MLPs as well."""
    own_name = name.rpartition(".")[2].lower()
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and "expert" in own_name
        and "shared" not in own_name
        and len(_experts(module)) > 1
    )


def _experts(module: nn.Module) -> dict[str, nn.Module]:
    """The experts of a list by name, without what else it may hold (a dropout)."""
    return {name: child for name, child in module.named_children() if [*child.parameters()]}


def check(module: nn.Module) -> ReplacementSpec:
    """How to pack the list. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    experts = _experts(module)
    first_name, first = next(iter(experts.items()))
    if isinstance(first, nn.Linear):
        raise UnsupportedExpertsError(
            "each expert is one linear layer, not an FFN: there is nothing for the op between two layers"
        )
    for name, expert in experts.items():
        if type(expert) is not type(first):
            raise UnsupportedExpertsError(
                f"its experts are of different classes: {first_name} is a {type(first).__name__}, "
                f"{name} a {type(expert).__name__}"
            )
    parameter_names = tuple(name for name, _ in module.named_parameters())
    check_source(module, parameter_names)
    roles, gate = _identify(first)
    last_roles, last_gate = _identify(list(experts.values())[-1])
    if (roles, gate) != (last_roles, last_gate):
        raise UnsupportedExpertsError("its first and its last expert don't compute the same function")
    layout = _Layout(roles)
    check_weights(layout(module))
    methods = tuple(
        MethodReplacement(name, "forward", _forward, {"expert": index}) for index, name in enumerate(experts)
    )
    return ReplacementSpec(module, layout, parameter_names, gate, methods)


class _Layout:
    """Finds the weights, given the names of the linear layers of gate (and up) and down."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        self.roles = roles

    def __call__(self, module: nn.Module) -> list[ExpertWeights]:
        return [_weights_of(expert, self.roles) for expert in _experts(module).values()]


def _weights_of(expert: nn.Module, roles: tuple[str, ...]) -> ExpertWeights:
    layers: list[Any] = [expert.get_submodule(name) for name in roles]
    weights = [layer.weight.detach()[None] for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach()[None] for layer in layers]
    up = (weights[1], biases[1]) if len(layers) == 3 else (None, None)
    return ExpertWeights(weights[0], up[0], weights[-1], biases[0], up[1], biases[-1])


def _identify(expert: nn.Module) -> tuple[tuple[str, ...], GateFunction]:
    """Which linear layer is gate, up and down, and the activation: those that give what the expert gives."""
    linear = {name: child for name, child in expert.named_modules() if isinstance(child, nn.Linear)}
    known = {f"{name}.{part}" for name in linear for part in ("weight", "bias")}
    unknown = {name for name, _ in [*expert.named_parameters(), *expert.named_buffers()]} - known
    if len(linear) not in (2, 3) or unknown:
        raise UnsupportedExpertsError(
            f"an expert ({type(expert).__name__}) isn't an FFN of two or three linear layers: it has "
            f"{', '.join(sorted([*linear, *unknown])) or 'none'}"
        )
    # In fp32, whatever the model is in: activations that are nearly the same can't be told apart in bf16.
    trial = copy.deepcopy(expert).float().eval()
    smallest, best, failure = math.inf, None, ""
    with inference(trial):
        for roles in _possible_roles(linear):
            weights = _weights_of(trial, roles)
            rows = _rows_for(weights)
            try:
                output = trial(rows)
            except Exception as error:  # noqa: BLE001  (the model's own code may raise anything)
                failure = f" (tried on rows alone: {type(error).__name__}: {error})"
                continue
            if not isinstance(output, Tensor):
                continue
            ids = torch.zeros((rows.shape[0], 1), dtype=torch.int64)
            for name in PLAIN_ACTIVATIONS:
                function = GateFunction(name)
                expected = reference_experts([weights], function, rows, ids, torch.ones(ids.shape))
                difference = relative_error(output, expected)
                if difference < smallest:
                    smallest, best = difference, (roles, function)
    if best is None or smallest > _TRIAL_TOLERANCE:
        raise UnsupportedExpertsError(
            f"an expert ({type(expert).__name__}) isn't down(activation(gate(x)) * up(x)) or "
            f"down(activation(up(x))) of its linear layers with an activation of the op "
            f"({', '.join(PLAIN_ACTIVATIONS)}){failure}"
        )
    return best


def _possible_roles(linear: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Orders of the layers in which the shapes go together."""
    for roles in itertools.permutations(linear):
        first, *_, down = (linear[name] for name in roles)
        fits = first.in_features == down.out_features and first.out_features == down.in_features
        if fits and all(linear[name].weight.shape == first.weight.shape for name in roles[:-1]):
            yield roles


def _rows_for(weights: ExpertWeights) -> Tensor:
    """Random rows, scaled such that an activation works on numbers around 3, where it isn't nearly linear."""
    rows = random_rows(4, weights.gate.shape[2], torch.float32)
    size = float((rows @ weights.gate[0].T).square().mean().sqrt())
    return rows * (3 / size) if size > 0 else rows


def _forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    packed, values = packed_of(self)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    ids = torch.full((rows.shape[0], 1), values["expert"], dtype=torch.int64, device=rows.device)
    return packed(rows, ids, rows.new_ones((rows.shape[0], 1))).view(hidden_states.shape)
