"""Which gate functions are recognised, and with which constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torch_numa_moe.integrations.activation_probe import (
    GateFunction,
    UnknownGateFunctionError,
    probe_activation,
    probe_gate,
)

SIZE = 37


def joined(function: Callable[[Tensor, Tensor], Tensor], interleaved: bool) -> Callable[[Tensor], Tensor]:
    def apply_gate(rows: Tensor) -> Tensor:
        assert rows.shape[-1] == 2 * SIZE
        if interleaved:
            return function(rows[..., ::2], rows[..., 1::2])
        gate, up = rows.chunk(2, dim=-1)
        return function(gate, up)

    return apply_gate


def oai(alpha: float, limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return function


def clamp_input(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamp_output(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


GATES: list[tuple[Callable[[Tensor, Tensor], Tensor], GateFunction]] = [
    (lambda gate, up: functional.silu(gate) * up, GateFunction("silu")),
    (lambda gate, up: functional.gelu(gate) * up, GateFunction("gelu")),
    (lambda gate, up: functional.gelu(gate, approximate="tanh") * up, GateFunction("gelu_tanh")),
    (lambda gate, up: functional.relu(gate) * up, GateFunction("relu")),
    (lambda gate, up: functional.relu(gate).square() * up, GateFunction("relu2")),
    (oai(1.702, 7.0), GateFunction("swiglu_oai", 1.702, 7.0)),
    (oai(1.25, 0.5), GateFunction("swiglu_oai", 1.25, 0.5)),
    (oai(1.702, float("inf")), GateFunction("swiglu_oai", 1.702)),
    (clamp_input(10.0), GateFunction("silu_clamp_input", limit=10.0)),
    (clamp_input(1.5), GateFunction("silu_clamp_input", limit=1.5)),
    (clamp_output(4.0), GateFunction("silu_clamp_output", limit=4.0)),
    (clamp_output(2.0), GateFunction("silu_clamp_output", limit=2.0)),
]


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("function", "expected"), GATES, ids=[str(expected) for _, expected in GATES])
def test_gate_functions(
    function: Callable[[Tensor, Tensor], Tensor], expected: GateFunction, interleaved: bool, in_fp32: bool
) -> None:
    def own_precision(gate: Tensor, up: Tensor) -> Tensor:
        return function(gate.float(), up.float()) if in_fp32 else function(gate, up)

    found = probe_gate(joined(own_precision, interleaved), SIZE, interleaved=interleaved)
    assert found == GateFunction(expected.activation, expected.alpha, expected.limit, interleaved)


def test_the_nearest_of_two_that_match() -> None:
    """silu(16) is 16 to seven digits, so clamping at 16 before or after it is nearly the same."""
    for function, name in ((clamp_input, "silu_clamp_input"), (clamp_output, "silu_clamp_output")):
        assert probe_gate(joined(function(16.0), False), SIZE, interleaved=False) == GateFunction(
            name, limit=16.0
        )


def test_constants_are_taken_from_those_given() -> None:
    """A limit that six digits don't hold is the module's own number, not what was read off."""
    limit, alpha = 6.9314718056, 1.70200012345
    found = probe_gate(
        joined(oai(alpha, limit), False), SIZE, interleaved=False, constants=[SIZE, limit, alpha]
    )
    assert (found.alpha, found.limit) == (alpha, limit)


def test_a_gate_function_that_insists_on_fp32() -> None:
    def apply_gate(rows: Tensor) -> Tensor:
        if rows.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        return functional.silu(rows[:, :SIZE]) * rows[:, SIZE:]

    assert probe_gate(apply_gate, SIZE, interleaved=False) == GateFunction("silu")


@pytest.mark.parametrize(
    "function",
    [
        lambda gate, up: functional.silu(gate.clamp(max=7.0)) * up.clamp(-8, 8),
        lambda gate, up: functional.silu(gate.clamp(-7, 7)) * up.clamp(-7, 7),
        lambda gate, up: functional.relu(gate.clamp(max=7.0)) * up.clamp(-7, 7),
        lambda gate, up: (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate),
        lambda gate, up: (up + 1) * functional.gelu(gate),
        lambda gate, up: functional.silu(gate) * up.abs(),
        lambda gate, up: functional.silu(gate) * torch.where(gate > 50, 0, up),
        lambda gate, up: 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25),
    ],
)
def test_near_misses_are_not_recognised(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(UnknownGateFunctionError, match="none of those that the op computes"):
        probe_gate(joined(function, False), SIZE, interleaved=False)


# Every activation that transformers offers by name; those that differ only by rounding are welcome.
RECOGNISED = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


TRAINED = ("prelu", "xielu")
"""Have parameters."""


def test_transformers_activations_by_value() -> None:
    activations = pytest.importorskip("transformers.activations")
    found = {}
    for name in activations.ACT2FN:
        if name in TRAINED:
            continue
        try:
            found[name] = probe_activation(activations.ACT2FN[name], SIZE).activation
        except UnknownGateFunctionError:
            continue
    assert found == RECOGNISED
