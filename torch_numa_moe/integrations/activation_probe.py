"""Finds out which of the op's activations a transformers experts module computes, by trying it.

Names and configuration strings aren't asked: the gate function is evaluated on chosen and on random numbers,
its constants are read off, and it is compared with every candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
CLAMPED_ACTIVATIONS = ("silu_clamp_input", "silu_clamp_output")

_HUGE = 1e6
"""A limit above this is no limit: activations of real models stay far below."""

_RELATIVE_TOLERANCE = 1e-5
"""Two of the candidates differ by 2e-4 of the gate at the least (gelu and its tanh form); gate functions that
compute in fp32 whatever they are given are right to about 1e-7 of it."""


@dataclass(frozen=True)
class GateFunction:
    """An activation of the op, as :func:`torch_numa_moe.pack_experts` takes it.

    Attributes:
        activation: its name.
        alpha: for ``"swiglu_oai"``, else None.
        limit: for the clamped ones, None if there is no limit.
        interleaved: gate and up rows alternate, instead of all gates before all ups.
    """

    activation: str
    alpha: float | None = None
    limit: float | None = None
    interleaved: bool = False

    def __str__(self) -> str:
        constants = [
            f"{name}={value:g}"
            for name, value in (("alpha", self.alpha), ("limit", self.limit))
            if value is not None
        ]
        return self.activation + (f"({', '.join(constants)})" if constants else "")


class UnknownGateFunctionError(ValueError):
    """The gate function is none of the op's activations; the message says what was compared."""


def probe_gate(
    apply_gate: Callable[[Tensor], Tensor],
    intermediate_size: int,
    *,
    interleaved: bool,
    constants: Iterable[float] = (),
) -> GateFunction:
    """Identifies a gated module's function of gate and up.

    Args:
        apply_gate: takes ``[n, 2 * intermediate_size]``, returns ``[n, intermediate_size]``.
        intermediate_size: the module's own, since a gate function may insist on it.
        interleaved: the layout that the module declares.
        constants: numbers that alpha and limit are likely to be (the module's own numeric attributes): a
            constant that was read off is taken to be the one it nearly equals.

    Raises:
        UnknownGateFunctionError: if no activation of the op computes the same.
    """
    constants = tuple(constants)
    for layout in (interleaved, not interleaved):
        probe = _Probe(apply_gate, intermediate_size, layout)
        found = probe.best_match(_gated_candidates(probe, constants))
        if found is None:
            continue
        if layout != interleaved:
            declared, read = ("interleaved", "halves") if interleaved else ("halves", "interleaved")
            raise UnknownGateFunctionError(
                f"it declares its gate and up rows as {declared}, but its gate function reads them as {read}"
            )
        return found
    raise UnknownGateFunctionError(_no_match("gate function"))


def probe_activation(activation: Callable[[Tensor], Tensor], intermediate_size: int) -> GateFunction:
    """Identifies the function of a module without a gate: ``[n, intermediate_size]`` to the same shape.

    Raises:
        UnknownGateFunctionError: if no activation of the op computes the same.
    """
    found = _Probe(activation, intermediate_size, None).best_match(map(GateFunction, PLAIN_ACTIVATIONS))
    if found is None:
        raise UnknownGateFunctionError(_no_match("activation"))
    return found


def _no_match(what: str) -> str:
    known = ", ".join((*PLAIN_ACTIVATIONS, "swiglu_oai", *CLAMPED_ACTIVATIONS))
    return f"its {what} is none of those that the op computes ({known})"


def _gated_candidates(probe: _Probe, constants: tuple[float, ...]) -> Iterator[GateFunction]:
    layout = bool(probe.interleaved)
    limit = probe.find_limit(constants)
    if limit is None:
        yield from (GateFunction(name, interleaved=layout) for name in PLAIN_ACTIVATIONS)
    else:
        yield from (GateFunction(name, limit=limit, interleaved=layout) for name in CLAMPED_ACTIVATIONS)
    alpha = probe.find_alpha(limit, constants)
    if alpha is not None:
        yield GateFunction("swiglu_oai", alpha=alpha, limit=limit, interleaved=layout)


def _nearest(value: float, constants: tuple[float, ...]) -> float:
    """The constant that value nearly equals, or value rounded to what its computation can be trusted for."""
    best = min(constants, key=lambda constant: abs(constant - value), default=math.inf)
    return best if abs(best - value) <= 1e-4 * abs(value) else float(f"{value:.6g}")


