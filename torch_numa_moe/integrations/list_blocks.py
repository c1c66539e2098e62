"""Blocks around a list of experts whose routing is understood: one op call for all experts.

Two kinds: those with a method ``moe_infer(hidden_states, ids, weights)`` (DeepSeek's own code and its kin),
and those that choose by the softmax of a linear ``gate`` (Mixtral's and Qwen's blocks of transformers 4).
What isn't understood keeps the model's own forward, with an op call for each expert: right, but slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_numa_moe.integrations import expert_lists
from torch_numa_moe.integrations.expert_weights import ExpertWeights, WeightLayout, reference_experts
from torch_numa_moe.integrations.replaced_module import MethodReplacement, ReplacementSpec, packed_of
from torch_numa_moe.integrations.trial import (
    TRIAL_ROWS,
    inference,
    random_rows,
    relative_error,
    tolerance,
)

_EXPERTS = "experts"
_SMALL = 2.0**-7
"""Scales rows such that a router finds all experts about equally good: the weights chosen are then far from 1
in sum, which tells a router that divides by that sum from one that doesn't."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def matches(module: nn.Module) -> bool:
    """Whether it is a block around a list of experts that may be one of the two kinds."""
    experts = module._modules.get(_EXPERTS)
    return (
        experts is not None
        and expert_lists.matches(_EXPERTS, experts)
        and (_has_infer_method(module) or _has_softmax_router(module))
    )


def _has_infer_method(module: nn.Module) -> bool:
    return callable(getattr(module, "moe_infer", None))


def _has_softmax_router(module: nn.Module) -> bool:
    children = {name for name, child in module.named_children() if [*child.parameters()]}
    return (
        isinstance(module._modules.get("gate"), nn.Linear)
        and isinstance(getattr(module, "top_k", None), int)
        and children in ({"gate", _EXPERTS}, {"gate", _EXPERTS, "shared_expert", "shared_expert_gate"})
    )


def check(module: nn.Module) -> ReplacementSpec:
    """How to pack the block. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    inner = expert_lists.check(module.get_submodule(_EXPERTS))
    layout = _ListLayout(inner.layout)
    weights = layout(module)

    def run_reference(rows: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        return reference_experts(weights, inner.gate, rows, ids, scales).to(rows.dtype)

    methods = [
        MethodReplacement(f"{_EXPERTS}.{one.module}", one.name, one.function, one.values)
        for one in inner.methods
    ]
    if _has_infer_method(module):
        fused = _check_infer_method(module, weights, run_reference)
    else:
        fused = _check_softmax_router(module, weights, run_reference)
    if fused is not None:
        methods.append(fused)
    names = tuple(f"{_EXPERTS}.{name}" for name in inner.parameter_names)
    return ReplacementSpec(module, layout, names, inner.gate, tuple(methods))


class _ListLayout:
    """Finds the weights in the block, given how they are found in its list."""

    def __init__(self, inner: WeightLayout) -> None:
        self.inner = inner

    def __call__(self, module: nn.Module) -> list[ExpertWeights]:
        return self.inner(module.get_submodule(_EXPERTS))


def _check_infer_method(
    module: Any, weights: list[ExpertWeights], run_reference: Experts
) -> MethodReplacement | None:
    dtype = weights[0].gate.dtype
    rows = random_rows(TRIAL_ROWS, weights[0].gate.shape[2], dtype)
    ids = torch.arange(2 * TRIAL_ROWS).reshape(TRIAL_ROWS, 2) % len(weights)
    scales = random_rows(TRIAL_ROWS, 2, dtype).abs()
    try:
        with inference(module):
            actual = module.moe_infer(rows, ids, scales)
    except Exception:  # noqa: BLE001  (the model's own code may raise anything)
        return None
    if relative_error(actual, run_reference(rows, ids, scales)) > tolerance(dtype):
        return None
    return MethodReplacement("", "moe_infer", _moe_infer)


def _moe_infer(self: nn.Module, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    packed, _ = packed_of(self)
    return packed(hidden_states, topk_ids, topk_weights)


def _check_softmax_router(
    module: Any, weights: list[ExpertWeights], run_reference: Experts
) -> MethodReplacement | None:
    dtype = weights[0].gate.dtype
    rows = random_rows(TRIAL_ROWS, weights[0].gate.shape[2], dtype)[None]
    for normalised in (False, True):
        fits = True
        for inputs in (rows * _SMALL, rows):
            try:
                with inference(module):
                    actual = module(inputs)
                    expected = _run_block(module, run_reference, normalised, inputs)
            except Exception:  # noqa: BLE001  (the model's own code may raise anything)
                return None
            fits = fits and _same_outputs(actual, expected, tolerance(dtype))
        if fits:
            values = {"normalised": normalised, "returns_logits": isinstance(actual, tuple)}
            return MethodReplacement("", "forward", _forward, values)
    return None


def _same_outputs(actual: Any, expected: tuple[Tensor, Tensor], allowed: float) -> bool:
    """Whether a block's own output, with or without the router's logits, is what is expected."""
    if isinstance(actual, Tensor):
        actual = (actual,)
    if not isinstance(actual, tuple) or len(actual) > len(expected):
        return False
    return all(
        isinstance(one, Tensor) and relative_error(one, other) <= allowed
        for one, other in zip(actual, expected, strict=False)
    )


def _forward(self: nn.Module, hidden_states: Tensor) -> Any:
    packed, values = packed_of(self)
    output, logits = _run_block(self, packed, values["normalised"], hidden_states)
    return (output, logits) if values["returns_logits"] else output


def _run_block(
    block: Any, run_experts: Experts, normalised: bool, hidden_states: Tensor
) -> tuple[Tensor, Tensor]:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = block.gate(rows)
    weights, ids = functional.softmax(logits, dim=1, dtype=torch.float32).topk(block.top_k, dim=-1)
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    output = run_experts(rows, ids, weights)
    if hasattr(block, "shared_expert"):
        output = output + functional.sigmoid(block.shared_expert_gate(rows)) * block.shared_expert(rows)
    return output.reshape(hidden_states.shape), logits
