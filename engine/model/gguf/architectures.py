"""Supported values of `general.architecture`, and the family that implements each.

Holds what is specific to an architecture: Gemma 2 to 4, MLA (`deepseek2`), GLM-4.5 and small differences of others. Shared keys
are read in `gguf_description`, tensor names in `tensor_mapping`, models with recurrent layers in `hybrid_architectures`. To add
an architecture, add an entry to `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU
from windlass.engine.model.families.ernie import ERNIE4_5
from windlass.engine.model.families.falcon import FALCON
from windlass.engine.model.families.family import Family
from windlass.engine.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from windlass.engine.model.families.glm import GLM, GLM4, GLM4_MOE
from windlass.engine.model.families.gpt_oss import GPT_OSS
from windlass.engine.model.families.hunyuan import HUNYUAN
from windlass.engine.model.families.layer_norm_families import (
    COHERE,
    COHERE2,
    GPT_NEOX,
    NEMOTRON,
    PHI,
    STABLELM,
    STARCODER2,
)
from windlass.engine.model.families.llama import LLAMA
from windlass.engine.model.families.llama_variants import ARCEE, EXAONE4, SEED_OSS, SMOLLM3
from windlass.engine.model.families.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from windlass.engine.model.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from windlass.engine.model.families.phi import PHI3
from windlass.engine.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from windlass.engine.model.gguf.architecture import (
    DENSE_BLOCKS,
    DENSE_WIDTH,
    EXPERT_COUNT,
    EXPERT_KEYS,
    EXPERT_WIDTH,
    EXPERTS_USED,
    GATING,
    PATTERN,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX,
    WINDOW,
    Architecture,
    ArchitectureKeys,
    Factors,
    check_sigmoid_gating,
    local_and_global,
    local_layers,
    moe_config,
)
from windlass.engine.model.gguf.gguf_rope import read_proportional_rope
from windlass.engine.model.gguf.hybrid_architectures import HYBRID_ARCHITECTURES
from windlass.engine.model.gguf.tensor_mapping import LAYER_TABLE
from windlass.engine.model.loading.gguf_index import GGUFLayout
from windlass.engine.model.loading.safetensors_header import TensorLocation
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

# -- Latent attention and grouped experts (DeepSeek, GLM-4.5) ---------------------------------------------------------

_PER_FACTOR = 0.1  # coefficient of YaRN's attention factor, included in the file's multiplier

GROUPED_EXPERTS_KEYS = (
    *(*EXPERT_KEYS, DENSE_BLOCKS, GATING, "expert_shared_count", "expert_weights_scale"),
    *("expert_weights_norm", "expert_group_count", "expert_group_used_count"),
)

MLA_KEYS = (
    *("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla"),
    "rope.scaling.yarn_log_multiplier",
    *GROUPED_EXPERTS_KEYS,
)


def mla_family(keys: ArchitectureKeys) -> Family:
    """Youtu if there are no experts, else DeepSeek V2 or V3 by the gating: files use one architecture for all of them."""
    if not keys.count(EXPERT_COUNT):
        return YOUTU
    gating = keys.count(GATING) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise LoadError(f"{keys.key(GATING)} is {format_value(gating)}: supported are 1 (softmax) and 2 (sigmoid)")
    return DEEPSEEK_V3 if gating == SIGMOID else DEEPSEEK_V2


def mla_sizes(keys: ArchitectureKeys) -> dict[str, int | None]:
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
    if not keys.count(EXPERT_COUNT):
        return {}
    found = grouped_experts(keys)
    if keys.count(GATING) != SIGMOID:
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found


def grouped_experts(keys: ArchitectureKeys) -> dict[str, Any]:
    """The keys of experts in groups, of which the best are used, after dense layers."""
    return {
        **moe_config(keys, experts="n_routed_experts"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.raw("expert_weights_norm")),
        "first_k_dense_replace": keys.count(DENSE_BLOCKS),
        "n_group": keys.count("expert_group_count") or 1,
        "topk_group": keys.count("expert_group_used_count") or 1,
    }


def mla_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """With YaRN, scores are scaled by the file's multiplier, and cosines are not."""
    multiplier = keys.number("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "yarn" or multiplier is None:
        return dict(rope)
    share = float(f"{multiplier / _PER_FACTOR:.7g}")
    return {**rope, "mscale": share, "mscale_all_dim": share}


# -- Gemma 2 to 4 -----------------------------------------------------------------------------------------------------


def gemma2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file lacks the scale of q·k: it is the inverse root of the head dimension, except in the 27B model (46 layers)."""
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    return {
        "query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"] if count == 46 else head_dim,
        "layer_types": local_layers(keys, count, 2),
        "sliding_window": keys.count(WINDOW) or 4096,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def gemma3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Local and global layers, and the number whose inverse root scales q·k, which differs in the 27B model (62 layers).

    Older files lack the pattern (every sixth layer is global); no file has the number.
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


_SHARED, _KV_HEADS = "attention.shared_kv_layers", "attention.head_count_kv"
_KEY, _VALUE, _ROTATED = "attention.key_length", "attention.value_length", "rope.dimension_count"
_LOCAL = "_swa"
_LOCAL_THETA = "rope.freq_base_swa"
_INPUT, _CAP = "embedding_length_per_layer_input", "final_logit_softcapping"

GEMMA4_KEYS = (
    *(*EXPERT_KEYS, WINDOW, PATTERN, _SHARED, _LOCAL_THETA, _INPUT, _CAP),
    *(key + _LOCAL for key in (_KEY, _VALUE, _ROTATED)),
)


def gemma4_local(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of layers with a window that compute their own keys. count: number of layers."""
    return keys.replaced(
        {
            _KEY: keys.size(_KEY + _LOCAL),
            _VALUE: keys.size(_VALUE + _LOCAL),
            _KV_HEADS: _kv_heads(keys, _gemma4_layer_types(keys, count))[SLIDING_ATTENTION],
            DENSE_WIDTH: keys.sizes(DENSE_WIDTH, count)[0],
        }
    )


def gemma4(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Further parts of the layers, and what differs in full-attention layers."""
    count = config["num_hidden_layers"]
    kinds, width, shared = _gemma4_layer_types(keys, count), keys.size(_KEY), keys.count(_SHARED)
    if keys.size(_VALUE, width) != width:
        raise LoadError("has keys and values of different widths, which is not supported: choose another model")
    if shared >= count:
        raise LoadError(f"{keys.key(_SHARED)} is {shared} of {count} layers: no layer would compute keys")
    experts = keys.count(EXPERT_COUNT)
    found = {
        "layer_types": kinds,
        "sliding_window": keys.size(WINDOW),
        "global_head_dim": width,
        "num_global_key_value_heads": _kv_heads(keys, kinds)[FULL_ATTENTION],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_doubled(keys, keys.sizes(DENSE_WIDTH, count), shared),
        "hidden_size_per_layer_input": keys.count(_INPUT),
        "final_logit_softcapping": keys.number(_CAP),
        "enable_moe_block": experts > 0,
    }
    return found | moe_config(keys, used="top_k_experts") if experts else found


def gemma4_from_tensors(tensors: Mapping[str, TensorLocation]) -> dict[str, Any]:
    """Whether keys are also values in full-attention layers, and the number of per-layer embeddings."""
    layer, found = 0, {"attention_k_eq_v": False}
    while f"blk.{layer}.attn_k.weight" in tensors and not found["attention_k_eq_v"]:
        found["attention_k_eq_v"] = f"blk.{layer}.attn_v.weight" not in tensors
        layer += 1
    table = tensors.get(LAYER_TABLE)
    return found if table is None else {**found, "vocab_size_per_layer_input": table.shape[0]}


def gemma4_rope_parameters(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    for key, head_dim in ((_ROTATED, config["global_head_dim"]), (_ROTATED + _LOCAL, config["head_dim"])):
        if (rotated := keys.size(key, head_dim)) != head_dim:
            raise LoadError(f"{keys.key(key)} is {rotated}, not the {head_dim} of a head: get another conversion")
    return {
        "rope_parameters": {
            FULL_ATTENTION: read_proportional_rope(keys, factors, config["global_head_dim"]),
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": keys.required_number(_LOCAL_THETA)},
        }
    }


def _gemma4_layer_types(keys: ArchitectureKeys, count: int) -> list[str]:
    """Attention type of each layer, listed in the file; the last layer has full attention."""
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
    """KV heads of each kind of layer; of the other kind if there is no layer of a kind."""
    found: dict[str, int] = {}
    for kind, heads in zip(kinds, keys.sizes(_KV_HEADS, len(kinds)), strict=True):
        if found.setdefault(kind, heads) != heads:
            raise LoadError(f"{keys.key(_KV_HEADS)} differs among layers of one kind: choose another model")
    return {kind: found.get(kind, found[FULL_ATTENTION]) for kind in (SLIDING_ATTENTION, FULL_ATTENTION)}


def _is_doubled(keys: ArchitectureKeys, widths: Sequence[int], shared: int) -> bool:
    """Whether layers that read the keys of earlier ones are twice as wide."""
    own, narrow = len(widths) - shared, widths[0]
    if all(width == narrow for width in widths):
        return False
    if list(widths) != [narrow] * own + [2 * narrow] * shared:
        raise LoadError(
            f"{keys.key(DENSE_WIDTH)} must be the same for all layers, or twice as much for the last {shared}, which read the "
            "keys of earlier ones: choose another model"
        )
    return True


def _glm4_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts are chosen by sigmoids, even if the file lacks the gating."""
    check_sigmoid_gating(keys, 0)
    return grouped_experts(keys)


def _has_qk_norm(tensors: Mapping[str, TensorLocation]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


# -- Other architectures ----------------------------------------------------------------------------------------------

_TEMPERATURE = "attention.temperature_scale"


def _llama_with_window_or_experts(keys: ArchitectureKeys) -> Family | None:
    """llama.cpp calls Mistral (with a window) and Mixtral (with experts) a Llama."""
    if keys.count(EXPERT_COUNT) > 1:
        return MIXTRAL
    return MISTRAL if keys.count(WINDOW) else None


def _mistral_without_temperature(keys: ArchitectureKeys) -> Family | None:
    """Mistral Small 3.1 and Ministral 3 have one name in llama.cpp; only the latter scales queries by position."""
    return None if keys.number(_TEMPERATURE) else MISTRAL


def _optional_experts(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.count(EXPERT_COUNT) or None,
        "num_experts_per_tok": keys.count(EXPERTS_USED) or None,
        "moe_intermediate_size": keys.count(EXPERT_WIDTH) or None,
    }


def _qwen2_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_optional_experts(keys, config), "shared_expert_intermediate_size": keys.count(SHARED_WIDTH)}


def _qwen3_moe(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp divides the experts' weights by their sum."""
    return {**_optional_experts(keys, config), "norm_topk_prob": True}


def _llama(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_window(keys, config), **(_optional_experts(keys, config) if keys.count(EXPERT_COUNT) > 1 else {})}


def _window(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """A window that all layers share. Without one, null is written: the family has a window by default."""
    return {"sliding_window": keys.count(WINDOW) or None}


def _phi3(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Older files lack the window: it is 2047 in Phi 3 mini and medium with a context of 4096."""
    window: int | None = keys.count(WINDOW) or None
    if (
        keys.raw(WINDOW) is None
        and config["max_position_embeddings"] == 4096
        and config["num_hidden_layers"] in (32, 40)
    ):
        window = 2047
    original = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _gpt_oss(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **local_and_global(2)(keys, config),
        "intermediate_size": keys.count(EXPERT_WIDTH) or config["intermediate_size"],
        "num_local_experts": keys.size(EXPERT_COUNT),
        "num_experts_per_tok": keys.size(EXPERTS_USED),
    }


def _gpt_oss_rope(rope: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, Any]:
    """The ends of YaRN's ramp are not rounded in this family; the file does not contain that."""
    return {**rope, "truncate": False} if rope["rope_type"] == "yarn" else dict(rope)


def _logit_scale(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale")}


def _cohere2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return local_and_global(4)(keys, config) | _logit_scale(keys, config)


def _falcon(tensors: Mapping[str, TensorLocation]) -> dict[str, Any]:
    """The newer form of the family, of which the older one with one key head is a special case."""
    two = "blk.0.attn_norm_2.weight" in tensors
    return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if two else 1}


def _parallel(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    parallel = keys.raw("use_parallel_residual")
    return {"use_parallel_residual": True if parallel is None else parallel}


def _olmo2(keys: ArchitectureKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return local_and_global(4)(keys, config) if keys.count(WINDOW) else {}


_NORMS_WITH_OFFSET = GGUFLayout(norms_with_offset=True)
_INTERLEAVED = GGUFLayout(interleaved=True)
_FUSED_IN_PARTS = GGUFLayout(fused_in_parts=True)
_POST_ATTENTION_NORM = {"post_attention_norm": "ffn_norm"}  # the norm before the feed-forward

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        LLAMA,
        _INTERLEAVED,
        select_family=_llama_with_window_or_experts,
        other_families=(MISTRAL, MIXTRAL),
        config_keys=_llama,
        understood_keys=(WINDOW, EXPERT_COUNT, EXPERTS_USED),
    ),
    "mistral3": Architecture(
        MINISTRAL3,
        _INTERLEAVED,
        select_family=_mistral_without_temperature,
        other_families=(MISTRAL,),
        config_keys=_window,
        understood_keys=(WINDOW, _TEMPERATURE, "rope.scaling.yarn_log_multiplier"),
    ),
    "qwen2": Architecture(QWEN2),
    "qwen3": Architecture(QWEN3),
    "qwen2moe": Architecture(QWEN2_MOE, config_keys=_qwen2_moe, understood_keys=(*EXPERT_KEYS, SHARED_WIDTH)),
    "qwen3moe": Architecture(QWEN3_MOE, config_keys=_qwen3_moe, understood_keys=EXPERT_KEYS),
    "olmoe": Architecture(OLMOE, config_keys=_optional_experts, understood_keys=(EXPERT_COUNT, EXPERTS_USED)),
    "gemma": Architecture(GEMMA, _NORMS_WITH_OFFSET),
    "gemma2": Architecture(
        GEMMA2,
        _NORMS_WITH_OFFSET,
        config_keys=gemma2,
        understood_keys=(WINDOW, PATTERN, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Architecture(
        GEMMA3,
        _NORMS_WITH_OFFSET,
        config_keys=gemma3,
        understood_keys=(WINDOW, PATTERN, "attention.scale", "final_logit_softcapping", "rope.freq_base_swa"),
    ),
    "gemma4": Architecture(
        GEMMA4,
        config_keys=gemma4,
        understood_keys=GEMMA4_KEYS,
        from_tensors=gemma4_from_tensors,
        rope_parameters=gemma4_rope_parameters,
        uniform_keys=gemma4_local,
    ),
    "smollm3": Architecture(
        SMOLLM3,
        _INTERLEAVED,
        # The file does not contain which layers do not rotate; llama.cpp takes every fourth.
        config_keys=lambda keys, config: {"no_rope_layer_interval": 4},
    ),
    "ernie4_5": Architecture(ERNIE4_5, _INTERLEAVED),
    "chatglm": Architecture(GLM, _INTERLEAVED),
    "glm4": Architecture(GLM4, _INTERLEAVED),
    "glm4moe": Architecture(
        GLM4_MOE,
        config_keys=_glm4_moe,
        understood_keys=GROUPED_EXPERTS_KEYS,
        from_tensors=_has_qk_norm,
        aliases=_POST_ATTENTION_NORM,
    ),
    "phi3": Architecture(PHI3, config_keys=_phi3, understood_keys=(WINDOW,)),
    "hunyuan-dense": Architecture(HUNYUAN),
    "starcoder2": Architecture(STARCODER2),
    "phi2": Architecture(PHI),
    "gptneox": Architecture(
        GPT_NEOX, _FUSED_IN_PARTS, config_keys=_parallel, understood_keys=("use_parallel_residual",)
    ),
    "stablelm": Architecture(
        STABLELM,
        from_tensors=lambda tensors: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors},
        understood_keys=("use_parallel_residual",),  # wrong in many files: the tensors decide
    ),
    "nemotron": Architecture(NEMOTRON, _NORMS_WITH_OFFSET),
    "falcon": Architecture(
        FALCON,
        _FUSED_IN_PARTS,
        from_tensors=_falcon,
        aliases={"attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"},
    ),
    "olmo": Architecture(
        OLMO,
        _INTERLEAVED,
        config_keys=lambda keys, config: {"clip_qkv": keys.number("attention.clamp_kqv")},
        understood_keys=("attention.clamp_kqv",),
    ),
    "olmo2": Architecture(
        OLMO2,
        select_family=lambda keys: OLMO3 if keys.count(WINDOW) else None,
        other_families=(OLMO3,),
        config_keys=_olmo2,
        understood_keys=(WINDOW, PATTERN),
    ),
    "command-r": Architecture(
        COHERE,
        _INTERLEAVED,
        config_keys=_logit_scale,
        understood_keys=("logit_scale",),
        from_tensors=_has_qk_norm,
    ),
    "cohere2": Architecture(
        COHERE2, _INTERLEAVED, config_keys=_cohere2, understood_keys=(WINDOW, PATTERN, "logit_scale")
    ),
    "gpt-oss": Architecture(
        GPT_OSS,
        config_keys=_gpt_oss,
        understood_keys=(*EXPERT_KEYS, WINDOW, PATTERN),
        aliases=_POST_ATTENTION_NORM,
        rope=_gpt_oss_rope,
    ),
    "deepseek2": Architecture(
        DEEPSEEK_V2,
        _INTERLEAVED,
        select_family=mla_family,
        other_families=(DEEPSEEK_V3, YOUTU),
        config_keys=mla_experts,
        understood_keys=MLA_KEYS,
        rope=mla_rope,
    ),
    "exaone4": Architecture(EXAONE4, config_keys=local_and_global(4), understood_keys=(WINDOW, PATTERN)),
    "internlm2": Architecture(LLAMA, _INTERLEAVED),  # the converter splits its fused tensors
    "seed_oss": Architecture(SEED_OSS, aliases=_POST_ATTENTION_NORM),
    "arcee": Architecture(ARCEE, _INTERLEAVED),
} | HYBRID_ARCHITECTURES


def find_architecture(metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The name and the entry of a file's architecture. Raises LoadError for a file that is not a supported model."""
    kind, name = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind == "adapter":
        raise LoadError("holds an adapter (LoRA), not a model: give the GGUF file of a model with the adapter merged")
    if name == "clip" or kind == "mmproj":
        raise LoadError("holds the vision or audio part of a model (mmproj): give the GGUF file of the language model")
    if name == "imatrix" or kind == "imatrix":
        raise LoadError("holds an importance matrix, not a model: give the GGUF file of the model")
    if not isinstance(name, str):
        raise LoadError("names no general.architecture: get another conversion of the model")
    found = ARCHITECTURES.get(name)
    if found is None:
        what = "a mixture of experts, which is not supported" if "moe" in name else "not supported as a GGUF file"
        raise LoadError(
            f"is of architecture {format_value(name)}, {what}: supported are {', '.join(ARCHITECTURES)}; or give the directory "
            "of the original Hugging Face model"
        )
    return name, found
