"""The experts of transformers' Qwen3-MoE, in each of the implementations that transformers has."""

from __future__ import annotations

import torch
from problem_set import Shape, Weights

from arms.base import Arm, ArmUnavailableError
from torch_numa_moe import _C

# batched_mm copies the weights of every (token, expert) pair.
BATCHED_MM_MOST_TOKENS = 8


class TransformersArm(Arm):
    """A real ``Qwen3MoeExperts`` module with the shape's sizes, in bf16. The originals are not copied."""

    def __init__(self, shape: Shape, weights: Weights, implementation: str) -> None:
        try:
            from transformers import Qwen3MoeConfig
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
        except ImportError as error:
            raise ArmUnavailableError(f"transformers >= 5 with Qwen3-MoE is needed ({error})") from error
        self.name = f"transformers-{implementation}"
        self.bits_per_weight = 16.0
        # torch's matrix products use these instructions where the CPU has them.
        self.peak_kind = "bf16" if _C.compute_peak("bf16", 1, []) is not None else "fp32"
        if implementation == "batched_mm":
            self.most_tokens = BATCHED_MM_MOST_TOKENS
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden_size,
            moe_intermediate_size=shape.intermediate_size,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.experts: torch.nn.Module = Qwen3MoeExperts(config).eval()
        self.experts.gate_up_proj = torch.nn.Parameter(weights.gate_up_proj, requires_grad=False)
        self.experts.down_proj = torch.nn.Parameter(weights.down_proj, requires_grad=False)

    def run(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`Arm.run`."""
        output: torch.Tensor = self.experts(hidden_states, topk_ids, topk_weights)
        return output
