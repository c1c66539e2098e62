"""Weights as GGUF files hold them, taken as they are.

The blocks are those of llama.cpp (``ggml-common.h``); what they stand for is what the ``gguf`` package's
``quants.dequantize`` computes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torch_numa_moe.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    import numpy


def from_gguf(blocks: torch.Tensor | numpy.ndarray, block_type: str) -> QuantizedWeight:
    """The blocks of some experts' projection.

    Args:
        blocks: ``[num_experts, rows, bytes of a row]`` uint8, a tensor or what the ``gguf`` package's reader
            has as a tensor's ``data``.
        block_type: Q8_0, Q4_0, Q4_K, Q6_K, IQ4_XS or MXFP4, in any case.

    Raises:
        ValueError: if the type is another, or a row isn't whole blocks.
    """
    try:
        size, read = _BLOCKS[block_type.lower()]
    except (KeyError, AttributeError):
        known = ", ".join(name.upper() for name in _BLOCKS)
        raise ValueError(f"block_type must be one of {known}, got {block_type!r}") from None
    if hasattr(blocks, "__array_interface__"):
        blocks = torch.tensor(
            blocks, device="cpu"
        )  # a copy: the reader's are mapped from the file, read-only
    if not isinstance(blocks, torch.Tensor):
        raise TypeError(f"blocks must be a tensor or a numpy array, got {type(blocks).__name__}")
    if blocks.dim() != 3 or blocks.dtype != torch.uint8 or blocks.shape[2] % size:
        raise ValueError(
            f"blocks must be [num_experts, rows, bytes] uint8, whole blocks of {size} bytes for "
            f"{block_type.upper()}; got {list(blocks.shape)} {blocks.dtype}"
        )
    return read(blocks.unflatten(2, (-1, size)))


# All below take [num_experts, rows, blocks of a row, bytes of a block].


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Two bytes as fp16: [num_experts, rows, blocks]."""
    return blocks.contiguous().view(torch.float16).flatten(2)


def _low_then_high(packed: torch.Tensor) -> torch.Tensor:
    """Codes of four bits: the low halves of all bytes of the last dimension, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = blocks[..., 2:].flatten(2).contiguous()
    return QuantizedWeight("q8_0", codes, _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _low_then_high(blocks[..., 2:]).flatten(2).contiguous()
    return QuantizedWeight("q4_0", codes, _halves(blocks[..., :2]))


def _mxfp4(blocks: torch.Tensor) -> QuantizedWeight:
    # ggml doubles the levels of e2m1 and halves the scale.
    codes = _low_then_high(blocks[..., 1:]).flatten(2).contiguous()
    scales = blocks[..., :1].flatten(2).contiguous()
    return QuantizedWeight("mxfp4", codes, scales.view(torch.float8_e8m0fnu))


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=-1)
    codes = _low_then_high(blocks[..., 16:].unflatten(-1, (4, 32)))
    return QuantizedWeight(
        "q4_k",
        codes.flatten(2).contiguous(),
        scales.flatten(2).contiguous(),
        minima.flatten(2).contiguous(),
        _halves(blocks[..., 0:2]),
        _halves(blocks[..., 2:4]),
    )


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    low = _low_then_high(blocks[..., :128].unflatten(-1, (2, 64)))  # [..., 2, 128]
    packed = blocks[..., 128:192].unflatten(-1, (2, 32))
    high = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    codes = ((low | (high << 4)).view(torch.int8) - 32).view(torch.uint8)
    return QuantizedWeight(
        "q6_k",
        codes.flatten(2).contiguous(),
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(2),
        outer_scales=_halves(blocks[..., 208:210]),
    )


def _iq4_xs(blocks: torch.Tensor) -> QuantizedWeight:
    high_bits = blocks[..., 2:4].to(torch.int32)
    high_bits = high_bits[..., 0] | (high_bits[..., 1] << 8)  # two bits of each scale
    low_bits = blocks[..., 4:8].to(torch.int32)
    low_bits = torch.stack((low_bits & 15, low_bits >> 4), dim=-1).flatten(-2)
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device="cpu")
    scales = (low_bits | (((high_bits.unsqueeze(-1) >> shifts) & 3) << 4)) - 32
    codes = _low_then_high(blocks[..., 8:].unflatten(-1, (8, 16)))
    return QuantizedWeight(
        "iq4_xs",
        codes.flatten(2).contiguous(),
        scales.to(torch.int8).flatten(2).contiguous(),
        outer_scales=_halves(blocks[..., :2]),
    )


_BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], QuantizedWeight]]] = {
    "q8_0": (34, _q8_0),
    "q4_0": (18, _q4_0),
    "q4_k": (144, _q4_k),
    "q6_k": (210, _q6_k),
    "iq4_xs": (136, _iq4_xs),
    "mxfp4": (17, _mxfp4),
}
