"""Quantized weights in one ordinary layout, whatever they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from torch_numa_moe.formats import CODE_VALUES, SCALE_DTYPES, Quantization, find_format


@dataclass(frozen=True)
class QuantizedWeight:
    """The weights of some experts' projection, ``[num_experts, rows, columns]``, as codes.

    Attributes:
        format: name of the weight format; it has a :class:`~torch_numa_moe.formats.Quantization`.
        codes: ``[num_experts, rows, columns]`` uint8, one code to a byte.
        scales: ``[num_experts, rows, groups]``, of the format's dtype.
        offsets: ``[num_experts, rows, groups]`` uint8: zero points or inner minima; or None.
        outer_scales: ``[num_experts, rows, outer groups]``, of the format's dtype, or None.
        outer_minima: the same, or None.

    Raises:
        ValueError: naming the tensor that doesn't fit the format.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_minima: torch.Tensor | None = None

    def __post_init__(self) -> None:
        quantization = self.quantization
        if self.codes.dim() != 3 or self.codes.dtype != torch.uint8:
            raise ValueError(
                "codes must be [num_experts, rows, columns] uint8, "
                f"got {list(self.codes.shape)} {self.codes.dtype}"
            )
        num_experts, rows, columns = self.codes.shape
        groups = (num_experts, rows, quantization.groups(columns))
        outer_groups = (num_experts, rows, quantization.outer_groups(columns))
        scale = SCALE_DTYPES[quantization.scale]
        outer = None if quantization.outer is None else SCALE_DTYPES[quantization.outer]
        expected: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
            "scales": (groups, scale),
            "offsets": (groups, None if quantization.offset is None else torch.uint8),
            "outer_scales": (outer_groups, outer),
            "outer_minima": (outer_groups, outer if quantization.offset == "minimum" else None),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if dtype is None:
                if tensor is not None:
                    raise ValueError(f"{name} must be None: format {self.format!r} has none")
            elif tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                got = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
                raise ValueError(
                    f"{name} must be {list(shape)} {dtype} for format {self.format!r}, got {got}"
                )

    def check_values(self) -> None:
        """Looks for what no kernel knows: codes beyond four bits, zero points beyond 16, scales that are NaN.

        Raises:
            ValueError: naming the tensor.
        """
        quantization = self.quantization
        if quantization.code_bits == 4 and int(self.codes.max()) > 15:
            raise ValueError(f"codes of format {self.format!r} must be 0 to 15, got {int(self.codes.max())}")
        if quantization.offset == "zero_point" and self.offsets is not None and int(self.offsets.max()) > 16:
            raise ValueError(f"zero points (offsets) must be 0 to 16, got {int(self.offsets.max())}")
        if quantization.scale in ("fp8", "e8m0") and bool(self.scales.float().isnan().any()):
            raise ValueError(f"scales hold NaN, which is none of format {self.format!r}")

    @property
    def quantization(self) -> Quantization:
        """Of the format."""
        found = find_format(self.format).quantization
        if found is None:
            raise ValueError(f"format {self.format!r} stores weights as they are, not as codes")
        return found

    @property
    def shape(self) -> torch.Size:
        """``[num_experts, rows, columns]``."""
        return self.codes.shape

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those there are, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def empty(cls, format: str, num_experts: int, rows: int, columns: int) -> QuantizedWeight:
        """Tensors of the right shapes, to be filled."""
        quantization = find_format(format).quantization
        if quantization is None:
            raise ValueError(f"format {format!r} stores weights as they are, not as codes")

        def make(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(num_experts, rows, count, dtype=dtype, device="cpu")

        groups, outer_groups = quantization.groups(columns), quantization.outer_groups(columns)
        outer = None if quantization.outer is None else SCALE_DTYPES[quantization.outer]
        return cls(
            format,
            make(columns, torch.uint8),
            make(groups, SCALE_DTYPES[quantization.scale]),
            None if quantization.offset is None else make(groups, torch.uint8),
            None if outer is None else make(outer_groups, outer),
            make(outer_groups, outer) if outer is not None and quantization.offset == "minimum" else None,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[QuantizedWeight], dim: int = 0) -> QuantizedWeight:
        """Several together: experts (``dim=0``), or rows, as of gate and up (``dim=1``).

        Raises:
            ValueError: if there are none, they differ in format, or dim is another.
        """
        if not parts or any(part.quantization != parts[0].quantization for part in parts):
            raise ValueError(
                f"parts must be of one format, got {', '.join(part.format for part in parts) or 'none'}"
            )
        if dim not in (0, 1):
            raise ValueError(f"dim must be 0 (experts) or 1 (rows), got {dim}")
        joined = {
            name: torch.cat([part.tensors[name] for part in parts], dim=dim) for name in parts[0].tensors
        }
        return cls(parts[0].format, **joined)

    def take_rows(self, rows: torch.Tensor) -> QuantizedWeight:
        """The rows of these indices, of all experts."""
        return QuantizedWeight(self.format, **{name: whole[:, rows] for name, whole in self.tensors.items()})

    def dequantize(self) -> torch.Tensor:
        """The weights, ``[num_experts, rows, columns]`` fp32, as the format defines them."""
        quantization = self.quantization
        columns = self.codes.shape[2]

        def spread(per_group: torch.Tensor, group: int) -> torch.Tensor:
            return per_group.repeat_interleave(group or columns, dim=2)[:, :, :columns]

        scale = spread(self.scales.float(), quantization.group)
        minimum = None
        if quantization.offset is not None and self.offsets is not None:
            minimum = spread(self.offsets.float(), quantization.group)
        if self.outer_scales is not None:
            scale = spread(self.outer_scales.float(), quantization.outer_group) * scale
        values = code_values(quantization.codes, self.codes)
        if minimum is None:
            return scale * values
        if quantization.offset == "zero_point":
            return scale * (values - minimum)
        assert self.outer_minima is not None
        return scale * values - spread(self.outer_minima.float(), quantization.outer_group) * minimum


def code_values(codes: str, stored: torch.Tensor) -> torch.Tensor:
    """What stored codes (uint8) stand for, fp32."""
    if codes == "int8":
        return stored.view(torch.int8).float()
    if codes == "fp8":
        return stored.view(torch.float8_e4m3fn).float()
    return torch.tensor(CODE_VALUES[codes], dtype=torch.float32, device="cpu")[stored.long()]
