"""torch_numa_moe's packed experts."""

from __future__ import annotations

import torch
from problem_set import Shape, Weights

import torch_numa_moe
from arms.base import Arm
from torch_numa_moe import _C
from torch_numa_moe.formats import find_format

# What multiplies bf16 weights; elsewhere they are widened and multiplied in fp32.
BF16_PEAKS = {"avx512bf16": "bf16", "neonbf16": "bf16", "amx": None}


class NumaMoeArm(Arm):
    """One call of ``torch.ops.numa_moe.experts``."""

    def __init__(self, shape: Shape, weights: Weights, weight_format: str) -> None:
        del shape  # the packed weights know it
        self.name = f"numa_moe-{weight_format}"
        quantization = find_format(weight_format).quantization
        if quantization is not None:
            # A few times what rounding the weights comes to (docs/formats.md).
            self.most_relative_error = 0.08 if quantization.code_bits == 8 else 0.35
        self.bits_per_weight = find_format(weight_format).bits_per_weight
        self.packed = torch_numa_moe.pack_experts(
            weights.gate_up_proj, weights.down_proj, format=weight_format
        )
        self.peak_kind: str | None = "fp32"
        if find_format(weight_format).activations == "bf16":
            self.peak_kind = BF16_PEAKS.get(_C.running_instruction_set(), "fp32")

    def run(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`Arm.run`."""
        return self.packed(hidden_states, topk_ids, topk_weights)
