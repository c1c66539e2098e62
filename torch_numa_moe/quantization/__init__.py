"""Weights as codes and scales: quantizing them, and taking those that others have quantized."""

from torch_numa_moe.quantization.checkpoint_layouts import (
    from_awq,
    from_compressed_tensors,
    from_fp8_blocks,
    from_gptq,
    from_mxfp4,
    from_nvfp4,
)
from torch_numa_moe.quantization.gguf_blocks import from_gguf
from torch_numa_moe.quantization.quantize import quantize
from torch_numa_moe.quantization.weight import QuantizedWeight

__all__ = [
    "QuantizedWeight",
    "from_awq",
    "from_compressed_tensors",
    "from_fp8_blocks",
    "from_gguf",
    "from_gptq",
    "from_mxfp4",
    "from_nvfp4",
    "quantize",
]
