"""Packs an experts module's weights in place, and restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from torch_numa_moe.formats import find_format, format_of_dtype
from torch_numa_moe.integrations.experts_modules import IMPLEMENTATION, ExpertsSpec, get_implementation
from torch_numa_moe.packing import PackedExperts, pack_experts, packed_slice_bytes

_STATE = "_numa_moe"
"""Attribute of a packed module that holds its :class:`PackedState`."""


@dataclass
class PackedState:
    """What a packed module carries, as a plain attribute: no parameter, no buffer, in no state dict.

    Attributes:
        packed: its experts.
        parameter_names: the parameters that were freed, in the order of UnpackedExperts, None where absent.
        source_dtype: of the weights before packing.
        previous_implementation: what the module's config said before, None if it was this one already.
        hooks: handles of the hooks that refuse what a packed module can't do.
    """

    packed: PackedExperts
    parameter_names: tuple[str | None, ...]
    source_dtype: torch.dtype
    previous_implementation: str | None
    hooks: list[Any] = field(default_factory=list)

    @property
    def is_rounded(self) -> bool:
        """Whether packing rounded the weights, so that restoring them isn't exact."""
        stored = find_format(self.packed.format).dtype
        return torch.promote_types(stored, self.source_dtype) != stored

    def restore_weights(self, module: nn.Module) -> None:
        """Unpacks the experts into the module's parameters, in the dtype that those have now."""
        restored = [
            (module.get_parameter(name), weights)
            for name, weights in zip(self.parameter_names, self.packed.unpack(), strict=True)
            if name is not None and weights is not None
        ]
        for parameter, weights in restored:
            # Under tensor parallelism the weights packed were views for one forward: the real ones are whole.
            if parameter.shape[0] == 0:
                parameter.data = weights.to(device=parameter.device, dtype=parameter.dtype)

    def detach(self, module: nn.Module) -> None:
        """Makes the module as one that carries nothing."""
        for hook in self.hooks:
            hook.remove()
        vars(module).pop(_STATE, None)


def packed_state(module: nn.Module) -> PackedState | None:
    """What a packed module carries, or None if it isn't packed."""
    state: PackedState | None = getattr(module, _STATE, None)
    return state


def find_packed(model: nn.Module) -> dict[str, PackedState]:
    """Name to what it carries, for each packed module in a model."""
    return {
        name: state for name, module in model.named_modules() if (state := packed_state(module)) is not None
    }


def check_format(format: str) -> None:
    """Checks what :func:`pack_module` takes.

    Raises:
        ValueError: unless format is ``"auto"`` or a format's name.
    """
    if format != "auto":
        find_format(format)


class PackableSpec(Protocol):
    """What is known of a module whose experts can be packed, however it is packed."""

    @property
    def module(self) -> nn.Module:
        """The module that will carry the packed experts."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that packing frees."""

    @property
    def source_bytes(self) -> int:
        """Bytes of those parameters."""

    @property
    def source_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds all weights as they are."""

    @property
    def gated(self) -> bool:
        """Whether there are up rows."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """num_experts, hidden_size and intermediate_size."""


def format_for(spec: PackableSpec, format: str) -> str:
    """The weight format that a module gets: ``"auto"`` is the one that rounds nothing."""
    return format_of_dtype(spec.source_dtype).name if format == "auto" else format


def slice_bytes_for(spec: PackableSpec, format: str, num_slices: int) -> int:
    """Bytes of weights in each slice once a module is packed."""
    return packed_slice_bytes(format_for(spec, format), *spec.sizes, spec.gated, num_slices)


def pack_module(spec: ExpertsSpec, format: str, *, verify_placement: bool = True) -> PackedState:
    """Packs a module's experts and frees its parameters.

    The parameters stay on the module, as the objects they were, with no experts in them (dimension 0 is 0):
    ``.to()``, initialisation and whoever holds them keep working. If anything is raised, the module is as it
    was.

    Args:
        spec: the module.
        format: weight format, or ``"auto"`` for the one that rounds nothing.
        verify_placement: see :func:`torch_numa_moe.pack_experts`.
    """
    module, parameters = spec.module, spec.parameters
    gate_up, down, *biases = parameters
    previous = get_implementation(module)
    with ordinary_tensors():
        packed = pack_experts(
            gate_up,
            down,
            format=format_for(spec, format),
            gate_up_bias=biases[0] if biases else None,
            down_bias=biases[1] if biases else None,
            activation=spec.gate.activation,
            gated=spec.gated,
            alpha=spec.gate.alpha,
            limit=spec.gate.limit,
            interleaved=spec.gate.interleaved,
            transposed=spec.transposed,
            verify_placement=verify_placement,
        )
        state = PackedState(
            packed,
            spec.parameter_names,
            spec.source_dtype,
            None if previous == IMPLEMENTATION else previous,
        )
        attach_state(module, state, parameters, lambda: _require_own_implementation(module, state))
    return state


def attach_state(
    module: nn.Module, state: PackedState, parameters: Sequence[nn.Parameter], last: Callable[[], None]
) -> None:
    """Makes a module carry a state, and frees its parameters; does all or nothing.

    Args:
        module: the module.
        state: what it carries from now on.
        parameters: the parameters that were packed.
        last: what else must be done to the module.
    """
    originals = [parameter.data for parameter in parameters]
    try:
        state.hooks.append(module.register_state_dict_pre_hook(_refuse_state_dict))
        state.hooks.append(module.register_load_state_dict_pre_hook(_refuse_load_state_dict))
        setattr(module, _STATE, state)
        for parameter in parameters:
            parameter.data = parameter.data.new_empty((0, *parameter.shape[1:]))
        last()
    except BaseException:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
        state.detach(module)
        raise


def _require_own_implementation(module: nn.Module, state: PackedState) -> None:
    state.hooks.append(module.register_forward_pre_hook(_require_implementation))


def restore_module(module: nn.Module) -> None:
    """Unpacks a module's experts into its parameters, in the dtype that those have now."""
    state = packed_state(module)
    if state is None:
        return
    with ordinary_tensors():
        state.restore_weights(module)
    state.detach(module)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """No inference tensors: a first forward may well be under inference_mode, and the next one not."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _name(module: nn.Module, prefix: str) -> str:
    return prefix.rstrip(".") or type(module).__name__


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError(
        f"{_name(module, prefix)} is packed for torch_numa_moe: its weights are in no state dict, and saving "
        "the model would lose them. Call torch_numa_moe.unpatch(model) first."
    )


def _refuse_load_state_dict(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    raise RuntimeError(
        f"{_name(module, prefix)} is packed for torch_numa_moe: weights can't be loaded into it. "
        "Call torch_numa_moe.unpatch(model) first."
    )


def _require_implementation(module: nn.Module, args: Any) -> None:
    # Of a packed module's parameters another implementation finds nothing left, and may not notice.
    implementation = get_implementation(module)
    if implementation != IMPLEMENTATION:
        raise RuntimeError(
            f"these experts are packed for experts_implementation={IMPLEMENTATION!r}, but the model is set "
            f"to {implementation!r}. Call torch_numa_moe.unpatch(model) before using another implementation."
        )
