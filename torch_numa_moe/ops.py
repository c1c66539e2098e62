"""Registers what the C++ ops can't say themselves: shapes for tracing, and that there is no backward.

Importing this module loads the extension, which registers ``torch.ops.numa_moe.*``.
"""

from __future__ import annotations

from typing import Any

import torch

import torch_numa_moe._C  # noqa: F401  (loading it registers the ops)


@torch.library.register_fake("numa_moe::experts")
def _experts_fake(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    format: str | None = None,
    intermediate_size: int | None = None,
    down_format: str | None = None,
) -> torch.Tensor:
    torch._check(hidden_states.dim() == 2, lambda: "hidden_states must be [num_tokens, hidden_size]")
    torch._check(topk_ids.dim() == 2, lambda: "topk_ids must be [num_tokens, top_k]")
    torch._check(topk_weights.dim() == 2, lambda: "topk_weights must be [num_tokens, top_k]")
    torch._check(topk_ids.size(0) == hidden_states.size(0), lambda: "topk_ids must have a row per token")
    torch._check(topk_weights.size(0) == topk_ids.size(0), lambda: "topk_weights must have topk_ids' shape")
    torch._check(topk_weights.size(1) == topk_ids.size(1), lambda: "topk_weights must have topk_ids' shape")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        torch._check(
            tensor.device == hidden_states.device,
            lambda name=name, tensor=tensor: (
                f"{name} must be on the device of hidden_states ({hidden_states.device}), got {tensor.device}"
            ),
        )
    weights = {
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    for name, weight in weights.items():
        torch._check(
            weight is None or weight.device.type == "cpu" or weight.device == hidden_states.device,
            lambda name=name, weight=weight: f"{name} must be a CPU tensor, got {weight.device}",
        )
    return hidden_states.new_empty(hidden_states.size(0), hidden_states.size(1))


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    """Nothing is kept: there is no backward."""


def _no_backward(ctx: Any, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        "numa_moe::experts has no backward: it is for inference. Call it under torch.no_grad() or "
        "torch.inference_mode(), or train with another experts implementation."
    )


torch.library.register_autograd("numa_moe::experts", _no_backward, setup_context=_setup_context)


def _check_cpu(**tensors: torch.Tensor | None) -> None:
    """Tracing has fake CPU tensors; on the meta device there is nothing to write to or to read."""
    for name, tensor in tensors.items():
        torch._check(
            tensor is None or tensor.device.type == "cpu",
            lambda name=name, tensor=tensor: f"{name} must be a CPU tensor, got {tensor.device}",
        )


@torch.library.register_fake("numa_moe::pack_gate_up")
def _pack_gate_up_fake(
    packed: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, first_expert: int
) -> None:
    _check_cpu(packed=packed, gate=gate, up=up)


@torch.library.register_fake("numa_moe::pack_down")
def _pack_down_fake(packed: torch.Tensor, down: torch.Tensor, first_expert: int) -> None:
    _check_cpu(packed=packed, down=down)


@torch.library.register_fake("numa_moe::unpack_gate_up")
def _unpack_gate_up_fake(
    packed: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, first_expert: int
) -> None:
    _check_cpu(packed=packed, gate=gate, up=up)


@torch.library.register_fake("numa_moe::unpack_down")
def _unpack_down_fake(packed: torch.Tensor, down: torch.Tensor, first_expert: int) -> None:
    _check_cpu(packed=packed, down=down)


@torch.library.register_fake("numa_moe::pack_quantized")
def _pack_quantized_fake(
    packed: torch.Tensor,
    format: str,
    projection: int,
    first_expert: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    outer_scales: torch.Tensor | None,
    outer_minima: torch.Tensor | None,
) -> None:
    _check_cpu(
        packed=packed,
        codes=codes,
        scales=scales,
        offsets=offsets,
        outer_scales=outer_scales,
        outer_minima=outer_minima,
    )


@torch.library.register_fake("numa_moe::unpack_quantized")
def _unpack_quantized_fake(
    packed: torch.Tensor,
    format: str,
    projection: int,
    first_expert: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    outer_scales: torch.Tensor | None,
    outer_minima: torch.Tensor | None,
) -> None:
    _check_cpu(
        packed=packed,
        codes=codes,
        scales=scales,
        offsets=offsets,
        outer_scales=outer_scales,
        outer_minima=outer_minima,
    )
