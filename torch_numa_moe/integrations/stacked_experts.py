"""Modules with stacked experts, as behind transformers' interface, that aren't behind it.

They have parameters gate_up_proj and down_proj of three dimensions, and a forward of hidden states, ids and
weights. If down_proj is of fewer experts, the others are identities, whose gate_up_proj is unused
(LongCat-Flash before it was behind the interface).
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.activation_probe import (
    GateFunction,
    UnknownGateFunctionError,
    probe_gate,
)
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
    find_activation,
    inference,
    random_rows,
    trial_problem,
)
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError

_PARAMETERS = ("gate_up_proj", "down_proj")


def matches(module: nn.Module) -> bool:
    """Whether it is such a module."""
    parameters = module._parameters
    return all(
        (parameter := parameters.get(name)) is not None and parameter.dim() == 3 for name in _PARAMETERS
    )


def check(module: nn.Module) -> ReplacementSpec:
    """How to pack the module. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    check_source(module, _PARAMETERS)
    unknown = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]} - {*_PARAMETERS}
    if unknown:
        raise UnsupportedExpertsError(
            f"it has weights that the op doesn't know: {', '.join(sorted(unknown))}"
        )
    if len(inspect.signature(module.forward).parameters) != 3:
        raise UnsupportedExpertsError(
            "its forward isn't one of hidden states, ids and weights, and the block around it isn't known"
        )
    problem: str | None = (
        f"gate_up_proj {list(module.get_parameter('gate_up_proj').shape)} doesn't go with "
        f"down_proj {list(module.get_parameter('down_proj').shape)}"
    )
    for transposed in (False, True):
        intermediate_size = _intermediate_size(module, transposed)
        if intermediate_size is None:
            continue
        for interleaved, gate in _possible_gates(module, intermediate_size):
            layout = _Layout(transposed=transposed, interleaved=interleaved)
            problem = _find_problem(module, layout, gate)
            if problem is None:
                num_identities = _num_identities(module)
                forward = _forward_with_identities if num_identities else _forward
                unpacked = {"gate_up_proj": num_identities} if num_identities else {}
                methods = (MethodReplacement("", "forward", forward),)
                return ReplacementSpec(module, layout, _PARAMETERS, gate, methods, unpacked)
    assert problem is not None
    raise UnsupportedExpertsError(problem)


class _Layout:
    """Finds the weights: with the last two dimensions swapped or not, rows in halves or interleaved."""

    def __init__(self, *, transposed: bool, interleaved: bool) -> None:
        self.transposed, self.interleaved = transposed, interleaved

    def __call__(self, module: nn.Module) -> list[ExpertWeights]:
        gate_up, down = (module.get_parameter(name).detach() for name in _PARAMETERS)
        gate_up = gate_up[: down.shape[0]]
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        if self.interleaved:
            return [ExpertWeights(gate_up[:, 0::2], gate_up[:, 1::2], down)]
        size = gate_up.shape[1] // 2
        return [ExpertWeights(gate_up[:, :size], gate_up[:, size:], down)]


def _num_identities(module: nn.Module) -> int:
    gate_up, down = (module.get_parameter(name) for name in _PARAMETERS)
    return max(0, gate_up.shape[0] - down.shape[0])


def _intermediate_size(module: nn.Module, transposed: bool) -> int | None:
    """The size, if the two parameters go together in this layout."""
    (weights,) = _Layout(transposed=transposed, interleaved=False)(module)
    fits = weights.down.shape == (weights.num_experts, *reversed(weights.gate.shape[1:]))
    return weights.gate.shape[1] if fits and weights.gate.numel() > 0 else None


def _possible_gates(module: nn.Module, intermediate_size: int) -> list[tuple[bool, GateFunction]]:
    """What the gate function may be, and whether it reads interleaved rows."""
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        activation = find_activation(module, intermediate_size)
        return [(False, activation), (True, activation)]
    reason = ""
    for interleaved in (False, True):
        try:
            return [(interleaved, probe_gate(apply_gate, intermediate_size, interleaved=interleaved))]
        except UnknownGateFunctionError as error:  # noqa: PERF203  (two rounds)
            reason = str(error)
        except Exception as error:  # noqa: BLE001  (the model's own code may raise anything)
            reason = f"its gate function can't be probed: {type(error).__name__}: {error}"
    raise UnsupportedExpertsError(reason)


def _find_problem(module: nn.Module, layout: _Layout, gate: GateFunction) -> str | None:
    weights = layout(module)
    check_weights(weights)
    dtype = module.get_parameter("down_proj").dtype
    hidden_states = random_rows(TRIAL_ROWS, weights[0].gate.shape[2], dtype)
    num_experts, num_identities = weights[0].num_experts, _num_identities(module)
    ids = torch.arange(2 * TRIAL_ROWS).reshape(TRIAL_ROWS, 2) * (num_experts + num_identities)
    ids //= 2 * TRIAL_ROWS
    scales = random_rows(TRIAL_ROWS, 2, dtype).abs()
    expected = reference_experts(weights, gate, hidden_states, ids, scales)
    if num_identities:
        expected += _identities(hidden_states, ids, scales, num_experts)
    with inference(module):
        problem = trial_problem(lambda: module(hidden_states, ids, scales), expected, dtype, "its forward")
        if problem is None and num_identities == 0 and _adds_something(module, hidden_states, num_experts):
            problem = f"its forward does something for ids from {num_experts} on, which it has no weights for"
    return problem


def _adds_something(module: nn.Module, hidden_states: Tensor, beyond: int) -> bool:
    """Whether an id that no expert has does anything, other than failing."""
    ids = torch.full((hidden_states.shape[0], 1), beyond)
    try:
        return bool(module(hidden_states, ids, hidden_states.new_ones(ids.shape)).any())
    except Exception:  # noqa: BLE001  (such an id never comes, then)
        return False


def _identities(hidden_states: Tensor, ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    return hidden_states * weights.masked_fill(ids < num_experts, 0).sum(dim=-1, keepdim=True)


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    packed, _ = packed_of(self)
    return packed(hidden_states, top_k_index, top_k_weights)


def _forward_with_identities(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    packed, _ = packed_of(self)
    identities = _identities(hidden_states, top_k_index, top_k_weights, packed.num_experts)
    return packed(hidden_states, top_k_index, top_k_weights) + identities.to(hidden_states.dtype)
