"""Text part of multimodal models: only the language model is loaded, no vision or audio towers.

Their config.json describes the text part in a separate object, and their files name its tensors with a prefix. For text
these models compute the same as their text part. Opens no file and imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, read_flag
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.rotary.scaling_fields import format_value


@dataclass(frozen=True, slots=True)
class MultimodalModel:
    """A class of multimodal models. text: `model_type` of a text part without one. tied: default of
    `tie_word_embeddings`. flat: older files have the text part's keys at the top level."""

    architecture: str
    title: str
    text: str
    tied: bool = False
    flat: bool = False


MULTIMODAL = (
    MultimodalModel("AyaVisionForConditionalGeneration", "Aya Vision", "cohere2", tied=True),
    MultimodalModel("Cohere2VisionForConditionalGeneration", "Command A Vision", "cohere2", tied=True),
    MultimodalModel("Exaone4_5_ForConditionalGeneration", "EXAONE 4.5", "exaone4"),
    MultimodalModel("Gemma3ForConditionalGeneration", "Gemma 3 (4B and larger)", "gemma3_text", tied=True),
    MultimodalModel("Gemma4ForConditionalGeneration", "Gemma 4", "gemma4_text", tied=True),
    MultimodalModel("Gemma4UnifiedForConditionalGeneration", "Gemma 4 (12B)", "gemma4_unified_text", tied=True),
    MultimodalModel("Glm46VForConditionalGeneration", "GLM-4.6V Flash", "glm4v_text"),
    MultimodalModel("Glm4vForConditionalGeneration", "GLM-4.1V", "glm4v_text"),
    MultimodalModel("Glm4vMoeForConditionalGeneration", "GLM-4.5V and 4.6V", "glm4v_moe_text"),
    MultimodalModel("Idefics3ForConditionalGeneration", "Idefics 3", "llama"),
    MultimodalModel("InternVLForConditionalGeneration", "InternVL 3 and 3.5", "qwen2", tied=True),
    MultimodalModel("Lfm2VlForConditionalGeneration", "LFM2-VL", "lfm2", tied=True),
    MultimodalModel("Llama4ForConditionalGeneration", "Llama 4", "llama4_text"),
    MultimodalModel("LlavaForConditionalGeneration", "LLaVA 1.5, Pixtral", "llama"),
    MultimodalModel("LlavaNextForConditionalGeneration", "LLaVA-NeXT", "llama"),
    MultimodalModel("LlavaOnevisionForConditionalGeneration", "LLaVA-OneVision", "qwen2"),
    MultimodalModel("Mistral3ForConditionalGeneration", "Mistral Small 3.1 and 3.2, Ministral 3", "mistral", tied=True),
    MultimodalModel("Ovis2ForConditionalGeneration", "Ovis 2", "qwen2", tied=True),
    MultimodalModel("Qwen2VLForConditionalGeneration", "Qwen 2 VL", "qwen2_vl_text", flat=True),
    MultimodalModel("Qwen2_5_VLForConditionalGeneration", "Qwen 2.5 VL", "qwen2_5_vl_text", flat=True),
    MultimodalModel("Qwen3VLForConditionalGeneration", "Qwen 3 VL", "qwen3_vl_text"),
    MultimodalModel("Qwen3VLMoeForConditionalGeneration", "Qwen 3 VL MoE", "qwen3_vl_moe_text"),
    MultimodalModel("Qwen3_5ForConditionalGeneration", "Qwen 3.5 and 3.6", "qwen3_5_text"),
    MultimodalModel("Qwen3_5MoeForConditionalGeneration", "Qwen 3.5 and 3.6 MoE", "qwen3_5_moe_text"),
    MultimodalModel("SmolVLMForConditionalGeneration", "SmolVLM", "llama"),
)

# Name prefixes of the tensors of other parts: vision, audio and MTP layers.
_OTHER_PARTS = tuple(
    prefix + name
    for prefix in ("", "model.")
    for name in (
        "vision_tower. vision_model. visual. visual_embeddings_table. vision_embedder. embed_vision. audio_tower. "
        "audio_embedder. embed_audio. multi_modal_projector. connector. image_newline mtp."
    ).split()
)

