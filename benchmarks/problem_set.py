"""The layers, batches and routings that every benchmark uses, and how much work they are.

The shapes are those of published models. Routing differs on every call, so that the weights of a call come
from memory and not from a cache that the call before filled. Everything is seeded: each arm gets the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WEIGHT_STD = 0.02
"""Standard deviation of the weights: outputs stay near 1 at every shape."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
"""Tokens per call: from decoding one sequence to prefill."""


@dataclass(frozen=True)
class Shape:
    """The sizes of an MoE layer with gated experts."""

    name: str
    model: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    @property
    def weights_per_expert(self) -> int:
        """Numbers in the gate, up and down projections of an expert."""
        return 3 * self.hidden_size * self.intermediate_size

    def flops(self, num_tokens: int) -> float:
        """Multiplications and additions of the projections for ``num_tokens`` tokens."""
        return 2.0 * num_tokens * self.top_k * self.weights_per_expert

    def weight_bytes(self, active_experts: int, bits_per_weight: float) -> float:
        """Bytes of the weights of that many experts, each read once."""
        return active_experts * self.weights_per_expert * bits_per_weight / 8

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.model}): hidden {self.hidden_size}, intermediate {self.intermediate_size}, "
            f"{self.num_experts} experts, top-{self.top_k}"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("A", "Qwen3-30B-A3B", 2048, 768, 128, 8),
        Shape("B", "gpt-oss-20b", 2880, 2880, 32, 4),
        Shape("C", "DeepSeek-V3, 16 of its 256 experts", 7168, 2048, 16, 8),
    )
}


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one call go.

    Attributes:
        topk_ids: ``[num_tokens, top_k]`` int64, distinct within a row.
        topk_weights: ``[num_tokens, top_k]`` bf16, each row adds up to about 1.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def active_experts(self) -> int:
        """How many experts some token goes to."""
        return int(self.topk_ids.flatten().bincount().count_nonzero())


def make_routing(shape: Shape, num_tokens: int, call: int, seed: int = 0) -> Routing:
    """The routing of a call: experts uniform without replacement, another one for every ``call``."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + num_tokens) * 1_000_003 + call)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
    weights, ids = scores.topk(shape.top_k, sorted=False)
    weights = weights + 0.1
    weights /= weights.sum(-1, keepdim=True)
    return Routing(ids, weights.to(torch.bfloat16))


def make_hidden_states(shape: Shape, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Hidden states ``[num_tokens, hidden_size]`` in bf16, normally distributed with standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, shape.hidden_size, generator=generator).to(torch.bfloat16)


@dataclass(frozen=True)
class Weights:
    """The original weights of a layer in bf16.

    Attributes:
        gate_up_proj: ``[num_experts, 2 * intermediate_size, hidden_size]``, gate rows first.
        down_proj: ``[num_experts, hidden_size, intermediate_size]``.
    """

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor


def make_weights(shape: Shape, seed: int = 0) -> Weights:
    """Random weights. Experts hold the same numbers in rotated rows: other bytes at once, made in seconds."""
    generator = torch.Generator().manual_seed(seed)

    def experts(rows: int, columns: int) -> torch.Tensor:
        first = (torch.randn(rows, columns, generator=generator) * WEIGHT_STD).to(torch.bfloat16)
        stacked = torch.empty(shape.num_experts, rows, columns, dtype=torch.bfloat16)
        for expert in range(shape.num_experts):
            shift = expert % rows
            stacked[expert, shift:] = first[: rows - shift]
            stacked[expert, :shift] = first[rows - shift :]
        return stacked

    return Weights(
        experts(2 * shape.intermediate_size, shape.hidden_size),
        experts(shape.hidden_size, shape.intermediate_size),
    )


def reference(
    weights: Weights, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The layer in fp32, token by token: what every arm must agree with.

    Returns:
        ``[num_tokens, hidden_size]`` fp32.
    """
    output = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token, (ids, scales) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True)):
        row = hidden_states[token].float()
        for expert, scale in zip(ids, scales, strict=True):
            gate, up = (weights.gate_up_proj[expert].float() @ row).chunk(2)
            intermediate = torch.nn.functional.silu(gate) * up
            output[token] += scale * (weights.down_proj[expert].float() @ intermediate)
    return output
