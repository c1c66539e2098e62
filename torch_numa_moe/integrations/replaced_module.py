"""Packs experts that aren't behind transformers' interface.

Methods of modules are replaced by ones that call the packed experts, and put back by unpacking.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_numa_moe.integrations.activation_probe import GateFunction
from torch_numa_moe.integrations.expert_weights import (
    ExpertWeights,
    WeightLayout,
    pack_weights,
    unpack_weights,
)
from torch_numa_moe.integrations.packed_module import (
    PackedState,
    attach_state,
    format_for,
    ordinary_tensors,
)
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError
from torch_numa_moe.packing import PackedExperts

_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MethodReplacement:
    """A method to replace while experts are packed.

    Attributes:
        module: where, by name relative to the module that is packed ("" is that one).
        name: of the method, usually ``"forward"``.
        function: the new one; its first argument is the module that it is set on.
        values: attributes that the function needs there; ``packed`` is added.
    """

    module: str
    name: str
    function: Callable[..., Any]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplacementSpec:
    """A module whose experts can be packed, and how.

    Attributes:
        module: the module, which holds all of the weights.
        layout: finds the weights in it.
        parameter_names: of the parameters that packing frees.
        gate: the experts' activation.
        methods: what is replaced.
        unpacked_rows: how many experts at the end of a parameter aren't packed, by name; they are kept aside.
    """

    module: nn.Module
    layout: WeightLayout
    parameter_names: tuple[str, ...]
    gate: GateFunction
    methods: tuple[MethodReplacement, ...]
    unpacked_rows: dict[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that packing frees."""
        return [self.module.get_parameter(name) for name in self.parameter_names]

    @property
    def source_bytes(self) -> int:
        """Bytes of those parameters."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @property
    def gated(self) -> bool:
        """Whether there are up rows."""
        return self.layout(self.module)[0].up is not None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """num_experts, hidden_size and intermediate_size."""
        weights = self.layout(self.module)
        intermediate_size, hidden_size = weights[0].gate.shape[1:]
        return sum(some.num_experts for some in weights), hidden_size, intermediate_size

    @property
    def source_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds all weights as they are."""
        dtype = self.parameters[0].dtype
        for parameter in self.parameters[1:]:
            if parameter.dim() > 1:  # biases are kept in fp32
                dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype


@dataclass
class ReplacedState(PackedState):
    """What a module carries whose methods were replaced.

    Attributes:
        layout: finds the weights in the module.
        shapes: of the freed parameters, and their dtypes, by name.
        replaced: the methods that were replaced: module and method name.
        kept: the ends of parameters that aren't packed, by name.
    """

    layout: WeightLayout | None = None
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    replaced: list[tuple[str, str]] = field(default_factory=list)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def restore_weights(self, module: nn.Module) -> None:
        """Unpacks the experts into the module's parameters, in the dtype that those have now."""
        assert self.layout is not None
        targets: list[tuple[nn.Parameter, torch.device, torch.dtype]] = []
        for name, (shape, dtype) in self.shapes.items():
            parameter = module.get_parameter(name)
            targets.append((parameter, parameter.device, parameter.dtype))
            parameter.data = torch.empty(shape, dtype=dtype, device="cpu")
        unpack_weights(self.packed, self.layout(module))
        for name, end in self.kept.items():
            module.get_parameter(name).data[-end.shape[0] :] = end
        for parameter, device, dtype in targets:
            parameter.data = parameter.data.to(device=device, dtype=dtype)

    def detach(self, module: nn.Module) -> None:
        """Puts the replaced methods back, and makes the module as one that carries nothing."""
        while self.replaced:
            path, name = self.replaced.pop()
            for attribute in (name, *_VALUES):
                vars(module.get_submodule(path)).pop(attribute, None)
        super().detach(module)


