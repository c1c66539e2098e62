"""Experts modules of transformers models: finds them, and checks whether and how they can be packed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_numa_moe.integrations.activation_probe import (
    GateFunction,
    UnknownGateFunctionError,
    probe_activation,
    probe_gate,
)
from torch_numa_moe.integrations.declared_forward import uses_only
from torch_numa_moe.integrations.module_names import without_indices
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError

IMPLEMENTATION = "numa_moe"
"""The name under which transformers knows this implementation."""

_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExpertsSpec:
    """An experts module that can be packed, and how.

    Attributes:
        module: the module.
        parameter_names: of gate_up_proj (or up_proj), down_proj and their biases, None where there is none.
        gated, transposed: what the module declares.
        gate: its activation.
        source_dtype: the narrowest dtype that holds all weights as they are.
    """

    module: nn.Module
    parameter_names: tuple[str, str, str | None, str | None]
    gated: bool
    transposed: bool
    gate: GateFunction
    source_dtype: torch.dtype

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that packing frees."""
        return [self.module.get_parameter(name) for name in self.parameter_names if name is not None]

    @property
    def source_bytes(self) -> int:
        """Bytes of those parameters."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """num_experts, hidden_size and intermediate_size."""
        num_experts, hidden_size, intermediate_size = self.module.get_parameter(self.parameter_names[1]).shape
        if self.transposed:
            hidden_size, intermediate_size = intermediate_size, hidden_size
        return num_experts, hidden_size, intermediate_size


def find_experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name to module, for each module behind transformers' experts interface, packed or not.

    They are known by what ``@use_experts_implementation`` sets on them; names and paths don't matter.
    """
    declared = ("config", "is_transposed", "has_bias")
    return {
        name: module
        for name, module in model.named_modules()
        if all(attribute in vars(module) for attribute in declared)
    }


def describe_missing_experts(model: nn.Module) -> str:
    """Why nothing in the model can be packed: what was looked for, and what comes near it."""
    near = sorted(
        {
            f"{without_indices(name)} ({type(module).__name__})"
            for name, module in model.named_modules()
            if re.search(r"(experts|moe)$", type(module).__name__, re.IGNORECASE) and name
        }
    )
    message = (
        f"{type(model).__name__} has no experts that can be packed: looked for modules behind transformers' "
        "experts interface (classes decorated with @use_experts_implementation, which declare is_transposed "
        "and has_bias, with 3-D parameters gate_up_proj or up_proj, and down_proj), for lists of experts "
        "that are FFNs of linear layers, and for the layouts of Llama-4, DBRX and JetMoE"
    )
    if near:
        message += f"; these look like experts but are none of that: {', '.join(near)}"
    return message


def check_experts(module: nn.Module) -> ExpertsSpec:
    """How to pack a module. Changes nothing.

    Raises:
        UnsupportedExpertsError: with the reason, if it can't be packed.
    """
    gated = bool(getattr(module, "has_gate", True))
    transposed = bool(module.is_transposed)
    if getattr(module, "has_post_expert_norm", False) and not callable(
        getattr(module, "post_expert_norm", None)
    ):
        raise UnsupportedExpertsError("it declares has_post_expert_norm, but has no post_expert_norm")
    if hasattr(module, "_hf_hook"):
        raise UnsupportedExpertsError(
            "accelerate manages its weights (a device_map with several devices, or offloading); "
            "load the model without, or with one device for everything"
        )
    gate_up_name = "gate_up_proj" if gated else "up_proj"
    biased = bool(module.has_bias)
    names = (
        gate_up_name,
        "down_proj",
        f"{gate_up_name}_bias" if biased else None,
        "down_proj_bias" if biased else None,
    )
    _check_parameters(module, names)
    gate_up, down = module.get_parameter(names[0]), module.get_parameter(names[1])
    intermediate_size = _check_shapes(module, names, gated, transposed)
    return ExpertsSpec(
        module,
        names,
        gated,
        transposed,
        _find_gate(module, gated, intermediate_size),
        torch.promote_types(gate_up.dtype, down.dtype),
    )


