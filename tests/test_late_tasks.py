"""Another program takes the CPU from a worker: its task is run again, and the bits are the same."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from reference import random_layer, random_routing
from torch_numa_moe import _C, pack_experts, plan


@contextlib.contextmanager
def busy_program(cpu: int) -> Iterator[None]:
    """A program that computes on one CPU."""
    program = f"import os\nos.sched_setaffinity(0, [{cpu}])\nprint('here', flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_same_bits_while_another_program_has_a_workers_cpu(num_tokens: int) -> None:
    """Seen to fail with: a visitor that commits without taking the task; results computed in place."""
    torch.manual_seed(3)
    layer = random_layer(8, 1024, 768)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="bf16")
    inputs = [(torch.randn(num_tokens, 1024), *random_routing(num_tokens, 4, 8)) for _ in range(8)]
    expected = [packed(*one) for one in inputs]
    cpus = [cpu for group in plan().groups for cpu in group.worker_cpus]
    if len(os.sched_getaffinity(0)) < 2 or not cpus or -1 in cpus:
        pytest.skip("late tasks are run again by threads with CPUs of their own, two at least")
    before = _C.counters().late_tasks
    with busy_program(cpus[-1]):
        end = time.monotonic() + 60
        enough = time.monotonic() + 2
        while time.monotonic() < end:
            for one, wanted in zip(inputs, expected, strict=True):
                assert torch.equal(packed(*one), wanted)
            if _C.counters().late_tasks > before and time.monotonic() > enough:
                break
    assert _C.counters().late_tasks > before, "no task was late in a minute"
    for one, wanted in zip(inputs, expected, strict=True):
        assert torch.equal(packed(*one), wanted)