def check_source(module: nn.Module, parameter_names: Sequence[str]) -> None:
    """Checks that parameters are such as can be packed, and all that the module has.

    Raises:
        UnsupportedExpertsError: with the reason.
    """
    for name in parameter_names:
        parameter = module.get_parameter(name)
        if type(parameter.data) is not torch.Tensor:
            raise UnsupportedExpertsError(
                f"{name} is a {type(parameter.data).__name__} (quantised or distributed), not a plain tensor"
            )
        if parameter.device.type != "cpu":
            raise UnsupportedExpertsError(f"{name} is on {parameter.device}; experts are packed from the CPU")
        if parameter.dtype not in _SOURCE_DTYPES:
            raise UnsupportedExpertsError(f"{name} is {parameter.dtype}, not float32, bfloat16 or float16")
    for name, child in module.named_modules():
        if hasattr(child, "_hf_hook"):
            raise UnsupportedExpertsError(
                f"accelerate manages the weights of {name or 'it'} (a device_map with several devices, or "
                "offloading); load the model without, or with one device for everything"
            )
        if "forward" in vars(child):
            raise UnsupportedExpertsError(f"the forward of {name or 'it'} has been replaced by somebody else")


def check_weights(weights: Sequence[ExpertWeights]) -> None:
    """Checks that all experts have the same shapes, and that those go together.

    Raises:
        UnsupportedExpertsError: with the reason.
    """
    first = weights[0]
    if any(some.shapes != first.shapes for some in weights):
        raise UnsupportedExpertsError("its experts differ in their shapes")
    expected = tuple(reversed(first.gate.shape[1:]))
    if first.gate.numel() == 0:
        raise UnsupportedExpertsError("its weights are empty")
    if first.up is not None and first.up.shape != first.gate.shape:
        raise UnsupportedExpertsError(
            f"its up weights {list(first.up.shape)} don't go with its gate weights {list(first.gate.shape)}"
        )
    if tuple(first.down.shape[1:]) != expected or first.down.shape[0] != first.num_experts:
        raise UnsupportedExpertsError(
            f"its down weights {list(first.down.shape)} don't go with its gate weights "
            f"{list(first.gate.shape)}"
        )
    if first.up is not None and (first.gate_bias is None) != (first.up_bias is None):
        raise UnsupportedExpertsError("it has a bias on only one of gate and up")


def pack_replaced(spec: ReplacementSpec, format: str, *, verify_placement: bool = True) -> ReplacedState:
    """Packs a module's experts, frees its parameters and replaces its methods.

    The parameters stay, as the objects they were, with no rows in them. If anything is raised, the module is
    as it was.

    Args:
        spec: the module.
        format: weight format, or ``"auto"`` for the one that rounds nothing.
        verify_placement: see :func:`torch_numa_moe.pack_experts`.
    """
    weights = spec.layout(spec.module)
    num_experts, hidden_size, intermediate_size = spec.sizes
    with ordinary_tensors():
        packed = PackedExperts(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            format=format_for(spec, format),
            activation=spec.gate.activation,
            alpha=spec.gate.alpha,
            limit=spec.gate.limit,
            gated=spec.gated,
            gate_up_bias=weights[0].gate_bias is not None,
            down_bias=weights[0].down_bias is not None,
        )
        pack_weights(packed, weights)
        if verify_placement:
            packed.verify_placement()
        state = ReplacedState(
            packed,
            spec.parameter_names,
            spec.source_dtype,
            None,
            layout=spec.layout,
            shapes={
                name: (parameter.shape, parameter.dtype)
                for name, parameter in zip(spec.parameter_names, spec.parameters, strict=True)
            },
            kept={
                name: spec.module.get_parameter(name).data[-rows:].clone()
                for name, rows in spec.unpacked_rows.items()
            },
        )
        del weights
        attach_state(spec.module, state, spec.parameters, lambda: _replace_methods(spec, state))
    return state


_VALUES = ("_numa_moe_packed", "_numa_moe_values")


def packed_of(module: nn.Module) -> tuple[PackedExperts, dict[str, Any]]:
    """For replaced methods: the packed experts, and the values of the :class:`MethodReplacement`."""
    holder: Any = module  # plain attribute access is what torch.compile can trace
    return holder._numa_moe_packed, holder._numa_moe_values


def _replace_methods(spec: ReplacementSpec, state: ReplacedState) -> None:
    for method in spec.methods:
        owner = spec.module.get_submodule(method.module)
        state.replaced.append((method.module, method.name))
        vars(owner)["_numa_moe_packed"] = state.packed
        vars(owner)["_numa_moe_values"] = method.values
        vars(owner)[method.name] = types.MethodType(method.function, owner)
