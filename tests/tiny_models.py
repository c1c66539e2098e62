"""Tiny random transformers models, one per family of MoE layers, whose experts matter for the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
NUM_LAYERS = 3
NUM_EXPERTS = 8

# An intermediate size that is no multiple of a panel, and heads that differ from hidden_size / num_heads.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _qwen3_moe(**overrides: Any) -> tuple[type, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 40, "num_experts": NUM_EXPERTS}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**_COMMON, **sizes, **overrides})


def _mixtral(**overrides: Any) -> tuple[type, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"intermediate_size": 40, "num_local_experts": NUM_EXPERTS}
    return MixtralForCausalLM, MixtralConfig(**{**_COMMON, **sizes, **overrides})


def _deepseek_v3(**overrides: Any) -> tuple[type, Any]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    return DeepseekV3ForCausalLM, DeepseekV3Config(**{**_COMMON, **sizes, **overrides})


def _gpt_oss(**overrides: Any) -> tuple[type, Any]:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"head_dim": 16, "intermediate_size": 40, "num_local_experts": NUM_EXPERTS, "sliding_window": 64}
    return GptOssForCausalLM, GptOssConfig(**{**_COMMON, **sizes, **overrides})


def _qwen2_moe(**overrides: Any) -> tuple[type, Any]:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 32,
        "num_experts": NUM_EXPERTS,
    }
    return Qwen2MoeForCausalLM, Qwen2MoeConfig(**{**_COMMON, **sizes, **overrides})


def _olmoe(**overrides: Any) -> tuple[type, Any]:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes = {"intermediate_size": 40, "num_experts": NUM_EXPERTS}
    return OlmoeForCausalLM, OlmoeConfig(**{**_COMMON, **sizes, **overrides})


FAMILIES: dict[str, Callable[..., tuple[type, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
}


def randomise(model: nn.Module) -> None:
    """Weights that keep activations near 1: with transformers' own, experts are too small to matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.5 if name.endswith("_bias") else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def build_model(
    family: str, *, dtype: torch.dtype = torch.float32, implementation: str = "eager", **overrides: int
) -> Any:
    """A model of the family with the same weights at every call (rounded to dtype), in eval mode."""
    model_class, config = FAMILIES[family](**overrides)
    config._experts_implementation = implementation
    model = model_class(config).eval()
    randomise(model)
    return model.to(dtype)


def token_ids(batch: int = 2, length: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def experts_modules(model: nn.Module) -> dict[str, Any]:
    return {
        name: module for name, module in model.named_modules() if type(module).__name__.endswith("Experts")
    }
