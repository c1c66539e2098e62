"""The weight formats of packed experts: the one place to add a format.

A format here has its counterpart in ``csrc/kernels/kernels.h`` (``WeightFormat``) and, if its weights are
codes, in ``csrc/kernels/quantization.h``, where the layout of a panel and the arithmetic are defined. The op
tells plain formats apart by the dtype of the packed tensors, the others by :attr:`WeightFormat.quantization`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

PANEL_WIDTH = 16
"""Output rows per panel, the unit that slices are cut in (``kPanelWidth`` in C++)."""

_CACHE_LINE = 64

CODE_VALUES: dict[str, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "uint4": tuple(float(code) for code in range(16)),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "iq4": (
        -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
        1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
    ),
}  # fmt: skip
"""What the 16 codes of four bits stand for. e2m1: OCP Microscaling Formats 1.0; iq4: llama.cpp's IQ4_NL."""

SCALE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class Quantization:
    """How codes become weights; what csrc/kernels/quantization.h calls by the same names.

    ``weight = scale * (value - zero point)`` or ``scale * value - minimum``, in fp32, where a scale is an
    inner scale or its product with an outer one, and a minimum the product of an inner and an outer one.

    Attributes:
        codes: ``int8``, ``fp8`` (e4m3), or of four bits a name of :data:`CODE_VALUES`.
        scale: type of the (inner) scales, a name of :data:`SCALE_DTYPES`.
        group: k per scale, a multiple of 8; 0: a row has one.
        outer: type of the outer scales and minima, or None.
        outer_group: k per outer scale, a multiple of group; 0: a row has one.
        offset: ``"zero_point"`` or ``"minimum"`` (uint8, as many as scales), or None.
        rows: rows that share a scale where weights are quantized here; each keeps a copy.
    """

    codes: str
    scale: str
    group: int = 0
    outer: str | None = None
    outer_group: int = 0
    offset: str | None = None
    rows: int = 1

    def __post_init__(self) -> None:
        if self.codes not in CODE_VALUES and self.codes not in ("int8", "fp8"):
            raise ValueError(
                f"codes must be int8, fp8 or one of {', '.join(CODE_VALUES)}, got {self.codes!r}"
            )

    @property
    def code_bits(self) -> int:
        """Bits of one code."""
        return 4 if self.codes in CODE_VALUES else 8

    @property
    def text(self) -> str:
        """What the op's ``format`` argument takes."""
        words = {
            "codes": self.codes,
            "group": self.group or None,
            "scale": self.scale,
            "outer": self.outer,
            "outer_group": self.outer_group or None,
            "offset": self.offset,
        }
        return " ".join(f"{name}={value}" for name, value in words.items() if value is not None)

    def groups(self, columns: int) -> int:
        """Scales of a row of so many columns."""
        padded = _round_up(columns, 8)
        return -(-padded // (self.group or padded))

    def outer_groups(self, columns: int) -> int:
        """Outer scales of a row."""
        padded = _round_up(columns, 8)
        return -(-padded // (self.outer_group or _round_up(padded, self.group or padded)))

    def panel_bytes(self, columns: int) -> int:
        """Bytes of a panel, ``QuantizedPanel`` in C++."""
        scale_bytes = SCALE_DTYPES[self.scale].itemsize + (0 if self.offset is None else 1)
        per_column = _round_up(columns, 8) * self.code_bits // 8 + self.groups(columns) * scale_bytes
        if self.outer is not None:
            sections = 2 if self.offset == "minimum" else 1
            per_column += sections * self.outer_groups(columns) * SCALE_DTYPES[self.outer].itemsize
        return _round_up(per_column * PANEL_WIDTH, _CACHE_LINE)

    @property
    def bits_per_weight(self) -> float:
        """Scales included, but for those of which a row has one."""
        bits = float(self.code_bits)
        if self.group:
            bits += (8 * SCALE_DTYPES[self.scale].itemsize + (0 if self.offset is None else 8)) / self.group
        if self.outer is not None and self.outer_group:
            sections = 2 if self.offset == "minimum" else 1
            bits += sections * 8 * SCALE_DTYPES[self.outer].itemsize / self.outer_group
        return bits


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of packed experts are stored and multiplied.

    Attributes:
        name: what ``pack_experts(format=...)`` takes.
        dtype: dtype of the packed tensors.
        bits_per_weight: storage, scales included.
        k_group: consecutive input channels that lie side by side in a panel.
        activations: what hidden states and intermediate activations are rounded to before each product;
            sums are always fp32.
        quantization: how codes become weights; None if weights are stored as they are.
    """

    name: str
    dtype: torch.dtype
    bits_per_weight: float
    k_group: int
    activations: str
    quantization: Quantization | None = None

    def panel_shape(self, columns: int) -> tuple[int, ...]:
        """Last dimensions of a packed tensor, of so many columns (input channels)."""
        if self.quantization is not None:
            return (self.quantization.panel_bytes(columns),)
        return -(-columns // self.k_group), PANEL_WIDTH, self.k_group


def _quantized(name: str, quantization: Quantization) -> WeightFormat:
    return WeightFormat(name, torch.uint8, quantization.bits_per_weight, 8, "bf16", quantization)


# Groups and scales that formats of a name like int4_g128_zp_fp16 can have.
_FAMILIES = {"int8": "int8", "int4": "int4"}
_FAMILY_NAME = re.compile(r"(int8|int4)(?:_g([0-9]{1,6}))?(_zp)?(?:_(fp32|fp16|bf16))?")


def _find_in_family(name: str) -> WeightFormat | None:
    match = _FAMILY_NAME.fullmatch(name)
    if match is None:
        return None
    codes, group, zero_point, scale = match.groups()
    size = int(group) if group else (32 if codes == "int4" else 0)
    if (group and (size < 16 or size % 16)) or (zero_point and codes == "int8"):
        return None
    quantization = Quantization(
        codes="uint4" if zero_point else codes,
        scale=scale or ("bf16" if size else "fp32"),
        group=size,
        offset="zero_point" if zero_point else None,
    )
    return _quantized(name, quantization)


_NAMED = {
    "fp8": Quantization("fp8", "fp32", group=128, rows=128),
    "fp8_row": Quantization("fp8", "fp32"),
    "mxfp4": Quantization("e2m1", "e8m0", group=32),
    "nvfp4": Quantization("e2m1", "fp8", group=16, outer="fp32"),
    "q8_0": Quantization("int8", "fp16", group=32),
    "q4_0": Quantization("int4", "fp16", group=32),
    "q4_k": Quantization("uint4", "uint8", group=32, outer="fp16", outer_group=256, offset="minimum"),
    "q6_k": Quantization("int8", "int8", group=16, outer="fp16", outer_group=256),
    "iq4_xs": Quantization("iq4", "int8", group=32, outer="fp16", outer_group=256),
}

FORMATS: dict[str, WeightFormat] = {
    "bf16": WeightFormat("bf16", torch.bfloat16, 16, 2, "bf16"),
    "fp16": WeightFormat("fp16", torch.float16, 16, 1, "fp32"),
    "fp32": WeightFormat("fp32", torch.float32, 32, 1, "fp32"),
    **{
        name: found
        for name in ("int8", "int8_g128", "int4", "int4_g64", "int4_g128", "int4_zp")
        if (found := _find_in_family(name)) is not None
    },
    **{name: _quantized(name, quantization) for name, quantization in _NAMED.items()},
}
"""By name. Besides these, ``int8`` and ``int4`` take ``_g`` and a group size (a multiple of 16), then (int4)
``_zp`` for zero points, then ``_fp32``, ``_fp16`` or ``_bf16`` for the type of the scales."""


def find_format(name: str) -> WeightFormat:
    """The format called ``name``.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    found = FORMATS.get(name) or _find_in_family(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"format must be one of {', '.join(FORMATS)} (where a model is patched also auto), or int8 or "
            "int4 and, in this order, _g and a group size (multiple of 16), _zp for zero points (int4), and "
            f"_fp16, _bf16 or _fp32 for the scales, as int4_g128_zp_fp16; got {name!r}"
        )
    return found


def format_of_dtype(dtype: torch.dtype) -> WeightFormat:
    """The format that stores ``dtype`` as it is.

    Raises:
        ValueError: if no format does.
    """
    for candidate in FORMATS.values():
        if candidate.dtype == dtype and candidate.quantization is None:
            return candidate
    raise ValueError(f"no weight format stores {dtype}; formats are {', '.join(FORMATS)}")
