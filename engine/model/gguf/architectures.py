"""Supported values of `general.architecture`, and the family that implements each.

Holds what is specific to an architecture: Gemma 2 to 4, MLA (`deepseek2`), GLM-4.5 and small differences of others. Shared keys
are read in `gguf_description`, tensor names in `tensor_mapping`, models with recurrent layers in `hybrid_architectures`. To add
an architecture, add an entry to `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.cohere import COHERE, COHERE2
from windlass.engine.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU
from windlass.engine.model.families.ernie import ERNIE4_5
from windlass.engine.model.families.exaone4 import EXAONE4
from windlass.engine.model.families.falcon import FALCON, FALCON_H1
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from windlass.engine.model.families.glm import GLM, GLM4, GLM4_MOE
from windlass.engine.model.families.gpt_oss import GPT_OSS
from windlass.engine.model.families.granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED
from windlass.engine.model.families.hunyuan import HUNYUAN
from windlass.engine.model.families.layer_norm_families import GPT_NEOX, NEMOTRON, PHI, STABLELM, STARCODER2
from windlass.engine.model.families.lfm2 import LFM2, LFM2_MOE
from windlass.engine.model.families.llama import LLAMA
from windlass.engine.model.families.llama_variants import ARCEE, SEED_OSS, SMOLLM3
from windlass.engine.model.families.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from windlass.engine.model.families.nemotron_h import NEMOTRON_H
from windlass.engine.model.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from windlass.engine.model.families.phi import PHI3
from windlass.engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from windlass.engine.model.gguf import hybrid_architectures
from windlass.engine.model.gguf.gguf_rope import Factors, read_proportional_rope, required_theta
from windlass.engine.model.gguf.hybrid_architectures import (
    GATED_DELTA_FIELDS,
    GATED_DELTA_MOE_FIELDS,
    attention_layers_only,
)
from windlass.engine.model.gguf.metadata_keys import PATTERN, WINDOW, ArchitectureKeys, local_and_global, local_layers
from windlass.engine.model.gguf.tensor_mapping import LAYER_TABLE, GGUFTensorLocation
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

GATING = "expert_gating_func"

_SOFTMAX, SIGMOID = 1, 2

_PER_FACTOR = 0.1  # of YaRN's attention factor, by which the file's number is multiplied

GROUPED_EXPERTS_KEYS = (
    "leading_dense_block_count expert_count expert_used_count expert_feed_forward_length expert_shared_count "
    "expert_weights_scale expert_weights_norm expert_gating_func expert_group_count expert_group_used_count"
).split()

MLA_KEYS = (
    "attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla "
    "rope.scaling.yarn_log_multiplier"
).split() + GROUPED_EXPERTS_KEYS


def mla_family(keys: ArchitectureKeys) -> Family:
    """Files name one architecture for all of them: without experts it is Youtu's, and how experts are chosen tells the others."""
    if not keys.count("expert_count"):
        return YOUTU
    gating = keys.count(GATING) or _SOFTMAX
    if gating not in (_SOFTMAX, SIGMOID):
        raise LoadError(f"{keys.key(GATING)} is {format_value(gating)}: 1 (softmax) and 2 (sigmoid) are known")
    return DEEPSEEK_V3 if gating == SIGMOID else DEEPSEEK_V2


