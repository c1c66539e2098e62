"""Hugging Face transformers: the experts implementation ``"numa_moe"``, :func:`patch` and :func:`unpatch`.

Importing this package doesn't import transformers: the implementation is registered when transformers'
own interface is imported, before or after.
"""

from __future__ import annotations

from torch_numa_moe.integrations.experts_interface import register_with_transformers
from torch_numa_moe.integrations.patch import patch, unpatch
from torch_numa_moe.integrations.patch_report import PatchedModule, PatchReport
from torch_numa_moe.integrations.unsupported import UnsupportedExpertsError
from torch_numa_moe.integrations.verification import verify_placement

register_with_transformers()

__all__ = [
    "PatchReport",
    "PatchedModule",
    "UnsupportedExpertsError",
    "patch",
    "unpatch",
    "verify_placement",
]
