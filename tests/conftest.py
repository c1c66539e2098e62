"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import torch_numa_moe
from torch_numa_moe import runtime

# What else this machine does is no matter of tests, and must not add to the lines that they expect.
os.environ.setdefault("NUMA_MOE_WATCH", "0")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_runtime() -> Iterator[None]:
    """For tests that call configure(): the settings of the environment are back afterwards."""
    yield
    runtime._settings = None
    torch_numa_moe.stop()
