"""Tries a module on a few random rows, to see whether it computes what was read off its structure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.activation_probe import (
    GateFunction,
    UnknownGateFunctionError,
    probe_activation,
)
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError

TRIAL_ROWS = 3


@contextlib.contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Runs a block in eval mode, without gradients, and with random numbers that disturb nobody's."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for child in training:
            child.training = True


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """``[num_rows, width]``, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((num_rows, width), generator=generator).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; inf unless all are finite and of one shape."""
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = actual.float(), expected.float()
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways to compute the same in this dtype may be apart."""
    return 1e-4 if dtype == torch.float32 else 3e-2


def trial_problem(run: Callable[[], Any], expected: Tensor, dtype: torch.dtype, what: str) -> str | None:
    """Runs a module's own code, and says how what it computes isn't what is expected; None if it is."""
    try:
        actual = run()
    except Exception as error:  # noqa: BLE001  (the model's own code may raise anything)
        return f"{what} can't be tried: {type(error).__name__}: {error}"
    difference = relative_error(actual, expected) if isinstance(actual, Tensor) else math.inf
    if difference <= tolerance(dtype):
        return None
    return (
        f"{what} computes something else than its structure suggests (tried on {TRIAL_ROWS} random rows: "
        f"relative difference {difference:.1g})"
    )


def check_trial(run: Callable[[], Any], expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Runs a module's own code, and compares.

    Raises:
        UnsupportedExpertsError: if it fails, or computes something else.
    """
    problem = trial_problem(run, expected, dtype, what)
    if problem is not None:
        raise UnsupportedExpertsError(problem)


def find_activation(module: nn.Module, intermediate_size: int) -> GateFunction:
    """The activation that a module holds as a child or as an attribute, by value.

    Raises:
        UnsupportedExpertsError: if it holds none that the op computes.
    """
    held = [*module.children(), *vars(module).values()]
    candidates = [
        one
        for one in held
        if callable(one) and not (isinstance(one, nn.Module) and [*one.parameters(), *one.children()])
    ]
    reason = "it has no activation function"
    for candidate in candidates:
        found, reason = _try_activation(candidate, intermediate_size, reason)
        if found is not None:
            return found
    raise UnsupportedExpertsError(reason)


def _try_activation(
    candidate: Callable[..., Any], intermediate_size: int, reason: str
) -> tuple[GateFunction | None, str]:
    """What a callable computes, or None and why: the reason so far, if it is no activation at all."""
    try:
        return probe_activation(candidate, intermediate_size), reason
    except UnknownGateFunctionError as error:
        return None, str(error)
    except Exception:  # noqa: BLE001  (whatever that is, it isn't an activation)
        return None, reason
