"""Experts that aren't behind transformers' interface: which adapter takes a module."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

from torch_numa_moe.integrations import (
    dense_experts,
    embedding_experts,
    expert_lists,
    flat_experts,
    grouped_experts,
    list_blocks,
    stacked_experts,
)
from torch_numa_moe.integrations.packed_module import packed_state
from torch_numa_moe.integrations.replaced_module import ReplacedState, ReplacementSpec


@dataclass(frozen=True)
class _Adapter:
    matches: Callable[[str, nn.Module], bool]
    check: Callable[[nn.Module], ReplacementSpec | None]


_ADAPTERS = (
    _Adapter(lambda name, module: dense_experts.matches(module), dense_experts.check),
    _Adapter(lambda name, module: flat_experts.matches(module), flat_experts.check),
    _Adapter(lambda name, module: grouped_experts.matches(module), grouped_experts.check),
    _Adapter(lambda name, module: embedding_experts.matches(module), embedding_experts.check),
    _Adapter(lambda name, module: list_blocks.matches(module), list_blocks.check),
    _Adapter(expert_lists.matches, expert_lists.check),
    _Adapter(lambda name, module: stacked_experts.matches(module), stacked_experts.check),
)

Check = Callable[[nn.Module], ReplacementSpec | None]


def find_adapted_modules(
    model: nn.Module, behind_interface: Collection[str]
) -> dict[str, tuple[nn.Module, Check]]:
    """Name to module and what checks it, for each module with experts that an adapter knows, packed or not.

    Args:
        model: the model.
        behind_interface: names of the modules that transformers' interface takes.
    """
    found: dict[str, tuple[nn.Module, Check]] = {}
    taken = set(behind_interface)
    for name, module in model.named_modules():
        if any(outer in taken for outer in _names_around(name)):
            continue
        adapter = next((one for one in _ADAPTERS if one.matches(name, module)), None)
        if isinstance(packed_state(module), ReplacedState):
            found[name] = (module, _no_check)
        elif adapter is not None:
            found[name] = (module, adapter.check)
        if name in found:
            taken.add(name)
    return found


def _names_around(name: str) -> list[str]:
    """A module's name, and those of the modules that it is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _no_check(module: nn.Module) -> None:
    """For what is packed already."""
