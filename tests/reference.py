"""The mixture-of-experts FFN in plain torch, in float64: what every result is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def round_to(values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return values if dtype is None else values.to(dtype).double()


def act(name: str, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The definitions of pack_experts' docstring, one by one."""
    if name == "silu":
        return gate * torch.sigmoid(gate) * up
    if name == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    if name == "relu":
        return gate.clamp(min=0) * up
    if name == "relu2":
        return gate.clamp(min=0) ** 2 * up
    if name == "swiglu_oai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if name == "silu_clamp_input":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate) * up
    if name == "silu_clamp_output":
        return (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)
    raise AssertionError(name)


@dataclass
class Layer:
    """A layer's weights in transformers' layout, in the dtype under test."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gated: bool = True

    @property
    def num_experts(self) -> int:
        return self.gate_up_proj.shape[0]


def random_layer(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    bias: bool = False,
) -> Layer:
    """Weights of the size that keeps activations near 1."""
    rows = intermediate_size * (2 if gated else 1)
    gate_up = torch.randn(num_experts, rows, hidden_size) / math.sqrt(hidden_size)
    down = torch.randn(num_experts, hidden_size, intermediate_size) / math.sqrt(intermediate_size)
    return Layer(
        gate_up.to(dtype),
        down.to(dtype),
        torch.randn(num_experts, rows).to(dtype) if bias else None,
        torch.randn(num_experts, hidden_size).to(dtype) if bias else None,
        gated,
    )


def random_routing(
    num_tokens: int, top_k: int, num_experts: int, *, ids_dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(num_tokens, num_experts)
    weights, ids = scores.topk(top_k, dim=-1)
    return ids.to(ids_dtype), weights / weights.sum(-1, keepdim=True)


def moe_ffn(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: Layer,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = math.inf,
    activation_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """float64 result; activations are rounded to activation_dtype where the format says so."""
    gate_up = layer.gate_up_proj.double()
    down = layer.down_proj.double()
    hidden = round_to(hidden_states.double(), activation_dtype)
    out = torch.zeros(hidden.shape[0], down.shape[1], dtype=torch.float64)
    for token in range(hidden.shape[0]):
        for position in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, position])
            if expert >= layer.num_experts:
                continue
            rows = gate_up[expert] @ hidden[token]
            if layer.gate_up_bias is not None:
                rows = rows + layer.gate_up_bias[expert].double()
            gate, up = rows.chunk(2) if layer.gated else (rows, torch.ones_like(rows))
            inner = round_to(act(activation, gate, up, alpha, limit), activation_dtype)
            result = down[expert] @ inner
            if layer.down_bias is not None:
                result = result + layer.down_bias[expert].double()
            out[token] += float(topk_weights[token, position]) * result
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300))
