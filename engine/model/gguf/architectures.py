"""The architectures of GGUF files that are read, each with the family that it is to the decoder.

Responsible for what distinguishes one from the next; what they share is the business of `metadata` and `tensor_names`. To
read another one: a line here, where a file has what the names there say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.cohere import COHERE, COHERE2
from windlass.engine.model.families.ernie4_5 import ERNIE4_5
from windlass.engine.model.families.exaone4 import EXAONE4
from windlass.engine.model.families.falcon import FALCON
from windlass.engine.model.families.falcon_h1 import FALCON_H1
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.gated_delta import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from windlass.engine.model.families.gemma import GEMMA, GEMMA2
from windlass.engine.model.families.gemma3 import GEMMA3
from windlass.engine.model.families.gemma4 import GEMMA4
from windlass.engine.model.families.glm import GLM, GLM4
from windlass.engine.model.families.granite4 import GRANITE4
from windlass.engine.model.families.hunyuan import HUNYUAN
from windlass.engine.model.families.latent_attention import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU
from windlass.engine.model.families.layer_norms import GPT_NEOX, NEMOTRON, PHI, STABLELM, STARCODER2
from windlass.engine.model.families.lfm2 import LFM2, LFM2_MOE
from windlass.engine.model.families.llama import LLAMA
from windlass.engine.model.families.llama_like import ARCEE, GRANITE, SEED_OSS
from windlass.engine.model.families.mistral import MINISTRAL3, MISTRAL
from windlass.engine.model.families.nemotron_h import NEMOTRON_H
from windlass.engine.model.families.olmo import OLMO, OLMO2, OLMO3
from windlass.engine.model.families.phi3 import PHI3
from windlass.engine.model.families.qwen import QWEN2, QWEN3
from windlass.engine.model.families.sigmoid_experts import GLM4_MOE
from windlass.engine.model.families.smollm3 import SMOLLM3
from windlass.engine.model.families.softmax_experts import (
    GPT_OSS,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from windlass.engine.model.gguf import falcon_h1, granite, lfm2, nemotron_h
from windlass.engine.model.gguf.carried_states import attention_layers_only
from windlass.engine.model.gguf.delta import GATED_DELTA_FIELDS, GATED_DELTA_MOE_FIELDS
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.model.gguf.gemma import gemma2, gemma3
from windlass.engine.model.gguf.gemma4 import GEMMA4_KEYS, gemma4, gemma4_by_tensors, gemma4_local, gemma4_rotation
from windlass.engine.model.gguf.glm4_moe import GLM4_MOE_FIELDS
from windlass.engine.model.gguf.latent import MLA_KEYS, mla_experts, mla_family, mla_rope
from windlass.engine.model.gguf.local_layers import PATTERN, WINDOW, local_and_global
from windlass.engine.model.gguf.rope import Factors
from windlass.engine.model.gguf.tensor_names import GGUFTensorLocation
from windlass.engine.rotary.fields import format_value

_EXPERTS = ("expert_count", "expert_used_count")
_EXPERT_WIDTH, _SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_TEMPERATURE = "attention.temperature_scale"


def _nothing_more(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _as_they_are(keys: ArchitectureKeys, layers: int) -> ArchitectureKeys:
    return keys


def _as_told(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    return dict(rope)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`.

    family: of models that say so; choose: where metadata tells another one, of `others`. interleaved: rows of q and k hold
    rotated pairs as (2j, 2j + 1), because llama.cpp's converter reordered them or because the family has them so.
    norms_with_offset: the converter added the family's offset to the weights of its norms. more: keys of config.json that only
    this architecture has, from the metadata and what config.json holds already. reads: the keys that it looks at. told_by:
    keys of config.json that follow from the names of tensors. aliases: what a name of a tensor in a layer stands for that
    means something else elsewhere, where all of them are there. fused_in_parts, values_in_turns, gates_apart, factored: see
    `GGUFIndex`.
    rope: the rotation of layers that see everything, from what the keys that all share say of it; rotation: of all kinds of
    layers, in place of that. plain: of keys that differ from layer to layer, with the number of those, the ones that the plain
    sizes of config.json are.
    """

    family: Family
    interleaved: bool = False
    norms_with_offset: bool = False
    choose: Callable[[ArchitectureKeys], Family | None] = lambda keys: None
    others: tuple[Family, ...] = ()
    more: Callable[[ArchitectureKeys, Mapping[str, Any]], dict[str, Any]] = _nothing_more
    reads: tuple[str, ...] = ()
    told_by: Callable[[Mapping[str, GGUFTensorLocation]], dict[str, Any]] = lambda tensors: {}
    aliases: Mapping[str, str] = field(default_factory=dict)
    fused_in_parts: bool = False
    values_in_turns: bool = False
    gates_apart: bool = False
    factored: bool = False
    rope: Callable[[Mapping[str, Any], ArchitectureKeys], dict[str, Any]] = _as_told
    rotation: Callable[[ArchitectureKeys, Mapping[str, Any], Factors], dict[str, Any]] | None = None
    plain: Callable[[ArchitectureKeys, int], ArchitectureKeys] = _as_they_are

    @property
    def families(self) -> tuple[Family, ...]:
        """All that a model which says so may be."""
        return self.family, *self.others


