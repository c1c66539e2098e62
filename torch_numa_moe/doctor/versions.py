"""Which versions of what are at work."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from torch_numa_moe._version import __version__
from torch_numa_moe.sysfs import read_text

if TYPE_CHECKING:
    from pathlib import Path


def read_versions(instruction_set: str, proc: Path) -> dict[str, str]:
    """Names and versions, in the order in which they are shown.

    Args:
        instruction_set: the kernels that will run.
        proc: where procfs is.
    """
    return {
        "torch_numa_moe": __version__,
        "torch": str(torch.__version__),
        "transformers": _installed("transformers"),
        "Python": platform.python_version(),
        "kernel": read_text(proc / "sys/kernel/osrelease") or platform.release(),
        "machine": platform.machine(),
        "instruction set": instruction_set,
    }


def _installed(name: str) -> str:
    # Without importing it, which takes seconds.
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