class _Probe:
    """A gate function with chosen gates and ups; ``interleaved`` None: a function of one row, without up."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], intermediate_size: int, interleaved: bool | None
    ) -> None:
        self._function = function
        self._intermediate_size = intermediate_size
        self.interleaved = interleaved

    def _evaluate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The function of ``[n, intermediate_size]`` gates and ups, in float64 unless it refuses that."""
        if self.interleaved is None:
            rows = gate
        elif self.interleaved:
            rows = torch.stack((gate, up), dim=2).flatten(1, 2)
        else:
            rows = torch.cat((gate, up), dim=1)
        with torch.no_grad():
            try:
                result = self._function(rows.clone())
            except (RuntimeError, TypeError):
                result = self._function(rows.float())
        if not isinstance(result, Tensor) or result.shape != gate.shape:
            shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise UnknownGateFunctionError(f"its gate function returns {shape}, not {list(gate.shape)}")
        return result.double()

    def _at(self, gate: float, up: float) -> float:
        shape = (1, self._intermediate_size)
        values = self._evaluate(
            torch.full(shape, gate, dtype=torch.float64), torch.full(shape, up, dtype=torch.float64)
        )
        return float(values[0, 0])

    def find_limit(self, constants: tuple[float, ...]) -> float | None:
        """Where the function stops growing with up. All candidates are linear in up below their limit."""
        # Below every limit in use, and large enough for a difference in fp32.
        base, small = self._at(1.0, 0.0), 2.0**-4
        slope = (self._at(1.0, small) - base) / small
        if slope == 0 or not math.isfinite(slope):
            return None
        limit = (self._at(1.0, _HUGE) - base) / slope
        if not 0 < limit < 0.99 * _HUGE:
            return None
        return _nearest(limit, constants)

    def find_alpha(self, limit: float | None, constants: tuple[float, ...]) -> float | None:
        """The alpha of gate * sigmoid(alpha * gate) * (up + 1), read at up = 0 below the limit."""
        gate = 1.0 if limit is None else min(1.0, limit / 2)
        sigmoid = self._at(gate, 0.0) / gate
        if not 0 < sigmoid < 1:
            return None
        return _nearest(math.log(sigmoid / (1 - sigmoid)) / gate, constants)

    def best_match(self, candidates: Iterable[GateFunction]) -> GateFunction | None:
        """The candidate nearest to the function, if it is near enough to be the same."""
        # Some are nearly the same: clamping at 16 before silu or after it differs by 1e-7.
        error, best = min(
            ((self._error(candidate), candidate) for candidate in candidates),
            key=lambda pair: pair[0],
            default=(math.inf, None),
        )
        return best if error <= 1 else None

    def _error(self, candidate: GateFunction) -> float:
        """Largest difference from the candidate, in units of what is allowed; inf if one isn't finite."""
        gate, up = self._random_inputs(candidate.limit)
        result = self._evaluate(gate, up)
        if self.interleaved is None:
            up = torch.ones_like(up)
        factor, up_factor = _gate_factor(candidate, gate), _up_factor(candidate, up)
        expected = factor * up_factor
        # The second term is for the tails, where a factor near 0 is the difference of two near 1.
        tail = 1e-6 * gate.abs().clamp(max=10) * up_factor.abs()
        allowed = _RELATIVE_TOLERANCE * expected.abs() + tail + 1e-12
        error = float(((result - expected).abs() / allowed).max())
        return error if math.isfinite(error) else math.inf

    def _random_inputs(self, limit: float | None) -> tuple[Tensor, Tensor]:
        """Numbers around 0, around the limit, and of all magnitudes up to 10^4."""
        generator = torch.Generator().manual_seed(0)
        shape = (8, self._intermediate_size)

        def values() -> Tensor:
            normal = torch.randn(shape, generator=generator, dtype=torch.float64)
            exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * 7 - 3
            scaled = normal * (2 * limit if limit is not None else 3)
            wide = normal.sign() * 10**exponents
            kind = torch.arange(shape[0] * shape[1]).reshape(shape) % 3
            return torch.where(kind == 0, normal * 3, torch.where(kind == 1, scaled, wide))

        return values(), values().roll(1, 0).roll(1, 1)


def apply_gate_function(function: GateFunction, gate: Tensor, up: Tensor | None) -> Tensor:
    """What the op computes between its two products, of gate and up of one shape, or of gate alone."""
    factor = _gate_factor(function, gate)
    return factor if up is None else factor * _up_factor(function, up)


def _gate_factor(function: GateFunction, gate: Tensor) -> Tensor:
    limit = math.inf if function.limit is None else function.limit
    if function.activation == "silu":
        return functional.silu(gate)
    if function.activation == "gelu":
        return functional.gelu(gate)
    if function.activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    if function.activation == "relu":
        return functional.relu(gate)
    if function.activation == "relu2":
        return functional.relu(gate).square()
    if function.activation == "silu_clamp_input":
        return functional.silu(gate.clamp(max=limit))
    if function.activation == "silu_clamp_output":
        return functional.silu(gate).clamp(max=limit)
    assert function.activation == "swiglu_oai" and function.alpha is not None
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(function.alpha * gate)


def _up_factor(function: GateFunction, up: Tensor) -> Tensor:
    if function.limit is not None:
        up = up.clamp(-function.limit, function.limit)
    return up + 1 if function.activation == "swiglu_oai" else up
