"""Tiny random models of every architecture of transformers that carries routed experts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiny_models import randomise

VOCABULARY = 128

# What configurations call their sizes; each takes those that it knows. Intermediate sizes that differ from
# each other and from hidden_size, so that a mix-up can't go unnoticed.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size": 64,
    "d_model": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # layers
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_nextn_predict_layers": 0,
    # attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "use_mamba_kernels": False,
    # dense and shared FFNs
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_dense_intermediate_size": 96,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    # routed experts
    "moe_intermediate_size": 40,
    "expert_ffn_hidden_size": 40,
    "moe_hidden_size": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    # where they are
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "num_dense_blocks": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True)
class Architecture:
    """One folder of ``transformers/models``.

    Attributes:
        name: the folder's.
        model_class: the smallest of its classes that runs the experts.
        overrides: configuration values beyond the common sizes; None removes one of those.
    """

    name: str
    model_class: str
    overrides: dict[str, Any] = field(default_factory=dict)


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
_BOTH_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}


def _architecture(name: str, model_class: str, **overrides: Any) -> Architecture:
    return Architecture(name, model_class, overrides)


ARCHITECTURES: tuple[Architecture, ...] = (
    _architecture("afmoe", "AfmoeForCausalLM"),
    _architecture("aria", "AriaTextForCausalLM"),
    _architecture("axk1", "AXK1ForCausalLM"),
    _architecture("axk2", "AXK2ForCausalLM"),
    _architecture("bailing_hybrid", "BailingHybridForCausalLM"),
    _architecture("beam", "BeamForCausalLM"),
    _architecture("cohere2_moe", "Cohere2MoeForCausalLM"),
    _architecture(
        "dbrx",
        "DbrxForCausalLM",
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    ),
    _architecture("deepseek_ocr2", "DeepseekOcr2TextModel", mlp_layer_types=["dense", "sparse"]),
    _architecture("deepseek_v2", "DeepseekV2ForCausalLM"),
    _architecture("deepseek_v3", "DeepseekV3ForCausalLM"),
    _architecture("deepseek_v32", "DeepseekV32ForCausalLM"),
    _architecture("deepseek_v4", "DeepseekV4ForCausalLM"),
    _architecture("diffusion_gemma", "DiffusionGemmaEncoderTextModel"),
    _architecture("doge", "DogeForCausalLM", is_moe=True, num_experts=16, num_experts_per_tok=4),
    _architecture("dots1", "Dots1ForCausalLM"),
    _architecture("dots3_note", "Dots3NoteForCausalLM"),
    _architecture("ergo", "ErgoForCausalLM"),
    _architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_layer_start_index=0,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
    ),
    _architecture(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextModel",
        moe_intermediate_size=[40, 24],
        mlp_layer_types=["dense", "sparse"],
        rope_parameters=_MROPE,
    ),
    _architecture("exaone_moe", "ExaoneMoeForCausalLM"),
    _architecture("flex_olmo", "FlexOlmoForCausalLM"),
    _architecture("flint", "FlintForCausalLM"),
    _architecture(
        "gemma4",
        "Gemma4ForCausalLM",
        enable_moe_block=True,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
        num_global_key_value_heads=2,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _architecture("glm4_moe", "Glm4MoeForCausalLM"),
    _architecture("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    _architecture(
        "glm4v_moe",
        "Glm4vMoeTextModel",
        head_dim=64,
        num_attention_heads=2,
        rope_parameters={**_MROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 1.0},
    ),
    _architecture(
        "glm5_next",
        "Glm5NextTextModel",
        qk_rope_head_dim=0,
        head_dim=0,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention", "indexed_attention"],
        indexer_types=["full", "full"],
        index_kpool=4,
        **_BOTH_SPARSE,
    ),
    _architecture("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    _architecture("gpt_oss", "GptOssForCausalLM"),
    _architecture("granitemoe", "GraniteMoeForCausalLM"),
    _architecture("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    _architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        layer_types=["linear_attention", "full_attention"],
    ),
    _architecture("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    _architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    _architecture("hy_v3", "HYV3ForCausalLM"),
    _architecture("hy_v4", "HYV4ForCausalLM"),
    _architecture(
        "hy_v4_vl",
        "HYV4VLTextModel",
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        index_head_dim=96,
        **_BOTH_SPARSE,
    ),
    _architecture("inkling", "InklingForCausalLM"),
    _architecture("inkling2", "Inkling2ForCausalLM"),
    _architecture("inkling2_loop", "Inkling2LoopForCausalLM"),
    _architecture(
        "jamba",
        "JambaForCausalLM",
        expert_layer_offset=0,
        expert_layer_period=1,
        attn_layer_period=2,
        attn_layer_offset=1,
    ),
    _architecture("jetmoe", "JetMoeForCausalLM", kv_channels=16, num_key_value_heads=4),
    _architecture(
        "kimi_linear",
        "KimiLinearForCausalLM",
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=16,
        linear_num_heads=4,
        **_BOTH_SPARSE,
    ),
    _architecture("kolibri1", "Kolibri1ForCausalLM"),
    _architecture("kolibri1_1", "Kolibri1_1ForCausalLM", kv_source_layers=[0, 1], index_num_heads=1),
    _architecture("laguna", "LagunaForCausalLM"),
    _architecture("lara_mini", "LaraMiniForCausalLM"),
    _architecture("lfm2_moe", "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"], conv_L_cache=3),
    _architecture(
        "llama4",
        "Llama4ForCausalLM",
        interleave_moe_layer_step=1,
        num_experts_per_tok=2,
        intermediate_size=40,
        intermediate_size_mlp=96,
        attention_chunk_size=32,
    ),
    _architecture("longcat_flash", "LongcatFlashForCausalLM", head_dim=16, zero_expert_num=2),
    _architecture("mellum", "MellumForCausalLM"),
    _architecture("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    _architecture("minicpm5_moe", "MiniCPM5MoeForCausalLM"),
    _architecture("minimax", "MiniMaxForCausalLM"),
    _architecture("minimax_m2", "MiniMaxM2ForCausalLM"),
    _architecture("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    _architecture("mistral4", "Mistral4ForCausalLM"),
    _architecture(
        "mistral_large4",
        "MistralLarge4TextModel",
        kv_source_layers=[0, 1],
        no_rope_layers=[1, 1],
        indexer_types=["full", "full"],
        layer_types=["indexed_attention", "indexed_attention"],
        **_BOTH_SPARSE,
    ),
    _architecture("mixtral", "MixtralForCausalLM"),
    _architecture("muse_spark", "MuseSparkTextModel"),
    _architecture("nemotron_h", "NemotronHForCausalLM", layers_block_type=["attention", "moe"]),
    _architecture(
        "nllb_moe",
        "NllbMoeForConditionalGeneration",
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        expert_capacity=64,
        decoder_start_token_id=2,
    ),
    _architecture("olmoe", "OlmoeForCausalLM"),
    _architecture("openai_privacy_filter", "OpenAIPrivacyFilterModel"),
    _architecture(
        "phimoe", "PhimoeForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
    _architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    _architecture("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    _architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    _architecture("qwen3_next", "Qwen3NextForCausalLM"),
    _architecture("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
    _architecture("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    _architecture(
        "qwen4_exp",
        "Qwen4ExpForCausalLM",
        layer_types=["linear_attention", "indexed_attention"],
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
        split_ngram_parts=2,
    ),
    _architecture("solar_open", "SolarOpenForCausalLM"),
    _architecture("step3p7", "Step3p7TextModel"),
    _architecture(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        d_kv=16,
        d_ff=96,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_decoder_layers=2,
        expert_capacity=64,
        decoder_start_token_id=0,
    ),
    _architecture("unlimited_ocr", "UnlimitedOcrTextModel"),
    _architecture(
        "vitpose_backbone",
        "VitPoseBackbone",
        image_size=[32, 32],
        patch_size=[16, 16],
        num_experts=4,
        part_features=16,
        mlp_ratio=2,
    ),
    _architecture("zaya", "ZayaForCausalLM", num_experts_per_tok=1),
)


def models_folder() -> Path:
    """Of the installed transformers."""
    import transformers

    return Path(str(transformers.__file__)).parent / "models"


def architectures_behind_the_interface() -> set[str]:
    """Folders of the installed transformers with a class that is decorated."""
    return {
        path.parent.name
        for path in models_folder().glob("*/modeling_*.py")
        if "\n@use_experts_implementation" in path.read_text(encoding="utf-8")
    }


def _accepted_names(config_class: type) -> Iterator[str]:
    for base in config_class.__mro__:
        yield from inspect.signature(base.__init__).parameters
        yield from getattr(base, "__annotations__", {})
    yield from getattr(config_class, "attribute_map", {})


def _shortened_lists(config_class: type) -> dict[str, Any]:
    """Values per layer, of the default configuration's first and last layer."""
    default = config_class()
    num_layers = getattr(default, "num_hidden_layers", None)
    return {
        name: [value[0], value[-1]]
        for name, value in vars(default).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers and not name.startswith("_")
    }


