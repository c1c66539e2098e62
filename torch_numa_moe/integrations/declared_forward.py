"""What an experts class does behind transformers' interface when no implementation replaces it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


def _dispatched_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that transformers' decorator wrapped.

    It may be a base class's: what the subclass's own forward does around it stays outside of the interface.
    """
    for base in type(module).__mro__:
        wrapped: Callable[..., Any] | None = getattr(vars(base).get("forward"), "__wrapped__", None)
        if wrapped is not None:
            return wrapped
    return None


def uses_only(module: nn.Module, parameter_names: Collection[str]) -> bool:
    """Whether the forward that an implementation replaces runs without any other weights."""
    forward = _dispatched_forward(module)
    if forward is None:
        return False
    trial = copy.copy(module)
    vars(trial)["_parameters"] = {name: module._parameters[name] for name in parameter_names}
    vars(trial)["_buffers"] = {}
    vars(trial)["_modules"] = {
        name: child
        for name, child in module._modules.items()
        if child is not None and not [*child.parameters(), *child.buffers()]
    }
    down = module.get_parameter("down_proj")
    hidden_size = down.shape[2 if getattr(module, "is_transposed", False) else 1]
    rows = down.new_ones((2, hidden_size))
    ids = torch.tensor([[0], [down.shape[0] - 1]])
    try:
        with torch.no_grad():
            return bool(forward(trial, rows, ids, down.new_ones((2, 1))).shape == rows.shape)
    except Exception:  # noqa: BLE001  (the model's own code may raise anything)
        return False