def _llama_with_a_window(keys: ArchitectureKeys) -> Family | None:
    """llama.cpp calls Mistral and Mixtral a Llama; a window tells the one apart, experts the other."""
    if keys.count(_EXPERTS[0]) > 1:
        return MIXTRAL
    return MISTRAL if keys.count(WINDOW) else None


def _mistral_without_temperature(keys: ArchitectureKeys) -> Family | None:
    """Mistral Small 3.1 and Ministral 3 are the same architecture there; only the latter's queries grow."""
    return None if keys.number(_TEMPERATURE) else MISTRAL


def _experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.count(_EXPERTS[0]) or None,
        "num_experts_per_tok": keys.count(_EXPERTS[1]) or None,
        "moe_intermediate_size": keys.count(_EXPERT_WIDTH) or None,
    }


def _qwen2_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_experts(keys, config), "shared_expert_intermediate_size": keys.count(_SHARED_WIDTH)}


def _qwen3_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say so, but llama.cpp divides weights by their sum."""
    return {**_experts(keys, config), "norm_topk_prob": True}


def _llama(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_window(keys, config), **(_experts(keys, config) if keys.count(_EXPERTS[0]) > 1 else {})}


def _window(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """A window that all layers share. It is written even where there is none: the family has one by default."""
    return {"sliding_window": keys.count(WINDOW) or None}


def _phi3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Files from before llama.cpp wrote the window: Phi 3 mini and medium with a context of 4096 see 2047 tokens."""
    window: int | None = keys.count(WINDOW) or None
    if (
        keys.raw(WINDOW) is None
        and config["max_position_embeddings"] == 4096
        and config["num_hidden_layers"] in (32, 40)
    ):
        window = 2047
    original = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _smollm3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file does not say which layers do not rotate; llama.cpp takes every fourth."""
    return {"no_rope_layer_interval": 4}


def _gpt_oss(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **local_and_global(2)(keys, config),
        "intermediate_size": keys.count(_EXPERT_WIDTH) or config["intermediate_size"],
        "num_local_experts": keys.size(_EXPERTS[0]),
        "num_experts_per_tok": keys.size(_EXPERTS[1]),
    }


def _gpt_oss_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """The file does not say that the ends of YaRN's ramp are no whole numbers in this family."""
    return {**rope, "truncate": False} if rope["rope_type"] == "yarn" else dict(rope)