# Module name prefixes of text parts, in place of "model.".
_PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.")
_HEADS = ("lm_head.", "language_model.lm_head.")

# Keys of the whole model, which take precedence over those of the text part.
_MODEL_KEYS = (
    "bos_token_id compression_config dtype eos_token_id pad_token_id quantization_config torch_dtype transformers_version"
).split()

# Default sizes that text parts omit: [vocabulary, feed-forward width].
_SIZES = {
    "cohere2": (256_000, 22_528),
    "gemma3_text": (262_208, 9216),
    "lfm2": (65_536, 12_288),
    "llama": (32_000, 11_008),
    "mistral": (32_000, 14_336),
    "ministral3": (131_072, 14_336),
    "qwen2": (151_936, 22_016),
    "qwen3": (151_936, 22_016),
}

_NOTICE = "only the text part of this multimodal model is loaded, not its image and audio encoders: requests may have text only"


@dataclass(frozen=True, slots=True)
class TextConfig:
    """config: as of a text model. is_multimodal: whether it is the text part of a multimodal model."""

    config: Config
    is_multimodal: bool = False

    def adapt_spec(self, spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
        """The spec of this config, adapted to the tensors in the files. tensors: all their names; empty if no files are
        read.

        config.json states twice whether the head is tied, and both may be wrong: a stored head is always used.
        """
        if not self.is_multimodal:
            return spec
        tied = spec.tied_embeddings and not any(name.startswith(_HEADS) for name in tensors)
        return replace(
            spec,
            tied_embeddings=tied,
            unused_tensors=spec.unused_tensors + _OTHER_PARTS,
            notices=(_NOTICE, *spec.notices),
        )


def text_config_of(config: Config) -> TextConfig:
    """Text part of a multimodal model's config.json; any other config.json unchanged. Raises LoadError for an
    unsupported text part."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    kind = next((kind for kind in MULTIMODAL if kind.architecture == architecture), None)
    if kind is None:
        return TextConfig(config)
    own = config.get("text_config")
    if own is None and kind.flat:
        own = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    if not isinstance(own, Mapping):
        raise LoadError(f"config.json: {kind.architecture} needs the object text_config: download the file again")
    model_type = own.get("model_type", kind.text)
    family = _family(kind, model_type)
    text_config: dict[str, Any] = {**_sizes(family, model_type), **own}
    text_config |= {key: config[key] for key in _MODEL_KEYS if config.get(key) is not None}
    text_config |= {"architectures": [family.architecture], "model_type": model_type}
    text_config["tie_word_embeddings"] = _is_tied(config, own, kind)
    text_config.pop("tie_embedding", None)
    return TextConfig(text_config, is_multimodal=True)


def _family(kind: MultimodalModel, model_type: Any) -> Family:
    for family in FAMILIES:
        if family.causal and model_type in (family.model_type, *family.other_model_types):
            return family
    raise LoadError(
        f"config.json: the text part of this {kind.architecture} is of model_type {format_value(model_type)}, which is "
        "not supported"
    )


def _sizes(family: Family, model_type: Any) -> dict[str, Any]:
    """Values that a text part may omit."""
    if model_type == "glm4v_moe_text":  # its files have an MTP layer
        return {"num_nextn_predict_layers": 1}
    if model_type not in _SIZES:
        return {}
    (vocabulary, width), sizes = _SIZES[model_type], family.rules.sizes
    return {
        "vocab_size": vocabulary,
        "intermediate_size": width,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
    }


def _is_tied(config: Config, own: Config, kind: MultimodalModel) -> bool:
    """Whether config.json declares that the head is tied to the embedding."""
    for key in ("tie_embedding", "tie_word_embeddings"):  # the first is LFM2's
        if config.get(key) is not None:
            return read_flag(config, key)
    return read_flag(own, "tie_word_embeddings") or kind.tied


def text_module_name(module: str) -> str:
    """Name of a text part's module in the corresponding text model; other names unchanged."""
    prefix = next((prefix for prefix in _PREFIXES if module.startswith(prefix)), None)
    return module if prefix is None else f"model.{module.removeprefix(prefix)}"
