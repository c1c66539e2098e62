"""Builds tiny models for tests, where the installed transformers has and can run them.

The transformers that is documented must be able to; older ones have other configurations and defects of their
own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tiny_architectures import Architecture, build_architecture, is_installed, run_architecture

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def documented_version() -> str:
    """The transformers that the page was made with."""
    version = re.search(r"architectures of transformers (\S+) ", PAGE.read_text())
    assert version is not None
    return version[1]


OLDER = Version(transformers.__version__) < Version(documented_version())


def run_or_skip(model: Any) -> torch.Tensor:
    """An eager run; skips the test if an older transformers can't."""
    try:
        return run_architecture(model)
    except Exception as error:
        if not OLDER:
            raise
        pytest.skip(f"an older transformers, which can't run this model eagerly: {error}")


def build_or_skip(architecture: Architecture) -> Any:
    """The tiny model; skips the test if the installed transformers doesn't have it, or an older one can't."""
    if not is_installed(architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.name}")
    try:
        model = build_architecture(architecture)
    except Exception as error:
        if not OLDER:
            raise
        pytest.skip(f"an older transformers, which can't build this model: {error}")
    run_or_skip(model)
    return model
