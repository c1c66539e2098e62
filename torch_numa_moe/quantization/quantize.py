"""Rounds weights to the nearest codes of a format."""

from __future__ import annotations

import torch

from torch_numa_moe.formats import CODE_VALUES, SCALE_DTYPES, Quantization, find_format
from torch_numa_moe.quantization.weight import QuantizedWeight

_FLOAT8_MAX = 448.0
_E2M1_MAX = 6.0


def can_quantize(format: str) -> bool:
    """Whether :func:`quantize` takes a format: one of codes, but not GGUF's with several levels of scales."""
    quantization = find_format(format).quantization
    return quantization is not None and quantization.offset != "minimum" and not quantization.outer_group


def quantize(weight: torch.Tensor, format: str) -> QuantizedWeight:
    """The nearest codes, under scales from each group's largest magnitude (or, with zero points, its range).

    - ``int8``, ``int4``: scale = largest magnitude / 127 or / 7, rounded to the scales' type before codes are
      chosen. ``_zp``: scale = (max - min) / 15 with 0 in the range, zero point = round(-min / scale).
    - ``fp8``, ``fp8_row``: scale = largest magnitude / 448 (DeepSeek-V3's, in blocks of 128 x 128).
    - ``mxfp4``: scale = 2^(floor(log2(largest magnitude)) - 2), OCP Microscaling Formats 1.0, section 6.3.
    - ``nvfp4``: the outer scale of an expert is largest magnitude / (448 * 6), inner ones largest magnitude
      of the group / 6 / outer, rounded to e4m3.

    Args:
        weight: ``[num_experts, rows, columns]`` fp32, bf16 or fp16.
        format: a name of a format with codes that isn't one of GGUF's blocks with several levels of scales.

    Raises:
        ValueError: if the format can't be quantized to, or weight holds NaN or infinity.
    """
    quantization = find_format(format).quantization
    if quantization is None:
        raise ValueError(f"format {format!r} stores weights as they are: there is nothing to quantize")
    if not can_quantize(format):
        raise ValueError(
            f"format {format!r} is taken as it is from a GGUF file; to quantize here, choose another format"
        )
    if weight.dim() != 3:
        raise ValueError(f"weight must be [num_experts, rows, columns], got shape {list(weight.shape)}")
    groups = _in_groups(weight.float(), quantization)
    if not bool(groups.isfinite().all()):
        raise ValueError(f"weight holds NaN or infinity, which format {format!r} can't store")
    if quantization.offset == "zero_point":
        return _with_zero_points(groups, weight.shape[2], quantization, format)
    largest = _over_rows(groups.abs().amax(dim=3), quantization)
    outer = None
    if quantization.codes == "int8":
        wanted = largest / 127
    elif quantization.codes == "int4":
        wanted = largest / 7
    elif quantization.codes == "fp8":
        wanted = largest / _FLOAT8_MAX
    elif quantization.scale == "e8m0":
        wanted = torch.exp2((torch.frexp(largest)[1] - 3).clamp(-127, 127).float())
    elif quantization.outer is not None:
        outer = largest.amax(dim=(1, 2), keepdim=True) / (_FLOAT8_MAX * _E2M1_MAX)
        outer = torch.where(outer == 0, 1.0, outer).expand(-1, largest.shape[1], -1)
        wanted = largest / _E2M1_MAX / outer
    else:
        wanted = largest / _E2M1_MAX
    scales = _stored(wanted, quantization.scale, format)
    step = scales.float() if outer is None else outer * scales.float()
    values = torch.where(step.unsqueeze(3) > 0, groups / step.unsqueeze(3), 0.0)
    codes = _nearest_codes(values, quantization.codes).flatten(2)[:, :, : weight.shape[2]]
    return QuantizedWeight(
        format, codes.contiguous(), scales, outer_scales=None if outer is None else outer.contiguous()
    )


def _in_groups(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """``[num_experts, rows, groups, k of a group]``, padded with zeros."""
    columns = weight.shape[2]
    groups = quantization.groups(columns)
    group = quantization.group or columns
    padded = torch.nn.functional.pad(weight, (0, groups * group - columns))
    return padded.unflatten(2, (groups, group))


def _over_rows(largest: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """The largest of all rows that share a scale."""
    if quantization.rows == 1:
        return largest
    rows = largest.shape[1]
    blocks = -(-rows // quantization.rows)
    padded = torch.nn.functional.pad(largest, (0, 0, 0, blocks * quantization.rows - rows))
    shared = padded.unflatten(1, (blocks, quantization.rows)).amax(dim=2)
    return shared.repeat_interleave(quantization.rows, dim=1)[:, :rows]


def _stored(scales: torch.Tensor, name: str, format: str) -> torch.Tensor:
    stored = scales.to(SCALE_DTYPES[name]).contiguous()
    if not bool(stored.float().isfinite().all()):
        raise ValueError(
            f"weight is too large for format {format!r}: a scale would be {float(scales.max()):.4g}, which "
            f"{name} doesn't hold"
        )
    return stored


def _nearest_codes(values: torch.Tensor, codes: str) -> torch.Tensor:
    if codes == "int8":
        return values.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    if codes == "fp8":
        return values.clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if codes == "int4":
        return (values.round().clamp(-7, 7) + 8).to(torch.uint8)
    # Half way between two levels the even one wins, as rounding to nearest even has it.
    levels = torch.tensor(CODE_VALUES["e2m1"][:8], dtype=torch.float32, device="cpu")
    half_way = (levels[1:] + levels[:-1]) / 2
    magnitude = values.abs().contiguous()
    below = torch.bucketize(magnitude, half_way)
    tie = torch.isin(magnitude, half_way) & (below % 2 == 1)
    index = (below + tie).to(torch.uint8)
    return index | (values.signbit().to(torch.uint8) << 3)


def _with_zero_points(
    groups: torch.Tensor, columns: int, quantization: Quantization, format: str
) -> QuantizedWeight:
    low = groups.amin(dim=3).clamp(max=0)
    high = groups.amax(dim=3).clamp(min=0)
    scales = _stored(high / 15 - low / 15, quantization.scale, format)
    step = torch.where(scales.float() > 0, scales.float(), 1.0)
    zeros = (-low / step).round().clamp(0, 15)
    codes = (groups / step.unsqueeze(3)).round() + zeros.unsqueeze(3)
    stored = codes.clamp(0, 15).to(torch.uint8).flatten(2)[:, :, :columns]
    return QuantizedWeight(format, stored.contiguous(), scales, zeros.to(torch.uint8))
