"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import torch_numa_moe
from torch_numa_moe import _C, runtime

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


@pytest.fixture
def bits_of_any_batch(fresh_runtime: None) -> None:
    """The best instruction set with which a token has the same bits in any batch: docs/determinism.md."""
    if "amx" in _C.supported_instruction_sets():
        torch_numa_moe.configure(isa="avx512bf16")