def _check_parameters(module: nn.Module, names: Sequence[str | None]) -> None:
    for name, dimensions in zip(names, (3, 3, 2, 2), strict=True):
        if name is None:
            continue
        parameter = module._parameters.get(name)
        if parameter is None:
            raise UnsupportedExpertsError(f"it has no parameter {name}")
        if type(parameter.data) is not Tensor:
            raise UnsupportedExpertsError(
                f"{name} is a {type(parameter.data).__name__} (quantised or distributed), not a plain tensor"
            )
        if parameter.device.type != "cpu":
            raise UnsupportedExpertsError(f"{name} is on {parameter.device}; experts are packed from the CPU")
        if parameter.dtype not in _SOURCE_DTYPES:
            raise UnsupportedExpertsError(f"{name} is {parameter.dtype}, not float32, bfloat16 or float16")
        if parameter.dim() != dimensions:
            raise UnsupportedExpertsError(
                f"{name} is {list(parameter.shape)}: stacked experts would have {dimensions} dimensions"
            )
    unknown = sorted({name for name, _ in module.named_parameters()} - set(names))
    unknown += [name for name, _ in module.named_buffers()]
    if getattr(module, "has_post_expert_norm", False):
        unknown = [name for name in unknown if not name.startswith("post_expert_norm.")]
    if unknown and not uses_only(module, [name for name in names if name is not None]):
        raise UnsupportedExpertsError(f"it has weights that the op doesn't know: {', '.join(unknown)}")


def _check_shapes(module: nn.Module, names: Sequence[str | None], gated: bool, transposed: bool) -> int:
    """Checks that the parameters go together; returns intermediate_size."""
    shapes = [None if name is None else list(module.get_parameter(name).shape) for name in names]
    gate_up, down = shapes[0], shapes[1]
    assert gate_up is not None
    num_experts, rows, hidden_size = gate_up
    if transposed:
        rows, hidden_size = hidden_size, rows
    if 0 in gate_up:
        raise UnsupportedExpertsError(f"{names[0]} {gate_up} is empty")
    if gated and rows % 2:
        raise UnsupportedExpertsError(f"{names[0]} {gate_up} has an odd number of rows for gate and up")
    intermediate_size = rows // 2 if gated else rows
    matching = [hidden_size, intermediate_size]
    if down != [num_experts, *(reversed(matching) if transposed else matching)]:
        raise UnsupportedExpertsError(f"down_proj {down} doesn't go with {names[0]} {gate_up}")
    for name, shape, width in zip(names[2:], shapes[2:], (rows, hidden_size), strict=True):
        if shape is not None and shape != [num_experts, width]:
            raise UnsupportedExpertsError(f"{name} is {shape} instead of {[num_experts, width]}")
    declared = getattr(module, "num_experts", num_experts)
    if declared != num_experts:
        raise UnsupportedExpertsError(
            f"num_experts is {declared}, but {names[0]} holds {num_experts} experts"
        )
    return intermediate_size


def _find_gate(module: nn.Module, gated: bool, intermediate_size: int) -> GateFunction:
    name = "_apply_gate" if gated else "act_fn"
    function = getattr(module, name, None)
    if not callable(function):
        raise UnsupportedExpertsError(f"it has no {name} to probe")
    # transformers 5.0 declares nothing about it: whatever the gate function reads is right, then.
    declared = getattr(module, "is_concatenated", None)
    layouts = (False, True) if declared is None else (not declared,)
    constants = [
        float(value)
        for value in vars(module).values()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    ]
    reason = ""
    for interleaved in layouts:
        try:
            if gated:
                return probe_gate(function, intermediate_size, interleaved=interleaved, constants=constants)
            return probe_activation(function, intermediate_size)
        except UnknownGateFunctionError as error:  # noqa: PERF203  (two rounds at most)
            reason = str(error)
        except Exception as error:  # the model's own code may raise anything
            raise UnsupportedExpertsError(
                f"its gate function can't be probed: {type(error).__name__}: {error}"
            ) from error
    raise UnsupportedExpertsError(reason)


def get_implementation(module: nn.Module) -> str | None:
    """The experts implementation that the module's config asks for."""
    implementation: str | None = getattr(module.config, "_experts_implementation", None)
    return implementation


def set_implementation(module: nn.Module, implementation: str | None) -> None:
    """Sets the experts implementation in the module's own config."""
    # Not by the property, which passes it on to sub-configs; transformers' setter on models does the same.
    config: Any = module.config
    internal = "_experts_implementation_internal"
    setattr(config, internal if hasattr(config, internal) else "_experts_implementation", implementation)
