"""The implementations that benchmarks set side by side, by name: the one place to add one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from problem_set import Shape, Weights

from arms.base import Arm, ArmUnavailableError
from arms.numa_moe import NumaMoeArm
from arms.transformers_experts import TransformersArm
from torch_numa_moe.formats import FORMATS
from torch_numa_moe.quantization.quantize import can_quantize

ARMS: dict[str, Callable[[Shape, Weights], Arm]] = {
    **{
        f"numa_moe-{name}": partial(NumaMoeArm, weight_format=name)
        for name in FORMATS
        if FORMATS[name].quantization is None or can_quantize(name)
    },
    "transformers-eager": lambda shape, weights: TransformersArm(shape, weights, "eager"),
    "transformers-grouped_mm": lambda shape, weights: TransformersArm(shape, weights, "grouped_mm"),
    "transformers-batched_mm": lambda shape, weights: TransformersArm(shape, weights, "batched_mm"),
}

__all__ = ["ARMS", "Arm", "ArmUnavailableError"]
