"""What ``patch`` did, for reading and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_numa_moe.integrations.activation_probe import GateFunction
from torch_numa_moe.integrations.module_names import summarise_names
from torch_numa_moe.integrations.packed_module import PackedState
from torch_numa_moe.placement import SlicePlacement


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
        return _sum_placements(placement for module in self.modules for placement in module.placement)

    def __str__(self) -> str:
        kinds: dict[str, list[str]] = {}
        for module in self.modules:
            kinds.setdefault(module.kind, []).append(module.name)
        layers = f"{len(self.modules)} MoE layer{'s' if len(self.modules) != 1 else ''}"
        lines = [f"numa_moe: {layers} packed, {_size(self.nbytes)}"]
        lines += [f"  {summarise_names(names)}: {kind}" for kind, names in kinds.items()]
        lines += [f"  {placement}" for placement in self.placement]
        return "\n".join(lines)


def _sum_placements(placements: Iterable[SlicePlacement]) -> tuple[SlicePlacement, ...]:
    sums: dict[tuple[int, int | None], SlicePlacement] = {}
    for one in placements:
        key = (one.slice, one.node)
        total = sums.get(key)
        if total is None:
            sums[key] = one
            continue
        nodes = sorted({*total.pages_on_node, *one.pages_on_node})
        sums[key] = dataclasses.replace(
            total,
            bytes=total.bytes + one.bytes,
            pages_sampled=total.pages_sampled + one.pages_sampled,
            pages_on_node={
                node: total.pages_on_node.get(node, 0) + one.pages_on_node.get(node, 0) for node in nodes
            },
            error=total.error or one.error,
            bind_error=total.bind_error or one.bind_error,
        )
    return tuple(sums.values())


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
