"""Mixture-of-experts FFNs on the CPU, split across NUMA nodes.

``torch.ops.numa_moe.experts`` computes a layer; :func:`pack_experts` prepares its weights;
:func:`patch` does both for a Hugging Face transformers model.
"""

from __future__ import annotations

import logging

from torch_numa_moe._version import __version__


def _check_extension() -> None:
    try:
        import torch  # noqa: F401  (loads the libraries that the extension is linked to)

        from torch_numa_moe import _C
    except ImportError as error:
        raise ImportError(
            f"the extension of torch_numa_moe does not load ({error}); build it again with the torch that "
            "is installed now: pip install --force-reinstall --no-deps ."
        ) from error
    if _C.__version__ != __version__:
        raise ImportError(
            f"the extension of torch_numa_moe was built from version {_C.__version__}, but the Python code "
            f"is version {__version__}; rebuild it: pip install --force-reinstall --no-deps ."
        )


_check_extension()

from torch_numa_moe import ops as _ops  # noqa: E402, F401  (registers the ops)
from torch_numa_moe.integrations import (  # noqa: E402
    PatchedModule,
    PatchReport,
    UnsupportedExpertsError,
    patch,
    unpatch,
    verify_placement,
)
from torch_numa_moe.packing import PackedExperts, UnpackedExperts, pack_experts  # noqa: E402
from torch_numa_moe.placement import SlicePlacement  # noqa: E402
from torch_numa_moe.plan import Plan  # noqa: E402
from torch_numa_moe.runtime import configure, plan, stop  # noqa: E402
from torch_numa_moe.statistics import Statistics, stats  # noqa: E402

# A library stays silent unless its user sets up logging; warnings still reach stderr by default.
logging.getLogger("torch_numa_moe")

__all__ = [
    "PackedExperts",
    "PatchReport",
    "PatchedModule",
    "Plan",
    "SlicePlacement",
    "Statistics",
    "UnpackedExperts",
    "UnsupportedExpertsError",
    "__version__",
    "configure",
    "pack_experts",
    "patch",
    "plan",
    "stats",
    "stop",
    "unpatch",
    "verify_placement",
]
