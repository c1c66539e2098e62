"""A small trained MoE language model, generating text through ``torch.ops.numa_moe.experts``."""

from torch_numa_moe.demo.generate import MODEL_PATH, run_demo

__all__ = ["MODEL_PATH", "run_demo"]