def mla_sizes(keys: ArchitectureKeys) -> dict[str, int | None]:
    """The widths of the parts of queries, keys and values."""
    compressed = keys.count("attention.key_length_mla") > 0
    head = keys.size("attention.key_length_mla" if compressed else "attention.key_length")
    rotated = keys.size("rope.dimension_count")
    if rotated >= head:
        raise LoadError(f"{keys.key('rope.dimension_count')} is {rotated}, not less than the {head} of a head's key")
    return {
        "q_lora_rank": keys.count("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": keys.size("attention.value_length_mla" if compressed else "attention.value_length"),
    }


def mla_experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of its experts; none where it has none."""
    if not keys.count("expert_count"):
        return {}
    found = grouped_experts(keys)
    if keys.count(GATING) != SIGMOID:
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found


def grouped_experts(keys: ArchitectureKeys) -> dict[str, Any]:
    """The keys of experts in groups, of which the best are looked at, behind layers that have none."""
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.raw("expert_weights_norm")),
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "n_group": keys.count("expert_group_count") or 1,
        "topk_group": keys.count("expert_group_used_count") or 1,
    }


def mla_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """Of YaRN: cosines are not scaled, scores are, by what the file's number makes of the factor."""
    multiplier = keys.number("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "yarn" or multiplier is None:
        return dict(rope)
    share = float(f"{multiplier / _PER_FACTOR:.7g}")
    return {**rope, "mscale": share, "mscale_all_dim": share}


def gemma2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing says what scales q·k: the inverse root of the head's width, but for the 27B model, which has 46 layers."""
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    return {
        "query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"] if count == 46 else head_dim,
        "layer_types": local_layers(keys, count, 2),
        "sliding_window": keys.count(WINDOW) or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def gemma3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Local and global layers, and the number whose inverse root scales q·k, which the 27B model has from elsewhere.

    Older files leave the pattern out, since every sixth layer is global; none has that number.
    """
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    scale = keys.number("attention.scale")
    if scale is not None:
        scaled_by = scale**-2
    else:
        scaled_by = config["hidden_size"] / config["num_attention_heads"] if count == 62 else head_dim
    window = keys.count(WINDOW)
    return {
        "query_pre_attn_scalar": scaled_by,
        "layer_types": local_layers(keys, count, 6) if window else [FULL_ATTENTION] * count,
        "sliding_window": window or config["max_position_embeddings"],
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


_SHARED, _KV_HEADS, _WIDTH = "attention.shared_kv_layers", "attention.head_count_kv", "feed_forward_length"

_KEY, _VALUE, _ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"

_LOCAL = "_swa"

_LOCAL_THETA = "rope.freq_base_swa"

_INPUT, _CAP = "embedding_length_per_layer_input", "final_logit_softcapping"

_EXPERT_COUNT, _USED, _GEMMA4_EXPERT_WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"

GEMMA4_KEYS = (
    *(WINDOW, PATTERN, _SHARED, _LOCAL_THETA, _INPUT, _CAP, _EXPERT_COUNT, _USED, _GEMMA4_EXPERT_WIDTH),
    *(key + _LOCAL for key in (_KEY, _VALUE, _ROTATED)),
)


def gemma4_local(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers have a window, and keys of their own. count: of layers."""
    return keys.replaced(
        {
            _KEY: keys.size(_KEY + _LOCAL),
            _VALUE: keys.size(_VALUE + _LOCAL),
            _KV_HEADS: _kv_heads(keys, _gemma4_layer_types(keys, count))[SLIDING_ATTENTION],
            _WIDTH: keys.sizes(_WIDTH, count)[0],
        }
    )


def gemma4(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What its layers have besides, and what those that see everything have of their own."""
    count = config["num_hidden_layers"]
    kinds, width, shared = _gemma4_layer_types(keys, count), keys.size(_KEY), keys.count(_SHARED)
    if keys.size(_VALUE, width) != width:
        raise LoadError("has keys and values of different widths, which is not supported: choose another model")
    if shared >= count:
        raise LoadError(f"{keys.key(_SHARED)} is {shared} of {count} layers: none is left whose keys are read")
    experts = keys.count(_EXPERT_COUNT)
    found = {
        "layer_types": kinds,
        "sliding_window": keys.size(WINDOW),
        "global_head_dim": width,
        "num_global_key_value_heads": _kv_heads(keys, kinds)[FULL_ATTENTION],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_doubled(keys, keys.sizes(_WIDTH, count), shared),
        "hidden_size_per_layer_input": keys.count(_INPUT),
        "final_logit_softcapping": keys.number(_CAP),
        "enable_moe_block": experts > 0,
    }
    if experts:
        found |= {
            "num_experts": experts,
            "top_k_experts": keys.size(_USED),
            "moe_intermediate_size": keys.size(_GEMMA4_EXPERT_WIDTH),
        }
    return found


def gemma4_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    """Whether keys are values in layers that see everything, and how many tokens have an input of the layers."""
    layer, found = 0, {"attention_k_eq_v": False}
    while f"blk.{layer}.attn_k.weight" in tensors and not found["attention_k_eq_v"]:
        found["attention_k_eq_v"] = f"blk.{layer}.attn_v.weight" not in tensors
        layer += 1
    table = tensors.get(LAYER_TABLE)
    return found if table is None else {**found, "vocab_size_per_layer_input": table.shape[0]}


def gemma4_rotation(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    """That of both kinds of layers."""
    for key, head_dim in ((_ROTATED, config["global_head_dim"]), (_ROTATED + _LOCAL, config["head_dim"])):
        if (rotated := keys.size(key, head_dim)) != head_dim:
            raise LoadError(f"{keys.key(key)} is {rotated}, not the {head_dim} of a head: get another conversion")
    return {
        "rope_parameters": {
            FULL_ATTENTION: read_proportional_rope(keys, factors, config["global_head_dim"]),
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": required_theta(keys, _LOCAL_THETA)},
        }
    }


def _gemma4_layer_types(keys: ArchitectureKeys, count: int) -> list[str]:
    """What each layer sees: the file lists it, and the last one sees everything."""
    pattern = keys.raw(PATTERN)
    if not isinstance(pattern, list):
        raise LoadError(
            f"{keys.key(PATTERN)} must be a list of flags, got {format_value(pattern)}: get another conversion"
        )
    kinds = local_layers(keys, count, 0)
    if kinds[-1] != FULL_ATTENTION:
        raise LoadError(f"{keys.key(PATTERN)} gives the last layer a window, which is not supported")
    return kinds


def _kv_heads(keys: ArchitectureKeys, kinds: Sequence[str]) -> dict[str, int]:
    """Those of each kind of layers; where there are none of a kind, the other's."""
    found: dict[str, int] = {}
    for kind, heads in zip(kinds, keys.sizes(_KV_HEADS, len(kinds)), strict=True):
        if found.setdefault(kind, heads) != heads:
            raise LoadError(f"{keys.key(_KV_HEADS)} differs among layers that see alike: choose another model")
    return {kind: found.get(kind, found[FULL_ATTENTION]) for kind in (SLIDING_ATTENTION, FULL_ATTENTION)}


def _is_doubled(keys: ArchitectureKeys, widths: Sequence[int], shared: int) -> bool:
    """Whether layers that read the keys of earlier ones are twice as wide as those."""
    own, narrow = len(widths) - shared, widths[0]
    if all(width == narrow for width in widths):
        return False
    if list(widths) != [narrow] * own + [2 * narrow] * shared:
        raise LoadError(
            f"{keys.key(_WIDTH)} must be the same for all layers, or twice as much for the last {shared}, which read the keys of "
            "earlier ones: choose another model"
        )
    return True


def _glm4_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Chosen by sigmoids, also where the file does not say so."""
    if keys.raw(GATING) not in (None, 0, SIGMOID):
        raise LoadError(
            f"{keys.key(GATING)} is {format_value(keys.raw(GATING))}: these experts are chosen by sigmoids ({SIGMOID})"
        )
    return grouped_experts(keys)


def _glm4_moe_by_tensors(tensors: Mapping[str, GGUFTensorLocation]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


# Fields of `Architecture`.
GLM4_MOE_FIELDS: dict[str, Any] = {
    "more": _glm4_moe,
    "reads": tuple(GROUPED_EXPERTS_KEYS),
    "told_by": _glm4_moe_by_tensors,
    "aliases": {"post_attention_norm": "ffn_norm"},
}

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
    "granite": Architecture(GRANITE, interleaved=True, **hybrid_architectures.GRANITE_FIELDS),
    "granitemoe": Architecture(
        GRANITE_MOE, interleaved=True, others=(GRANITE_MOE_SHARED,), **hybrid_architectures.GRANITE_MOE_FIELDS
    ),
    "granitehybrid": Architecture(
        GRANITE4, interleaved=True, gates_apart=True, **hybrid_architectures.GRANITE_HYBRID_FIELDS
    ),
    "falcon-h1": Architecture(FALCON_H1, factored=True, **hybrid_architectures.FALCON_H1_FIELDS),
    "nemotron_h": Architecture(NEMOTRON_H, interleaved=True, **hybrid_architectures.NEMOTRON_H_FIELDS),
    "nemotron_h_moe": Architecture(NEMOTRON_H, interleaved=True, **hybrid_architectures.NEMOTRON_H_MOE_FIELDS),
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
        LFM2,
        more=hybrid_architectures.lfm2,
        reads=hybrid_architectures.LFM2_KEYS,
        told_by=hybrid_architectures.lfm2_by_tensors,
        plain=attention_layers_only,
    ),
    "lfm2moe": Architecture(
        LFM2_MOE,
        more=hybrid_architectures.lfm2_moe,
        reads=hybrid_architectures.LFM2_MOE_KEYS,
        told_by=hybrid_architectures.lfm2_moe_by_tensors,
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
