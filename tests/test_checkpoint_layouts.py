"""Pre-quantized layouts: made here as they are published, compared with what libraries make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference import Layer, moe_ffn, random_routing, relative_error
from torch_numa_moe import pack_experts
from torch_numa_moe.quantization import (
    QuantizedWeight,
    from_awq,
    from_compressed_tensors,
    from_fp8_blocks,
    from_gptq,
    from_mxfp4,
    from_nvfp4,
)

ROWS, COLUMNS, GROUP = 96, 256, 64


def pack_words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of the last dimension to a word: code order[i] goes to bits 4 i to 4 i + 3."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, source in enumerate(order):
        words |= codes[..., source::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def random_int4(*, zero_points: bool, scale: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns], zero points and scales [rows, groups]."""
    codes = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8)
    groups = COLUMNS // GROUP
    zeros = (
        torch.randint(1, 16, (ROWS, groups), dtype=torch.uint8)
        if zero_points
        else torch.full((ROWS, groups), 8)
    )
    return codes, zeros, (torch.rand(ROWS, groups) * 0.02 + 0.001).to(scale)


def int4_values(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    spread = [tensor.float().repeat_interleave(GROUP, dim=1) for tensor in (zeros, scales)]
    return (codes.float() - spread[0]) * spread[1]


def check(weight: QuantizedWeight, expected: torch.Tensor) -> None:
    """The same numbers, before packing and after, and through the op."""
    assert torch.equal(weight.dequantize()[0], expected)
    # As both projections of an expert: rows of gate and up, and square for down.
    gate_up = QuantizedWeight.concatenate([weight, weight], dim=1)
    rows, columns = weight.shape[1:]
    square = weight.take_rows(torch.arange(columns) % rows)
    down = QuantizedWeight(
        square.format,
        **{
            name: tensor[:, :, : -(-tensor.shape[2] * rows // columns)].contiguous()
            if tensor.shape[2] > 1
            else tensor
            for name, tensor in square.tensors.items()
        },
    )
    packed = pack_experts(gate_up, down)
    assert torch.equal(packed.unpack_quantized("up").dequantize()[0], expected)
    layer = Layer(gate_up.dequantize(), down.dequantize())
    hidden = torch.randn(2, columns)
    ids, weights = random_routing(2, 1, 1)
    reference = moe_ffn(hidden, ids, weights, layer, activation_dtype=torch.bfloat16)
    assert relative_error(packed(hidden, ids, weights), reference) < 4e-3


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("one_less", [True, False])
def test_gptq(scale: torch.dtype, one_less: bool) -> None:
    codes, zeros, scales = random_int4(zero_points=True, scale=scale)
    qweight = pack_words(codes).t().contiguous()  # along the input channels
    qzeros = pack_words((zeros - 1 if one_less else zeros).t().contiguous())
    found = from_gptq(
        qweight, qzeros, scales.t().contiguous(), torch.arange(COLUMNS) // GROUP, zeros_are_one_less=one_less
    )
    check(found, int4_values(codes, zeros, scales))
    with pytest.raises(ValueError, match="g_idx must put input channels into groups in order"):
        from_gptq(qweight, qzeros, scales.t(), torch.arange(COLUMNS).flip(0) // GROUP)


def test_awq() -> None:
    codes, zeros, scales = random_int4(zero_points=True, scale=torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's AWQ_ORDER
    found = from_awq(
        pack_words(codes.t().contiguous(), order),
        pack_words(zeros.t().contiguous(), order),
        scales.t().contiguous(),
    )
    check(found, int4_values(codes, zeros, scales))


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(symmetric: bool) -> None:
    codes, zeros, scales = random_int4(zero_points=not symmetric, scale=torch.bfloat16)
    helpers: Any = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    pack_to_int32 = helpers.pack_to_int32
    weight_packed = pack_to_int32((codes.to(torch.int8) - 8), 4)
    zero_point = None if symmetric else pack_to_int32(zeros.to(torch.int8) - 8, 4, packed_dim=0)
    found = from_compressed_tensors(weight_packed, scales, torch.tensor([ROWS, COLUMNS]), zero_point)
    check(found, int4_values(codes, zeros, scales))


def test_fp8_blocks() -> None:
    rows, columns = 192, 256
    weight = torch.randn(rows, columns).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) * 0.01
    expected = weight.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    check(from_fp8_blocks(weight, scales), expected)
    with pytest.raises(ValueError, match=r"weight_scale_inv must be \[2, 2\] torch.float32, got \[1, 2\]"):
        from_fp8_blocks(weight, scales[:1])
    with pytest.raises(ValueError, match="block_size must have 128 columns"):
        from_fp8_blocks(weight, scales, (128, 64))


def test_mxfp4() -> None:
    transformers_mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 64, 3), dtype=torch.uint8)
    found = from_mxfp4(blocks, scales)
    # [experts, columns, rows] there
    expected = transformers_mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found.dequantize(), expected.transpose(1, 2).float())
    assert torch.equal(from_mxfp4(blocks[0], scales[0]).dequantize(), found.dequantize()[:1])


def test_nvfp4() -> None:
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales = (torch.rand(ROWS, COLUMNS // 16) * 100).to(torch.float8_e4m3fn)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    signed = levels[values & 7] * torch.where(values >= 8, -1.0, 1.0)
    multiplier = torch.tensor([0.0037])
    expected = (multiplier * scales.float()).repeat_interleave(16, dim=1) * signed
    check(from_nvfp4(packed, scales, multiplier), expected)
    with pytest.raises(ValueError, match="global_multiplier must be one float32 number"):
        from_nvfp4(packed, scales, torch.ones(2))


def test_what_does_not_fit_is_named() -> None:
    codes, zeros, scales = random_int4(zero_points=True, scale=torch.float16)
    qweight, qzeros = pack_words(codes).t().contiguous(), pack_words(zeros.t().contiguous())
    with pytest.raises(ValueError, match=r"qzeros must be \[4, 12\] torch.int32, got \[4, 11\]"):
        from_gptq(qweight, qzeros[:, 1:], scales.t())
    with pytest.raises(ValueError, match="scales must have groups of a multiple of 16 input"):
        from_gptq(qweight, qzeros[:3], scales.t()[:3])
    with pytest.raises(ValueError, match=r"scales must be float16, bfloat16 or float32, got torch.float64"):
        from_gptq(qweight, qzeros, scales.t().double())
    with pytest.raises(ValueError, match=r"qweight must be 2 dimensions torch.int32, got"):
        from_awq(qweight.long(), qzeros, scales)
    one = from_gptq(qweight, qzeros, scales.t())
    with pytest.raises(ValueError, match="parts must be of one format, got none"):
        QuantizedWeight.concatenate([])
    with pytest.raises(ValueError, match=r"dim must be 0 \(experts\) or 1 \(rows\), got 2"):
        QuantizedWeight.concatenate([one], dim=2)
