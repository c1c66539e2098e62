"""Weights as pre-quantized checkpoints hold them, taken as they are: one function per published layout.

Each takes the tensors of one expert's projection by the names that they have in the checkpoint, and returns
them as a :class:`~torch_numa_moe.quantization.QuantizedWeight` of one expert; ``QuantizedWeight.concatenate``
puts experts, and gate and up rows, together. All raise :class:`ValueError` naming the tensor that doesn't
fit.
"""

from __future__ import annotations

import torch

from torch_numa_moe.quantization.weight import QuantizedWeight

_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight columns in a word of AWQ's GEMM kernels (AutoAWQ, awq/utils/packing_utils.py)."""


def from_fp8_blocks(
    weight: torch.Tensor, weight_scale_inv: torch.Tensor, block_size: tuple[int, int] = (128, 128)
) -> QuantizedWeight:
    """FP8 with a scale per block, as DeepSeek-V3 and Qwen3-FP8 ship it.

    Args:
        weight: ``[rows, columns]`` float8_e4m3fn.
        weight_scale_inv: ``[blocks of rows, blocks of columns]`` fp32, what a code is multiplied by.
        block_size: rows and columns of a block; columns must be 128.
    """
    _check("weight", weight, 2, torch.float8_e4m3fn)
    rows, columns = weight.shape
    block_rows, block_columns = block_size
    if block_columns != 128 or block_rows < 1:
        raise ValueError(f"block_size must have 128 columns and at least 1 row, got {block_size}")
    expected = (-(-rows // block_rows), -(-columns // block_columns))
    _check("weight_scale_inv", weight_scale_inv, 2, torch.float32, expected)
    scales = weight_scale_inv.repeat_interleave(block_rows, dim=0)[:rows]
    codes = weight.view(torch.uint8)
    return QuantizedWeight("fp8", codes[None].contiguous(), scales[None].contiguous())


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """MXFP4 as gpt-oss ships it: two codes to a byte, the lower half first.

    Args:
        blocks: ``[rows, groups, 16]`` uint8, or with the experts before.
        scales: ``[rows, groups]`` uint8 (e8m0), or with the experts before.
    """
    if blocks.dim() == 3:
        blocks, scales = blocks[None], scales[None]
    _check("blocks", blocks, 4, torch.uint8, (*blocks.shape[:3], 16))
    _check("scales", scales, 3, torch.uint8, tuple(blocks.shape[:3]))
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    return QuantizedWeight("mxfp4", codes.contiguous(), scales.contiguous().view(torch.float8_e8m0fnu))


def from_nvfp4(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, global_multiplier: torch.Tensor
) -> QuantizedWeight:
    """NVFP4: two codes to a byte, the lower half first.

    Args:
        weight_packed: ``[rows, columns / 2]`` uint8 (NVIDIA's ModelOpt calls it ``weight``).
        weight_scale: ``[rows, columns / 16]`` float8_e4m3fn.
        global_multiplier: one fp32 number that scales are multiplied by: ModelOpt's ``weight_scale_2``, or
            1 / ``weight_global_scale`` of compressed-tensors.
    """
    _check("weight_packed", weight_packed, 2, torch.uint8)
    rows, half = weight_packed.shape
    _check("weight_scale", weight_scale, 2, torch.float8_e4m3fn, (rows, -(-half // 8)))
    if global_multiplier.numel() != 1 or global_multiplier.dtype != torch.float32:
        raise ValueError(
            "global_multiplier must be one float32 number, "
            f"got {list(global_multiplier.shape)} {global_multiplier.dtype}"
        )
    codes = torch.stack((weight_packed & 15, weight_packed >> 4), dim=-1).flatten(1)
    outer = global_multiplier.reshape(1, 1, 1).expand(1, rows, 1).contiguous()
    return QuantizedWeight("nvfp4", codes[None], weight_scale[None].contiguous(), outer_scales=outer)


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Int4 of compressed-tensors' ``pack-quantized`` (Kimi-K2's): eight codes to a word along the columns.

    Args:
        weight_packed: ``[rows, ceil(columns / 8)]`` int32; codes are stored plus 8.
        weight_scale: ``[rows, columns / group]`` bf16, fp16 or fp32.
        weight_shape: two integers, rows and columns.
        weight_zero_point: ``[ceil(rows / 8), columns / group]`` int32, stored plus 8, or None.
    """
    rows, columns = (int(size) for size in weight_shape)
    _check("weight_packed", weight_packed, 2, torch.int32, (rows, -(-columns // 8)))
    _check("weight_scale", weight_scale, 2, None)
    group = _group_size("weight_scale", columns, weight_scale.shape[1])
    codes = _unpack(weight_packed, dim=1)[:, :columns]
    if weight_zero_point is None:
        name = _int4_name(group, zero_point=False, scale=weight_scale)
        return QuantizedWeight(name, codes[None].contiguous(), weight_scale[None].contiguous())
    _check("weight_zero_point", weight_zero_point, 2, torch.int32, (-(-rows // 8), weight_scale.shape[1]))
    zeros = _unpack(weight_zero_point, dim=0)[:rows]
    name = _int4_name(group, zero_point=True, scale=weight_scale)
    return QuantizedWeight(
        name, codes[None].contiguous(), weight_scale[None].contiguous(), zeros[None].contiguous()
    )


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    zeros_are_one_less: bool = True,
) -> QuantizedWeight:
    """GPTQ of 4 bits: eight codes to a word along the input channels.

    Args:
        qweight: ``[columns / 8, rows]`` int32 (columns: input channels).
        qzeros: ``[groups, rows / 8]`` int32.
        scales: ``[groups, rows]`` fp16 or bf16.
        g_idx: ``[columns]``, the group of each input channel; None: in order.
        zeros_are_one_less: stored zero points are one less than meant (``checkpoint_format: gptq``), or are
            what they are (``gptq_v2``).
    """
    _check("qweight", qweight, 2, torch.int32)
    columns, rows = qweight.shape[0] * 8, qweight.shape[1]
    _check("scales", scales, 2, None, (scales.shape[0], rows))
    groups = scales.shape[0]
    _check("qzeros", qzeros, 2, torch.int32, (groups, -(-rows // 8)))
    group = _group_size("scales", columns, groups)
    in_order = torch.arange(columns, device="cpu") // group
    if g_idx is not None and not torch.equal(g_idx.long(), in_order):
        raise ValueError("g_idx must put input channels into groups in order (desc_act=False)")
    codes = _unpack(qweight, dim=0).t()
    zeros = _unpack(qzeros, dim=1)[:, :rows].t() + (1 if zeros_are_one_less else 0)
    name = _int4_name(group, zero_point=True, scale=scales)
    return QuantizedWeight(
        name, codes[None].contiguous(), scales.t()[None].contiguous(), zeros[None].contiguous()
    )


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """AWQ of 4 bits in the layout of its GEMM kernels: eight output rows to a word, in an order of their own.

    Args:
        qweight: ``[columns, rows / 8]`` int32 (columns: input channels).
        qzeros: ``[groups, rows / 8]`` int32.
        scales: ``[groups, rows]`` fp16 or bf16.
    """
    _check("qweight", qweight, 2, torch.int32)
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    groups = scales.shape[0]
    _check("scales", scales, 2, None, (groups, rows))
    _check("qzeros", qzeros, 2, torch.int32, (groups, rows // 8))
    group = _group_size("scales", columns, groups)

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        return _unpack(packed, dim=1).unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1)

    name = _int4_name(group, zero_point=True, scale=scales)
    return QuantizedWeight(
        name,
        in_order(qweight).t()[None].contiguous(),
        scales.t()[None].contiguous(),
        in_order(qzeros).t()[None].contiguous(),
    )


def _unpack(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Codes of 4 bits, uint8, of int32 words along a dimension: the lowest bits first."""
    shifts = torch.arange(0, _WORD_BITS, 4, dtype=torch.int32, device="cpu")
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.to(torch.uint8).movedim(-1, dim + 1).flatten(dim, dim + 1)


def _group_size(name: str, columns: int, groups: int) -> int:
    if groups < 1 or columns % groups or (columns // groups) % 16:
        raise ValueError(
            f"{name} must have groups of a multiple of 16 input channels, got {groups} for {columns} channels"
        )
    return columns // groups


def _int4_name(group: int, *, zero_point: bool, scale: torch.Tensor) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if scale.dtype not in names:
        raise ValueError(f"scales must be float16, bfloat16 or float32, got {scale.dtype}")
    return f"int4_g{group}{'_zp' if zero_point else ''}_{names[scale.dtype]}"


def _check(
    name: str,
    tensor: torch.Tensor,
    dimensions: int,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | None = None,
) -> None:
    wrong = tensor.dim() != dimensions or (dtype is not None and tensor.dtype != dtype)
    if wrong or (shape is not None and tuple(tensor.shape) != shape):
        wanted = f"{dimensions} dimensions" if shape is None else str(list(shape))
        raise ValueError(
            f"{name} must be {wanted}{'' if dtype is None else f' {dtype}'}, "
            f"got {list(tensor.shape)} {tensor.dtype}"
        )
