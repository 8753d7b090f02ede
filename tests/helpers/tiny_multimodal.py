"""Tiny random multimodal transformers models, saved by transformers, and their logits for text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.tiny_families import CONVOLUTIONS, DELTA
from helpers.tiny_models import SIZES
from transformers import AutoConfig, AutoModelForImageTextToText

_TEXT = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "embed_dim": 16,
    "out_hidden_size": 64,
    "mlp_ratio": 2,
    "num_channels": 3,
    "vocab_size": 32,
}


def _three_parts(*sections: int, **others: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **others}
    }


_OFFSET_NORMS = ("gemma3", "qwen3_5", "qwen3_5_moe")
_GEMMA4 = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32}

# By `model_type`, optionally followed by that of the text model: settings of the text model that differ from the sizes above.
MODELS: dict[str, dict[str, Any]] = {
    "aya_vision": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "cohere2_vision": {"sliding_window": 8},
    "exaone4_5": {"sliding_window": 8, "sliding_window_pattern": 2},
    "gemma3": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gemma4": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 128,
    },
    "gemma4_unified": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "glm46v": _three_parts(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v": _three_parts(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_moe": {
        **_three_parts(2, 1, 1, partial_rotary_factor=0.5),
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    "idefics3": {},
    "internvl": {},
    "internvl qwen3": {},
    "lfm2_vl": CONVOLUTIONS,
    "lfm2_vl lfm2_moe": {**CONVOLUTIONS, **_EXPERTS, "num_experts": 8},
    "llama4": {
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
    },
    "llava": {},
    "llava_next": {},
    "llava_next mistral": {"sliding_window": 8},
    "llava_onevision": {},
    "mistral3": {"sliding_window": None},
    "mistral3 ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "ovis2": {},
    "qwen2_vl": _three_parts(4, 2, 2),
    "qwen2_5_vl": _three_parts(4, 2, 2),
    "qwen3_vl": _three_parts(4, 2, 2, mrope_interleaved=True),
    "qwen3_vl_moe": {**_three_parts(4, 2, 2, mrope_interleaved=True), **_EXPERTS, "num_experts": 8},
    "qwen3_5": {**_three_parts(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5), **DELTA},
    "qwen3_5_moe": {
        **_three_parts(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
        **DELTA,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
    },
    "smolvlm": {},
}


def make_multimodal(name: str, directory: Path) -> Path:
    """Save a random model of this kind to `directory`; 1-D parameters are random too."""
    model_type, _, of_text = name.partition(" ")
    known = AutoConfig.for_model(model_type)
    text = {"model_type": of_text or known.get_text_config().model_type, **_TEXT, **MODELS[name]}
    default = (known.vision_config or AutoConfig.for_model(f"{model_type}_vision")).to_dict()
    kept = {key: value for key, value in default.items() if not isinstance(value, dict)}
    vision = {**kept, **{key: value for key, value in _VISION.items() if key in default}}
    config = type(known)(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "visual" in key or "vision" in key:
                continue
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # for peaked attention, in which errors are visible
            else:
                offset = model_type in _OFFSET_NORMS and not key.endswith("linear_attn.norm.weight")
                parameter.normal_(0.0, 0.3).add_(0.0 if offset else 1.0)
        for key, tensor in (*model.named_buffers(), *model.named_parameters()):
            if key.endswith(("e_score_correction_bias", "expert_bias")):  # zeros otherwise
                tensor.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    return directory


# Classes without the logit scale that their text models apply as separate models.
_UNSCALED = (transformers.AyaVisionForConditionalGeneration, transformers.Cohere2VisionForConditionalGeneration)


class TextLogits:
    """Multimodal transformers model in float32 with eager attention, for text."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return [T, V] float32 logits of the sequence in one pass."""
        ids = torch.tensor([list(token_ids)])
        if isinstance(self.model, _UNSCALED):
            return self.model(input_ids=ids, use_cache=False).logits[0] * self.model.config.text_config.logit_scale
        if isinstance(self.model, transformers.Llama4ForConditionalGeneration):  # its output requires an image
            return self.model.language_model(input_ids=ids, use_cache=False).logits[0]
        return self.model(input_ids=ids, use_cache=False).logits[0]
