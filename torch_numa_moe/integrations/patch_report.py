"""What ``patch`` did, for reading and for programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_numa_moe.integrations.activation_probe import GateFunction
from torch_numa_moe.integrations.module_names import summarise_names
from torch_numa_moe.integrations.packed_module import PackedState
from torch_numa_moe.placement import SlicePlacement, sum_placements
from torch_numa_moe.sizes import size_text


@dataclass(frozen=True)
class PatchedModule:
    """One MoE layer of a patched model.

    Attributes:
        name: of the experts module in the model.
        num_experts: experts in the layer.
        hidden_size, intermediate_size: sizes of an expert.
        activation: the op's activation, with its constants: ``"swiglu_oai(alpha=1.702, limit=7)"``.
        format: weight format.
        source_dtype: dtype of the weights before packing.
        nbytes: size of the packed weights, in bytes.
        placement: where each slice is.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    format: str
    source_dtype: torch.dtype
    nbytes: int
    placement: tuple[SlicePlacement, ...]

    @classmethod
    def of(cls, name: str, state: PackedState) -> PatchedModule:
        """The entry of a packed module."""
        packed = state.packed
        return cls(
            name,
            packed.num_experts,
            packed.hidden_size,
            packed.intermediate_size,
            str(GateFunction(packed.activation, packed.alpha, packed.limit)),
            packed.format,
            state.source_dtype,
            packed.nbytes,
            tuple(packed.placement),
        )

    @property
    def kind(self) -> str:
        """Everything but the name, in a line; layers of one kind are reported together."""
        dtype = str(self.source_dtype).removeprefix("torch.")
        return (
            f"{self.num_experts} experts, hidden_size {self.hidden_size}, "
            f"intermediate_size {self.intermediate_size}, {self.activation}, {self.format} from {dtype}"
        )


@dataclass(frozen=True)
class PatchReport:
    """What :func:`torch_numa_moe.patch` did: ``str(report)`` is for reading.

    Attributes:
        modules: one entry per MoE layer.
        previous_implementations: the experts implementations that the model used before.
    """

    modules: tuple[PatchedModule, ...]
    previous_implementations: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(module.nbytes for module in self.modules)

    @property
    def placement(self) -> tuple[SlicePlacement, ...]:
        """Where the slices are, all layers together: one entry per slice and node."""
        return sum_placements(placement for module in self.modules for placement in module.placement)

    def __str__(self) -> str:
        kinds: dict[str, list[str]] = {}
        for module in self.modules:
            kinds.setdefault(module.kind, []).append(module.name)
        layers = f"{len(self.modules)} MoE layer{'s' if len(self.modules) != 1 else ''}"
        lines = [f"numa_moe: {layers} packed, {size_text(self.nbytes)}"]
        lines += [f"  {summarise_names(names)}: {kind}" for kind, names in kinds.items()]
        lines += [f"  {placement}" for placement in self.placement]
        return "\n".join(lines)
