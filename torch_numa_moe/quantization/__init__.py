"""Weights as codes and scales: quantizing them, and taking those that others have quantized."""

from torch_numa_moe.quantization.gguf_blocks import from_gguf
from torch_numa_moe.quantization.quantize import quantize
from torch_numa_moe.quantization.weight import QuantizedWeight

__all__ = ["QuantizedWeight", "from_gguf", "quantize"]