def _logit_scale(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale")}


def _cohere2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return local_and_global(4)(keys, config) | _logit_scale(keys, config)


def _falcon(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """The newer form of the family, of which the older with one key head is a case."""
    two = "blk.0.attn_norm_2.weight" in tensors
    return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if two else 1}


def _parallel(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    parallel = keys.raw("use_parallel_residual")
    return {"use_parallel_residual": True if parallel is None else parallel}


def _olmo2_with_a_window(keys: ArchitectureKeys) -> Family | None:
    return OLMO3 if keys.count(WINDOW) else None


def _olmo2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return local_and_global(4)(keys, config) if keys.count(WINDOW) else {}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        LLAMA,
        interleaved=True,
        choose=_llama_with_a_window,
        others=(MISTRAL, MIXTRAL),
        more=_llama,
        reads=(WINDOW, *_EXPERTS),
    ),
    "mistral3": Architecture(
        MINISTRAL3,
        interleaved=True,
        choose=_mistral_without_temperature,
        others=(MISTRAL,),
        more=_window,
        reads=(WINDOW, _TEMPERATURE, "rope.scaling.yarn_log_multiplier"),
    ),
    "qwen2": Architecture(QWEN2),
    "qwen3": Architecture(QWEN3),
    "qwen2moe": Architecture(QWEN2_MOE, more=_qwen2_moe, reads=(*_EXPERTS, _EXPERT_WIDTH, _SHARED_WIDTH)),
    "qwen3moe": Architecture(QWEN3_MOE, more=_qwen3_moe, reads=(*_EXPERTS, _EXPERT_WIDTH)),
    "qwen35": Architecture(QWEN3_5, values_in_turns=True, **GATED_DELTA_FIELDS),
    "qwen35moe": Architecture(QWEN3_5_MOE, values_in_turns=True, **GATED_DELTA_MOE_FIELDS),
    "qwen3next": Architecture(QWEN3_NEXT, **GATED_DELTA_MOE_FIELDS),
    "olmoe": Architecture(OLMOE, more=_experts, reads=_EXPERTS),
    "gemma3": Architecture(
        GEMMA3,
        norms_with_offset=True,
        more=gemma3,
        reads=(WINDOW, PATTERN, "attention.scale", "final_logit_softcapping", "rope.freq_base_swa"),
    ),
    "gemma4": Architecture(
        GEMMA4,
        more=gemma4,
        reads=GEMMA4_KEYS,
        told_by=gemma4_by_tensors,
        rotation=gemma4_rotation,
        plain=gemma4_local,
    ),
    "smollm3": Architecture(SMOLLM3, interleaved=True, more=_smollm3),
    "ernie4_5": Architecture(ERNIE4_5, interleaved=True),
    "chatglm": Architecture(GLM, interleaved=True),
    "glm4": Architecture(GLM4, interleaved=True),
    "glm4moe": Architecture(GLM4_MOE, **GLM4_MOE_FIELDS),
    "phi3": Architecture(PHI3, more=_phi3, reads=(WINDOW,)),
    "hunyuan-dense": Architecture(HUNYUAN),
    "gemma": Architecture(GEMMA, norms_with_offset=True),
    "gemma2": Architecture(
        GEMMA2,
        norms_with_offset=True,
        more=gemma2,
        reads=(WINDOW, PATTERN, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "starcoder2": Architecture(STARCODER2),
    "phi2": Architecture(PHI),
    "gptneox": Architecture(GPT_NEOX, fused_in_parts=True, more=_parallel, reads=("use_parallel_residual",)),
    "stablelm": Architecture(
        STABLELM,
        told_by=lambda tensors: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors},
        reads=("use_parallel_residual",),  # many files have it wrong: the tensors decide
    ),
    "nemotron": Architecture(NEMOTRON, norms_with_offset=True),
    "falcon": Architecture(
        FALCON, fused_in_parts=True, told_by=_falcon, aliases={"attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"}
    ),
    "olmo": Architecture(
        OLMO,
        interleaved=True,
        more=lambda keys, config: {"clip_qkv": keys.number("attention.clamp_kqv")},
        reads=("attention.clamp_kqv",),
    ),
    "olmo2": Architecture(OLMO2, choose=_olmo2_with_a_window, others=(OLMO3,), more=_olmo2, reads=(WINDOW, PATTERN)),
    "command-r": Architecture(
        COHERE,
        interleaved=True,
        more=_logit_scale,
        reads=("logit_scale",),
        told_by=lambda tensors: {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors},
    ),
    "cohere2": Architecture(COHERE2, interleaved=True, more=_cohere2, reads=(WINDOW, PATTERN, "logit_scale")),
    "granite": Architecture(GRANITE, interleaved=True, **granite.GRANITE_FIELDS),
    "granitemoe": Architecture(
        GRANITE_MOE, interleaved=True, others=(GRANITE_MOE_SHARED,), **granite.GRANITE_MOE_FIELDS
    ),
    "granitehybrid": Architecture(GRANITE4, interleaved=True, gates_apart=True, **granite.GRANITE_HYBRID_FIELDS),
    "falcon-h1": Architecture(FALCON_H1, factored=True, **falcon_h1.FALCON_H1_FIELDS),
    "nemotron_h": Architecture(NEMOTRON_H, interleaved=True, **nemotron_h.NEMOTRON_H_FIELDS),
    "nemotron_h_moe": Architecture(NEMOTRON_H, interleaved=True, **nemotron_h.NEMOTRON_H_MOE_FIELDS),
    "gpt-oss": Architecture(
        GPT_OSS,
        more=_gpt_oss,
        reads=(WINDOW, PATTERN, *_EXPERTS, _EXPERT_WIDTH),
        aliases={"post_attention_norm": "ffn_norm"},
        rope=_gpt_oss_rope,
    ),
    "deepseek2": Architecture(
        DEEPSEEK_V2,
        interleaved=True,
        choose=mla_family,
        others=(DEEPSEEK_V3, YOUTU),
        more=mla_experts,
        reads=tuple(MLA_KEYS),
        rope=mla_rope,
    ),
    "exaone4": Architecture(EXAONE4, more=local_and_global(4), reads=(WINDOW, PATTERN)),
    "internlm2": Architecture(LLAMA, interleaved=True),  # its tensors are taken apart there
    "seed_oss": Architecture(SEED_OSS, aliases={"post_attention_norm": "ffn_norm"}),
    "arcee": Architecture(ARCEE, interleaved=True),
    "lfm2": Architecture(
        LFM2, more=lfm2.lfm2, reads=lfm2.LFM2_KEYS, told_by=lfm2.lfm2_by_tensors, plain=attention_layers_only
    ),
    "lfm2moe": Architecture(
        LFM2_MOE,
        more=lfm2.lfm2_moe,
        reads=lfm2.LFM2_MOE_KEYS,
        told_by=lfm2.lfm2_moe_by_tensors,
        plain=attention_layers_only,
    ),
}


def find_architecture(metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The name and the entry. Raises LoadError that says what the file is and what to do."""
    kind, name = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind == "adapter":
        raise LoadError(
            "holds an adapter (LoRA), not a whole model: give the GGUF file of a model that it is merged into"
        )
    if name == "clip" or kind == "mmproj":
        raise LoadError(
            "holds the part of a model that sees or hears (mmproj): give the GGUF file of the language model"
        )
    if name == "imatrix" or kind == "imatrix":
        raise LoadError("holds an importance matrix, not a model: give the GGUF file of the model")
    if not isinstance(name, str):
        raise LoadError("names no general.architecture: get another conversion of the model")
    found = ARCHITECTURES.get(name)
    if found is None:
        what = "a mixture of experts, which is not supported" if "moe" in name else "not supported as a GGUF file"
        raise LoadError(
            f"is of architecture {format_value(name)}, {what}: read are {', '.join(ARCHITECTURES)}; or give the directory of the "
            "original Hugging Face model"
        )
    return name, found
