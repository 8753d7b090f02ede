"""Rotary groups read from config.json, compared with transformers' config and rotary module."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.helium.modeling_helium import HeliumRotaryEmbedding
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model.families.spec_reader import read_layout, read_rotary_groups, read_spec
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup, apply_scaling, resolve

MODULES = {
    "llama": LlamaRotaryEmbedding,
    "mistral": MistralRotaryEmbedding,
    "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding,
    "smollm3": SmolLM3RotaryEmbedding,
    "helium": HeliumRotaryEmbedding,
    "ernie4_5": Ernie4_5RotaryEmbedding,
    "glm": GlmRotaryEmbedding,
    "glm4": Glm4RotaryEmbedding,
    "hunyuan_v1_dense": HunYuanDenseV1RotaryEmbedding,
    "ministral3": Ministral3RotaryEmbedding,
    "phi3": Phi3RotaryEmbedding,
}
PLAIN = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 12, "max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def frequencies(group: RotaryGroup, length: int = 1) -> np.ndarray:
    return np.array(resolve(group.scaling, group.base, length).inv_freq)


def flat(config: dict[str, Any]) -> RotaryGroup:
    (group,) = read_rotary_groups(config)
    assert group.name == "full_attention"
    return group


def theirs(config: dict[str, Any]) -> tuple[np.ndarray, float]:
    read = AutoConfig.for_model(**config)
    module = MODULES[config["model_type"]](read)
    return module.inv_freq.double().numpy(), module.attention_scaling


FLAT_ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
    {"rope_theta": 1e6, "rope_scaling": None},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    {"rope_parameters": {"rope_type": "yarn", **YARN}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "head_dim": 32},
    {
        "rope_theta": 5e5,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    },
]


@pytest.mark.quick_cases(27)
@pytest.mark.parametrize(
    ("family", "rope"),
    # Phi 3 reads yarn as longrope, and transformers accepts no other kind for it: see below.
    [(family, rope) for family in MODULES for rope in FLAT_ROPES if family != "phi3" or "factor" not in str(rope)],
)
def test_flat_families_equal_transformers(family: str, rope: dict[str, Any]) -> None:
    config = {"model_type": family, **SMALL, **deepcopy(rope)}
    if family == "hunyuan_v1_dense":
        config.setdefault("head_dim", 16)  # required by transformers
    group = flat(deepcopy(config))
    expected, attention = theirs(config)
    np.testing.assert_allclose(frequencies(group), expected, rtol=3e-6)
    assert resolve(group.scaling, group.base, 1).rotary_scale == pytest.approx(attention)


def test_new_and_old_keys_give_the_same_group() -> None:
    old = {"model_type": "llama", **SMALL, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    }
    assert read_rotary_groups(old) == read_rotary_groups(new)
    both = {**new, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    assert read_rotary_groups(both) == read_rotary_groups(new)
    assert flat(old).scaling.get("rope_theta") is None
    assert flat(old).base.rope_theta == 5e5


def test_scaling_added_to_a_new_config_has_its_theta() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    group = flat(
        {"model_type": "qwen3", **SMALL, "rope_parameters": parameters, "rope_scaling": {"type": "yarn", **YARN}}
    )
    assert (group.base.rope_theta, group.scaling.rope_type) == (1e6, "yarn")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 3},
        {"model_type": "qwen3", "hidden_size": 96, "num_attention_heads": 3},
        {"model_type": "mistral", "hidden_size": 96, "num_attention_heads": 3, "head_dim": 64},
        {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 3, "head_dim": None},
    ],
)
def test_absent_fields_have_the_defaults_of_the_class(config: dict[str, Any]) -> None:
    base = replace(flat(config).base, fixed_distances_reason=None)  # from windows, not from a default of the rotation
    read = AutoConfig.for_model(**config)
    head_dim = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    assert base == RotaryBase(read.rope_parameters["rope_theta"], head_dim, head_dim, read.max_position_embeddings)


def test_partial_rotary_factor_in_both_places() -> None:
    old = {"model_type": "llama", **SMALL, "partial_rotary_factor": 0.5}
    new = {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    assert read_rotary_groups(old) == read_rotary_groups(new)
    assert (flat(old).base.head_dim, flat(old).base.rotary_dim) == (16, 8)


# --- Gemma 3 and other nested configs -------------------------------------------------------------------------------

GEMMA = {"model_type": "gemma3_text", **SMALL, "head_dim": 16}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
@pytest.mark.parametrize("layer_types", [None, ["full_attention", "sliding_attention"] * 6])
def test_gemma3_groups_equal_transformers(rope: dict[str, Any], layer_types: list[str] | None) -> None:
    config = {**GEMMA, **rope} if layer_types is None else {**GEMMA, **rope, "layer_types": layer_types}
    groups = read_rotary_groups(config)
    assert [group.name for group in groups] == ["full_attention", "sliding_attention"]
    module = Gemma3RotaryEmbedding(AutoConfig.for_model(**config))
    for group in groups:
        expected = getattr(module, f"{group.name}_inv_freq").double().numpy()
        np.testing.assert_allclose(frequencies(group), expected, rtol=3e-6)


def test_gemma3_scaling_with_the_older_key() -> None:
    # transformers ignores `type` here, but published checkpoints mean this scaling.
    old = read_rotary_groups({**GEMMA, "rope_scaling": {"type": "linear", "factor": 8.0}})
    assert old == read_rotary_groups({**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [group.scaling.rope_type for group in old] == ["linear", "default"]


def test_gemma3_defaults() -> None:
    full, sliding = read_rotary_groups({"model_type": "gemma3_text"})
    assert (full.base.rope_theta, sliding.base.rope_theta) == (1e6, 1e4)
    assert full.base.head_dim == sliding.base.head_dim == 256
    assert full.base.trained_len == 131_072


def test_groups_without_layers_are_omitted() -> None:
    (only,) = read_rotary_groups({**GEMMA, "num_hidden_layers": 4})
    assert only.name == "sliding_attention"  # every sixth layer is global, and there is no sixth
    (only,) = read_rotary_groups({**GEMMA, "layer_types": ["full_attention"] * 12})
    assert (only.name, only.base.rope_theta) == ("full_attention", 1e6)


def test_layers_with_equal_rotation_are_one_group() -> None:
    alike = {"rope_type": "default", "rope_theta": 1e4}
    nested = {**GEMMA, "rope_parameters": {"full_attention": alike, "sliding_attention": dict(alike)}}
    assert len(read_rotary_groups(nested)) == 1
    windows = {"model_type": "qwen2", **SMALL, "layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 6}
    assert flat(windows) == flat({"model_type": "qwen2", **SMALL})


def test_nested_parameters_of_other_families() -> None:
    nested = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    mixed = {"layer_types": ["full_attention", "sliding_attention"] * 6, "use_sliding_window": True}
    full, sliding = read_rotary_groups({"model_type": "qwen3", **SMALL, **mixed, "rope_parameters": nested})
    assert (full.scaling.rope_type, full.base.rope_theta) == ("yarn", 1e6)
    assert (sliding.scaling.rope_type, sliding.base.rope_theta) == ("default", 1e4)
    (only,) = read_rotary_groups({"model_type": "llama", **SMALL, "rope_parameters": nested})
    assert only.scaling == full.scaling


# --- layers: windows and NoPE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": [1, 0, 0, 1] * 3},
        {"use_sliding_window": True, "sliding_window": 8},
    ],
)
def test_smollm3_layers_equal_transformers(change: dict[str, Any]) -> None:
    config = {"model_type": "smollm3", **SMALL, **change}
    layout = read_layout(config)
    theirs = AutoConfig.for_model(**config)
    assert [group is not None for group in layout.layer_groups] == [flag == 1 for flag in theirs.no_rope_layers]
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.window for layer in layout.layers] == windows
    assert len(layout.groups) == 1


def test_layers_without_rotation_with_every_key() -> None:
    llama = {"model_type": "llama", **SMALL}
    assert set(read_layout(llama).layer_groups) == {0}
    nope = [None, 0, 0, None] * 3
    flags = [int(group is not None) for group in nope]
    assert list(read_layout({**llama, "no_rope_layers": flags}).layer_groups) == nope
    thetas = [5e5 * flag for flag in flags]
    layout = read_layout({**llama, "layer_rope_theta": thetas})
    assert list(layout.layer_groups) == nope
    assert layout.groups[0].base.rope_theta == 5e5
    every = read_layout({**llama, "no_rope_layer_interval": 4}).layer_groups
    assert list(every) == [0, 0, 0, None] * 3
    nowhere = read_layout({**llama, "no_rope_layers": [0] * 12})
    assert (set(nowhere.layer_groups), len(nowhere.groups)) == ({None}, 1)


def test_thetas_by_layer_type() -> None:
    types = ["full_attention", "sliding_attention"] * 6
    config = {"model_type": "qwen3", **SMALL, "layer_types": types, "use_sliding_window": True}
    layout = read_layout({**config, "layer_rope_theta": [1e6, 1e4] * 5 + [1e6, 0]})
    assert [group.base.rope_theta for group in layout.groups] == [1e6, 1e4]
    assert layout.layer_groups == (0, 1) * 5 + (0, None)


# --- older and rarer names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("older", "current"),
    [
        ({"rotary_pct": 0.25}, {"partial_rotary_factor": 0.25}),
        ({"rotary_emb_base": 25_000}, {"rope_theta": 25_000.0}),
        ({"rotary_dim": 8}, {"partial_rotary_factor": 0.5}),
        ({"rope_ratio": 50}, {"rope_theta": 500_000.0}),
        ({"attn_config": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"global_rope_theta": 160_000.0}, {"rope_theta": 160_000.0}),
    ],
)
def test_older_keys_equal_the_current_ones(older: dict[str, Any], current: dict[str, Any]) -> None:
    config = {"model_type": "llama", **SMALL}
    assert read_rotary_groups({**config, **older}) == read_rotary_groups({**config, **current})
    assert read_rotary_groups({**config, **older}) != read_rotary_groups(config)
    assert read_rotary_groups({**config, **older, **current}) == read_rotary_groups({**config, **current})


def test_rotary_dim_is_exact_for_any_head() -> None:
    for head_dim in (20, 48, 96, 112, 140, 196):
        for dim in range(2, head_dim + 1, 2):
            group = flat({"model_type": "llama", **SMALL, "head_dim": head_dim, "rotary_dim": dim})
            assert group.base.rotary_dim == dim


def test_local_and_global_theta() -> None:
    types = {"layer_types": ["full_attention", "sliding_attention"] * 6, "use_sliding_window": True}
    config = {"model_type": "qwen3", **SMALL, **types, "global_rope_theta": 160_000.0, "local_rope_theta": 1e4}
    full, sliding = read_rotary_groups(config)
    assert (full.base.rope_theta, sliding.base.rope_theta) == (160_000.0, 1e4)


LONG = {"short_factor": [1.0 + 0.1 * j for j in range(6)], "long_factor": [2.0 + j for j in range(6)]}
PHI3 = {"model_type": "phi3", **SMALL, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_phi3_names_of_longrope(kind: str, key: str) -> None:
    group = flat({**PHI3, "original_max_position_embeddings": 64, "rope_scaling": {key: kind, **LONG}})
    config = AutoConfig.for_model(
        **PHI3,
        original_max_position_embeddings=64,
        rope_scaling={"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0, **LONG},
    )
    for length in (64, 65):
        expected, attention = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        np.testing.assert_allclose(frequencies(group, length), expected.double().numpy(), rtol=3e-6)
        assert resolve(group.scaling, group.base, length).rotary_scale == pytest.approx(attention)


def test_top_level_original_length_has_priority() -> None:
    inner = {"type": "longrope", "original_max_position_embeddings": 32, **LONG}
    assert flat({**PHI3, "rope_scaling": inner}).scaling.get("original_max_position_embeddings") == 4096
    outer = flat({**PHI3, "rope_scaling": inner, "original_max_position_embeddings": 64})
    assert outer.scaling.get("original_max_position_embeddings") == 64


def test_published_scaling_of_hunyuan() -> None:
    published = {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    }
    config = {"model_type": "hunyuan_v1_dense", **SMALL, "head_dim": 16, "rope_theta": 1e4, "rope_scaling": published}
    group = flat(dict(config))
    np.testing.assert_allclose(frequencies(group, 10_000), theirs(config)[0], rtol=3e-6)


def test_ministral3_default_rotation() -> None:
    layout = read_layout({"model_type": "ministral3"})
    module = Ministral3RotaryEmbedding(AutoConfig.for_model("ministral3"))
    np.testing.assert_allclose(frequencies(layout.groups[0]), module.inv_freq.double().numpy(), rtol=3e-6)
    assert resolve(layout.groups[0].scaling, layout.groups[0].base, 1).rotary_scale == module.attention_scaling == 1.0
    assert layout.temperature == (0.1, 16_384)


def test_dual_chunk_keys_of_qwen() -> None:
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}
    sparse = {"sparse_attention_enabled": True, "sparse_attention_config": {"0": []}}
    config = {"model_type": "qwen2", "max_position_embeddings": 1_010_000, "rope_theta": 1e7}
    group = flat({**config, "dual_chunk_attention_config": {**chunks, **sparse}})
    assert group.scaling == RopeScaling.from_dict({"rope_type": "dual_chunk", **chunks, "length_scores": True})
    assert group.base.trained_len == 1_010_000
    short, long = (resolve(group.scaling, group.base, length).distances for length in (262_144, 524_288))
    assert (short.chunk, short.most, short.score_factor) == (253_952, 262_144, 1.0)
    assert long.score_factor == pytest.approx(0.1 * np.log(2) + 1)  # Qwen2.5-1M: 0.1 ln(n / L) + 1
    with pytest.raises(LoadError, match="dual_chunk_attention_config makes it"):
        flat({**config, "rope_scaling": {"type": "yarn", "factor": 4.0}, "dual_chunk_attention_config": chunks})
    with pytest.raises(LoadError, match="local_size"):
        flat({**config, "dual_chunk_attention_config": {**chunks, "local_size": 262_144}})
    with pytest.raises(LoadError, match="dual_chunk_attention_config"):
        flat({**config, "dual_chunk_attention_config": 3})


def test_mrope_in_config_json() -> None:
    for rope in ({"type": "mrope", "mrope_section": [2, 3, 3]}, {"type": "default", "mrope_section": [2, 3, 3]}):
        group = flat({"model_type": "qwen2", **SMALL, "rope_scaling": rope})
        np.testing.assert_allclose(frequencies(group), theirs({"model_type": "qwen2", **SMALL})[0], rtol=3e-6)


def test_proportional_scaling_in_config_json() -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 2.0}
    config = {"model_type": "llama", **SMALL, "rope_parameters": rope}
    group = flat({"model_type": "llama", **SMALL, "rope_parameters": dict(rope)})
    assert (group.base.rotary_dim, group.base.rotating_pairs) == (16, 2)
    np.testing.assert_allclose(frequencies(group), theirs(config)[0], rtol=3e-6)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mpt"}, "'mpt' is not supported: use one of llama"),
        ({"model_type": None}, "not supported"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type 'spiral' is not known: use one of default"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type 'spiral' is not known"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "twist": 1}}, "rope_scaling.twist is not a field"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "greater than 0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "must hold 8 numbers"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_theta": "big"}, "rope_theta must be a number"),
        ({"rope_theta": 0}, "rope_theta must be greater than 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.2}, "an even number is needed"),
        ({"head_dim": 15}, "an even number is needed"),
        ({"head_dim": "16"}, "head_dim must be a positive integer"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        (
            {
                "model_type": "qwen2",
                "layer_types": ["sliding_attention"] * 12,
                "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
            },
            "no entry for the sliding_attention layers",
        ),
        ({"layer_types": ["sliding_attention"] * 12}, "layer_types mixes windows in a way that model_type 'llama'"),
        ({"layer_types": ["full_attention"] * 11}, "must name 12 layers"),
        ({"no_rope_layers": [1] * 11}, "one entry for each of the 12 layers"),
        ({"no_rope_layers": ["1"] * 12}, "1 for layers that rotate"),
        ({"no_rope_layer_interval": -1}, "no_rope_layer_interval must be a positive integer"),
        ({"layer_rope_theta": [1e4, 1e5] * 6}, "must share a theta"),
        ({"layer_rope_theta": [0.5] * 12}, "rope_theta must be greater than 1"),
        ({"rope_theta": 1e4, "rotary_emb_base": 1e5}, "keep one"),
        ({"rotary_dim": 7}, "an even number is needed"),
        ({"rotary_dim": 18}, "partial_rotary_factor must be in (0, 1]"),
        ({"rotary_pct": "half"}, "rotary_pct must be a positive number"),
        ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.1}}, "leaves no pair"),
        ({"rope_parameters": {"rope_type": "learned", "factor": 2.0}}, "not a field of rope_type 'learned'"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "not supported for this model_type",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, "must add up to the 8 rotated pairs"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "global": {}}},
            "'global' in addition to layer types",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "differently: keep one",
        ),
    ],
)
def test_invalid_rotary_config_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError) as caught:
        read_rotary_groups({"model_type": "llama", **SMALL, **change})
    assert says in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


# --- a request's scaling ----------------------------------------------------------------------------------------------


def test_flat_scaling_replaces_that_of_the_full_attention_group() -> None:
    groups = read_rotary_groups({**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    full, sliding = apply_scaling(groups, RopeScaling.from_dict({"rope_type": "yarn", "factor": 2.0}))
    assert full.scaling.to_dict() == {"rope_type": "yarn", "factor": 2.0}
    assert (full.base, sliding) == (groups[0].base, groups[1])
    assert apply_scaling(groups, None) == groups
    (only,) = read_rotary_groups({**GEMMA, "num_hidden_layers": 4})
    assert apply_scaling((only,), RopeScaling.from_dict({"type": "ntk", "factor": 2}))[0].scaling.rope_type == "ntk"


def test_scaling_replaces_theta_only_if_given() -> None:
    groups = read_rotary_groups({"model_type": "llama", **SMALL, "rope_theta": 5e5})
    kept = apply_scaling(groups, RopeScaling.from_dict({"rope_type": "default"}))[0]
    changed = apply_scaling(groups, RopeScaling.from_dict({"rope_type": "default", "rope_theta": 1e6}))[0]
    np.testing.assert_allclose(frequencies(kept), 5e5 ** (-np.arange(0, 16, 2) / 16))
    np.testing.assert_allclose(frequencies(changed), 1e6 ** (-np.arange(0, 16, 2) / 16))


def test_nested_scaling_names_groups() -> None:
    groups = read_rotary_groups(GEMMA)
    scaling = RopeScaling.from_dict({"sliding_attention": {"rope_type": "linear", "factor": 2.0}})
    full, sliding = apply_scaling(groups, scaling)
    assert full == groups[0]
    assert sliding.scaling.rope_type == "linear"
    flat_model = read_rotary_groups({"model_type": "llama", **SMALL})
    with pytest.raises(RequestError) as caught:
        apply_scaling(flat_model, scaling)
    assert caught.value.param == "rope_scaling.sliding_attention"
    assert "it has full_attention" in caught.value.message


def test_lengths_of_lists_are_checked() -> None:
    groups = read_rotary_groups(GEMMA)
    inner = {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [2.0] * 7}
    for obj, param in ((inner, "x.short_factor"), ({"sliding_attention": inner}, "x.sliding_attention.short_factor")):
        with pytest.raises(RequestError, match="must hold 8 numbers") as caught:
            apply_scaling(groups, RopeScaling.from_dict(obj), param="x")
        assert caught.value.param == param


@pytest.mark.parametrize(
    "named",
    [
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "use_qk_norm": True, "num_experts": 16},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_qk_norm": True},
        {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "use_qk_norm": True},
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "use_qk_norm": True},
        {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "num_local_experts": 4},
        {"architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5"},
    ],
    ids=lambda named: named["architectures"][0],
)
def test_keys_of_published_files_are_accepted(named: dict[str, Any]) -> None:
    """Keys that state a family's fixed query and key norms are accepted, and all architecture names of its files are known."""
    spec = read_spec({**PLAIN, **named})
    assert spec.generates
    if "use_qk_norm" in named:
        assert all(layer.mixer.qk_norm is not None for layer in spec.layers)


