"""The implementations that benchmarks set side by side, by name: the one place to add one."""

from __future__ import annotations

from collections.abc import Callable

from problem_set import Shape, Weights

from arms.base import Arm, ArmUnavailableError
from arms.numa_moe import NumaMoeArm
from arms.transformers_experts import TransformersArm

ARMS: dict[str, Callable[[Shape, Weights], Arm]] = {
    "numa_moe-bf16": lambda shape, weights: NumaMoeArm(shape, weights, "bf16"),
    "numa_moe-fp16": lambda shape, weights: NumaMoeArm(shape, weights, "fp16"),
    "numa_moe-fp32": lambda shape, weights: NumaMoeArm(shape, weights, "fp32"),
    "transformers-eager": lambda shape, weights: TransformersArm(shape, weights, "eager"),
    "transformers-grouped_mm": lambda shape, weights: TransformersArm(shape, weights, "grouped_mm"),
    "transformers-batched_mm": lambda shape, weights: TransformersArm(shape, weights, "batched_mm"),
}

__all__ = ["ARMS", "Arm", "ArmUnavailableError"]