def build_config(architecture: Architecture, model_class: Any) -> Any:
    """The architecture's tiny configuration."""
    config_class = model_class.config_class
    accepted = set(_accepted_names(config_class))
    values = {name: value for name, value in _SIZES.items() if name in accepted}
    if "kv_lora_rank" in accepted:  # multi-head latent attention: as many keys as queries, sizes of its own
        values["num_key_value_heads"] = 4
        values.pop("head_dim", None)
    values = {**_shortened_lists(config_class), **values, **architecture.overrides}
    return config_class(**{name: value for name, value in values.items() if value is not None})


def _find_model_class(architecture: Architecture) -> Any:
    """The class of the installed transformers, or None if that doesn't have it."""
    folder = f"transformers.models.{architecture.name}"
    if importlib.util.find_spec(folder) is None:
        return None
    module = importlib.import_module(f"{folder}.modeling_{architecture.name}")
    return getattr(module, architecture.model_class, None)


def is_installed(architecture: Architecture) -> bool:
    """Whether the installed transformers has the architecture."""
    return _find_model_class(architecture) is not None


def build_architecture(architecture: Architecture) -> Any:
    """A model with the same fp32 weights at every call, in eval mode, its experts run eagerly."""
    model_class = _find_model_class(architecture)
    config = build_config(architecture, model_class)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval().float()
    randomise(model)
    return model


def run_architecture(model: nn.Module) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head, of a few tokens."""
    generator = torch.Generator().manual_seed(2)
    config: Any = model.config
    with torch.no_grad():
        if config.model_type == "vitpose_backbone":
            pixels = torch.randn(1, 3, 32, 32, generator=generator).to(model.dtype)
            return model(pixels, dataset_index=torch.tensor([1])).feature_maps[0]
        ids = torch.randint(3, VOCABULARY - 28, (2, 7), generator=generator)
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids[:, :4]
        output: Any = model(**inputs)
    return output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