def test_norm_switch_of_another_family_is_refused() -> None:
    with pytest.raises(LoadError, match="use_qk_norm=true"):
        read_spec({**PLAIN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "use_qk_norm": True})


@pytest.mark.parametrize(
    ("given", "ends", "said"),
    [(5, (5,), 0), ([5, 7], (5, 7), 0), (-1, (), 1), ([5, 128, 5000], (5,), 1), (None, (), 0)],
)
def test_impossible_end_tokens_are_omitted(given: Any, ends: tuple[int, ...], said: int) -> None:
    llama = {**PLAIN, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    spec = read_spec(llama, {"eos_token_id": given})
    assert spec.eos_token_ids == ends
    assert sum("eos_token_id" in notice for notice in spec.notices) == said


# -- corner cases ------------------------------------------------------------------------------------------------------

GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("nested", [False, True])
def test_yarn_uses_truncate(nested: bool) -> None:
    """gpt-oss does not round the ends of the ramp. transformers ignores the field if groups are named."""
    types = ["full_attention", "sliding_attention"]
    config: dict[str, Any] = {"model_type": "qwen3", "head_dim": 64, "num_hidden_layers": 2, "layer_types": types}
    config |= {"use_sliding_window": True, "max_position_embeddings": 131_072}
    config["rope_parameters"] = dict.fromkeys(types, GPT_OSS) if nested else GPT_OSS
    (group,) = read_rotary_groups(json.loads(json.dumps(config)))
    spec = resolve(group.scaling, group.base, 1)
    j = np.arange(32)
    w = 150_000.0 ** (-2 * j / 64)
    low, high = (64 * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(150_000)) for turns in (32, 1))
    ramp = np.clip((j - low) / (high - low), 0, 1)
    np.testing.assert_allclose(spec.inv_freq, w * (1 - ramp) + w / 32 * ramp, rtol=1e-12)
    assert spec.rotary_scale == pytest.approx(1.3466, abs=1e-4)
    rounded = resolve(RopeScaling.from_dict({**GPT_OSS, "truncate": True}), group.base, 1)
    assert max(abs(a / b - 1) for a, b in zip(spec.inv_freq, rounded.inv_freq, strict=True)) > 0.05


def test_too_wide_head_is_refused() -> None:
    config: dict[str, Any] = {"model_type": "qwen3", "head_dim": 10**9, "num_hidden_layers": 2}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    with pytest.raises(LoadError, match=r"head_dim must be a positive integer up to 65536, got 1000000000"):
        read_rotary_groups(config)
