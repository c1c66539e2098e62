"""What is guaranteed to the bit: see docs/determinism.md.

A token's result depends on its hidden state, its experts, their weights and the instruction set; not on
the number of workers, of slices, on the batch it is in (but with AMX), or on timing.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_numa_moe
from reference import random_layer, random_routing
from torch_numa_moe import _C, pack_experts

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = [(8, 64, 48, 2), (5, 130, 77, 3), (16, 96, 208, 4)]  # experts, hidden, intermediate, top_k


def run(packed_format: str, size: tuple[int, int, int, int], tokens: int) -> torch.Tensor:
    torch.manual_seed(1)
    experts, hidden_size, intermediate, top_k = size
    layer = random_layer(experts, hidden_size, intermediate, dtype=FORMATS[packed_format], bias=True)
    packed = pack_experts(
        layer.gate_up_proj, layer.down_proj, format=packed_format, gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )  # fmt: skip
    hidden = torch.randn(tokens, hidden_size)
    ids, weights = random_routing(tokens, top_k, experts)
    return packed(hidden, ids, weights)


@pytest.mark.parametrize("packed_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_same_bits_for_any_workers_and_slices(packed_format: str, tokens: int, fresh_runtime: None) -> None:
    for size in SIZES:
        torch_numa_moe.configure(split="0", workers=1)
        expected = run(packed_format, size, tokens)
        for split, workers in itertools.product(("0", "test", "test:3", "test:4", "test:7"), (1, 2, 5)):
            torch_numa_moe.configure(split=split, workers=workers)
            assert torch.equal(run(packed_format, size, tokens), expected), (size, split, workers)


@pytest.mark.parametrize("slices", ["0", "test:2", "test:5"])
def test_tensors_and_pool_may_be_split_differently(slices: str, fresh_runtime: None) -> None:
    layer = random_layer(6, 64, 100)
    hidden = torch.randn(9, 64)
    ids, weights = random_routing(9, 2, 6)
    torch_numa_moe.configure(split=slices)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    expected = packed(hidden, ids, weights)
    for pool in ("0", "test:2", "test:3", "test:4"):
        torch_numa_moe.configure(split=pool)
        assert torch.equal(packed(hidden, ids, weights), expected), pool


@pytest.mark.parametrize("packed_format", FORMATS)
def test_same_bits_in_any_batch(packed_format: str, bits_of_any_batch: None) -> None:
    layer = random_layer(6, 128, 80, dtype=FORMATS[packed_format])
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format=packed_format)
    tokens = 300
    hidden = torch.randn(tokens, 128)
    ids, weights = random_routing(tokens, 2, 6)
    whole = packed(hidden, ids, weights)
    for batch in (1, 2, 3, 4, 5, 7, 8, 13, 29, 64, 128):
        pieces = [
            packed(hidden[at : at + batch], ids[at : at + batch], weights[at : at + batch])
            for at in range(0, min(tokens, 20 * batch), batch)
        ]
        joined = torch.cat(pieces)
        assert torch.equal(joined, whole[: joined.shape[0]]), batch


@pytest.mark.parametrize("packed_format", FORMATS)
def test_order_of_top_k_does_not_matter(packed_format: str) -> None:
    """Experts are added in ascending order of their ids, whatever the router's order."""
    layer = random_layer(6, 64, 64, dtype=FORMATS[packed_format])
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format=packed_format)
    hidden = torch.randn(4, 64)
    ids, weights = random_routing(4, 4, 6)
    shuffled = torch.tensor([2, 0, 3, 1])
    assert torch.equal(packed(hidden, ids, weights), packed(hidden, ids[:, shuffled], weights[:, shuffled]))


@pytest.mark.parametrize("packed_format", FORMATS)
def test_instruction_sets_agree(packed_format: str, fresh_runtime: None) -> None:
    """Sets that multiply and add in fp32 give the same bits; bf16 dot products round differently."""
    with_bf16_dot = {"avx512bf16", "amx", "neonbf16"}
    results = {}
    for name in _C.supported_instruction_sets():
        torch_numa_moe.configure(isa=name)
        results[name] = run(packed_format, SIZES[1], 19)
    expected = results["portable"]
    for name, result in results.items():
        if packed_format == "bf16" and name in with_bf16_dot:
            assert float((result - expected).norm() / expected.norm()) < 1e-3, name
        else:
            assert torch.equal(result, expected), name


def test_repeated_calls_give_the_same_bits() -> None:
    layer = random_layer(8, 64, 64)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    hidden = torch.randn(33, 64)
    ids, weights = random_routing(33, 2, 8)
    expected = packed(hidden, ids, weights)
    for _ in range(300):
        assert torch.equal(packed(hidden, ids, weights), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_floating_point_mode_of_the_calling_thread_changes_no_bit(workers: int, fresh_runtime: None) -> None:
    """Subnormal numbers count, also where the caller has them flushed.

    Seen to fail without StandardFloatingPoint in FfnJob::run_task.
    """
    torch_numa_moe.configure(workers=workers)
    layer = random_layer(4, 64, 96, dtype=torch.float32)
    layer.down_proj.mul_(1e-38)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="fp32")
    hidden = torch.randn(40, 64) * 0.1
    ids, weights = random_routing(40, 2, 4)
    expected = packed(hidden, ids, weights)
    smallest_normal = torch.finfo(torch.float32).tiny
    assert ((expected != 0) & (expected.abs() < smallest_normal)).any()
    torch_numa_moe.stop()  # its workers would start in the mode of the thread that starts them
    assert torch.set_flush_denormal(True)
    try:
        result = packed(hidden, ids, weights)
        product = torch.full((), smallest_normal) * torch.full((), 0.5)
    finally:
        torch.set_flush_denormal(False)
    assert product == 0  # the caller's mode was what it was to be, and still is after the call
    assert torch.equal(result, expected)
