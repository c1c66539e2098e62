"""The load that is measured: layers of a synthetic MoE, and routings that differ on every call."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from torch_numa_moe.formats import find_format
from torch_numa_moe.limits import ProcessLimits
from torch_numa_moe.topology import Topology

WEIGHT_STD = 0.02
"""Standard deviation of the weights: outputs stay near 1."""

DEFAULT_WEIGHT_BYTES = 16 << 30
"""Weights by default, if there is room: many times what caches hold, so that a call's come from memory."""

TOKENS_AHEAD = 256
"""Routings are made before the clock runs, for this many tokens; then they start over. By then every expert's
weights have been replaced in the caches many times."""


@dataclass(frozen=True)
class LoadShape:
    """The sizes of an MoE layer with gated experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int

    def layer_bytes(self, format: str) -> int:
        """Bytes of a layer's packed weights, without padding."""
        return int(self.num_experts * self._expert_numbers * find_format(format).bits_per_weight / 8)

    def active_bytes(self, format: str) -> float:
        """Bytes that a token reads of a layer."""
        return self.top_k * self._expert_numbers * find_format(format).bits_per_weight / 8

    @property
    def source_bytes(self) -> int:
        """Bytes of a layer's weights in bf16 before they are packed."""
        return 2 * self.num_experts * self._expert_numbers

    @property
    def _expert_numbers(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    def __str__(self) -> str:
        return f"{self.num_experts}x{self.hidden_size}x{self.intermediate_size}x{self.top_k}"


SHAPES = {
    "A": LoadShape(128, 2048, 768, 8),  # Qwen3-30B-A3B
    "B": LoadShape(32, 2880, 2880, 4),  # gpt-oss-20b
    "C": LoadShape(16, 7168, 2048, 8),  # DeepSeek-V3, 16 of its 256 experts
}
"""Those of benchmarks/problem_set.py."""


def parse_shape(text: str) -> LoadShape:
    """A shape's name, or its sizes as in ``128x2048x768x8``: experts, hidden, intermediate, top-k.

    Raises:
        ValueError: saying what is accepted.
    """
    if text in SHAPES:
        return SHAPES[text]
    match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})x([1-9]\d{0,6})x([1-9]\d{0,6})", text)
    if match is None:
        raise ValueError(
            f"{text!r} is neither one of {', '.join(SHAPES)} nor sizes like 128x2048x768x8 (experts, hidden, "
            "intermediate, top-k)"
        )
    shape = LoadShape(*map(int, match.groups()))
    if shape.top_k > shape.num_experts:
        raise ValueError(f"{text!r}: top-k is more than the experts")
    return shape


def room_bytes(topology: Topology, limits: ProcessLimits) -> int | None:
    """Memory that weights could have now: of all nodes, within the control group's limit; None: unknown."""
    allowed = [
        node for node in topology.nodes if limits.memory_nodes is None or node.id in limits.memory_nodes
    ]
    known = [node.free_bytes + (node.cached_bytes or 0) for node in allowed if node.free_bytes is not None]
    room = sum(known) if known else None
    if limits.memory_left_bytes is not None:
        room = limits.memory_left_bytes if room is None else min(room, limits.memory_left_bytes)
    return room


def default_layers(shape: LoadShape, format: str, topology: Topology, limits: ProcessLimits) -> int:
    """As many layers as :data:`DEFAULT_WEIGHT_BYTES` hold, or a third of the room, at least one.

    On several nodes also no more than fit half of the smallest one's room, so that the default arm finds them
    on its own node.
    """
    wanted = DEFAULT_WEIGHT_BYTES
    room = room_bytes(topology, limits)
    if room is not None:
        wanted = min(wanted, room // 3)
    rooms = [
        node.free_bytes + (node.cached_bytes or 0)
        for node in topology.nodes
        if node.cpus and node.has_memory and node.free_bytes is not None
    ]
    if len(rooms) > 1:
        wanted = min(wanted, min(rooms) // 2)
    return max(1, wanted // shape.layer_bytes(format))


def make_source(shape: LoadShape, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a layer in bf16: gate and up ``[E, 2I, H]``, down ``[E, H, I]``.

    Experts hold the same numbers in rotated rows: other bytes, made in a second or two.
    """
    generator = torch.Generator().manual_seed(seed)

    def experts(rows: int, columns: int) -> torch.Tensor:
        first = (torch.randn(rows, columns, generator=generator) * WEIGHT_STD).to(torch.bfloat16)
        stacked = torch.empty(shape.num_experts, rows, columns, dtype=torch.bfloat16)
        for expert in range(shape.num_experts):
            shift = expert % rows
            stacked[expert, shift:] = first[: rows - shift]
            stacked[expert, :shift] = first[rows - shift :]
        return stacked

    return (
        experts(2 * shape.intermediate_size, shape.hidden_size),
        experts(shape.hidden_size, shape.intermediate_size),
    )


@dataclass(frozen=True)
class Routings:
    """Where tokens go, layer by layer.

    Attributes:
        topk_ids: ``[tokens, layers, 1, top_k]`` int64, distinct within a row; uniform without replacement.
        topk_weights: the same shape, bf16, each row adds up to about 1.
        hidden_states: ``[1, hidden_size]`` bf16, the same for all.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    hidden_states: torch.Tensor


def make_routings(shape: LoadShape, layers: int, tokens: int = TOKENS_AHEAD, seed: int = 0) -> Routings:
    """Seeded: every arm and start gets the same."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, layers, 1, shape.num_experts, generator=generator)
    weights, ids = scores.topk(shape.top_k, sorted=False)
    weights += 0.1
    weights /= weights.sum(-1, keepdim=True)
    hidden_states = torch.randn(1, shape.hidden_size, generator=generator).to(torch.bfloat16)
    return Routings(ids, weights.to(torch.bfloat16), hidden_states)
