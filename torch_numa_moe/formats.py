"""The weight formats of packed experts: the one place to add a format.

A format here has its counterpart in ``csrc/kernels/kernels.h`` (``WeightFormat``), where the layout of a
panel and the arithmetic are defined; the op tells formats apart by the dtype of the packed tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL_WIDTH = 16
"""Output rows per panel, the unit that slices are cut in (``kPanelWidth`` in C++)."""


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
    """

    name: str
    dtype: torch.dtype
    bits_per_weight: float
    k_group: int
    activations: str


FORMATS: dict[str, WeightFormat] = {
    format.name: format
    for format in (
        WeightFormat("bf16", torch.bfloat16, 16, 2, "bf16"),
        WeightFormat("fp16", torch.float16, 16, 1, "fp32"),
        WeightFormat("fp32", torch.float32, 32, 1, "fp32"),
    )
}


def find_format(name: str) -> WeightFormat:
    """The format called ``name``.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}") from None


def format_of_dtype(dtype: torch.dtype) -> WeightFormat:
    """The format that stores ``dtype`` as it is.

    Raises:
        ValueError: if no format does.
    """
    for candidate in FORMATS.values():
        if candidate.dtype == dtype:
            return candidate
    raise ValueError(f"no weight format stores {dtype}; formats are {', '.join(FORMATS)}")
