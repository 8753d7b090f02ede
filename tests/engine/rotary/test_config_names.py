"""Rotary groups read from config.json, against what transformers' own config and rotary module make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.rotary.config_names import RotaryGroup, apply_scaling, read_rotary_groups
from windlass.engine.rotary.scaling import RopeScaling, RotaryBase, resolve

MODULES = {
    "llama": LlamaRotaryEmbedding,
    "mistral": MistralRotaryEmbedding,
    "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding,
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


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize(
    "rope",
    [
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
    ],
)
def test_flat_families_read_as_transformers_reads_them(family: str, rope: dict[str, Any]) -> None:
    config = {"model_type": family, **SMALL, **rope}
    group = flat(dict(config))
    expected, attention = theirs(config)
    np.testing.assert_allclose(frequencies(group), expected, rtol=3e-6)
    assert resolve(group.scaling, group.base, 1).rotary_scale == pytest.approx(attention)


def test_new_and_old_names_give_the_same_group() -> None:
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


def test_a_scaling_added_to_a_new_config_keeps_its_theta() -> None:
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
def test_absent_fields_take_the_class_defaults(config: dict[str, Any]) -> None:
    base = flat(config).base
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
def test_gemma3_groups_read_as_transformers_reads_them(rope: dict[str, Any], layer_types: list[str] | None) -> None:
    config = {**GEMMA, **rope} if layer_types is None else {**GEMMA, **rope, "layer_types": layer_types}
    groups = read_rotary_groups(config)
    assert [group.name for group in groups] == ["full_attention", "sliding_attention"]
    module = Gemma3RotaryEmbedding(AutoConfig.for_model(**config))
    for group in groups:
        expected = getattr(module, f"{group.name}_inv_freq").double().numpy()
        np.testing.assert_allclose(frequencies(group), expected, rtol=3e-6)


def test_gemma3_scaling_under_the_older_key() -> None:
    # transformers reads `type` as no scaling here; published checkpoints mean the scaling they wrote.
    old = read_rotary_groups({**GEMMA, "rope_scaling": {"type": "linear", "factor": 8.0}})
    assert old == read_rotary_groups({**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [group.scaling.rope_type for group in old] == ["linear", "default"]


def test_gemma3_defaults() -> None:
    full, sliding = read_rotary_groups({"model_type": "gemma3_text"})
    assert (full.base.rope_theta, sliding.base.rope_theta) == (1e6, 1e4)
    assert full.base.head_dim == sliding.base.head_dim == 256
    assert full.base.trained_len == 131_072


def test_only_groups_that_have_layers_are_read() -> None:
    (only,) = read_rotary_groups({**GEMMA, "num_hidden_layers": 4})
    assert only.name == "sliding_attention"  # every sixth layer is global, and there is no sixth
    (only,) = read_rotary_groups({**GEMMA, "layer_types": ["full_attention"] * 12})
    assert (only.name, only.base.rope_theta) == ("full_attention", 1e6)


def test_layers_that_rotate_alike_are_one_group() -> None:
    alike = {"rope_type": "default", "rope_theta": 1e4}
    nested = {**GEMMA, "rope_parameters": {"full_attention": alike, "sliding_attention": dict(alike)}}
    assert len(read_rotary_groups(nested)) == 1
    windows = {"model_type": "qwen2", **SMALL, "layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 6}
    assert flat(windows) == flat({"model_type": "qwen2", **SMALL})


def test_nested_parameters_serve_any_family() -> None:
    nested = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    full, sliding = read_rotary_groups({"model_type": "llama", **SMALL, "rope_parameters": nested})
    assert (full.scaling.rope_type, full.base.rope_theta) == ("yarn", 1e6)
    assert (sliding.scaling.rope_type, sliding.base.rope_theta) == ("default", 1e4)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported: known are llama"),
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
            {"layer_types": ["sliding_attention"], "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "nothing about the sliding_attention layers",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "global": {}}}, "'global' beside layer types"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "differently: keep one",
        ),
    ],
)
def test_what_is_not_understood_is_not_loaded(change: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError) as caught:
        read_rotary_groups({"model_type": "llama", **SMALL, **change})
    assert says in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


# --- a request's scaling ----------------------------------------------------------------------------------------------


def test_a_flat_scaling_replaces_that_of_the_full_attention_group() -> None:
    groups = read_rotary_groups({**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    full, sliding = apply_scaling(groups, RopeScaling.from_dict({"rope_type": "yarn", "factor": 2.0}))
    assert full.scaling.to_dict() == {"rope_type": "yarn", "factor": 2.0}
    assert (full.base, sliding) == (groups[0].base, groups[1])
    assert apply_scaling(groups, None) == groups
    (only,) = read_rotary_groups({**GEMMA, "num_hidden_layers": 4})
    assert apply_scaling((only,), RopeScaling.from_dict({"type": "ntk", "factor": 2}))[0].scaling.rope_type == "ntk"


def test_the_scaling_gives_theta_only_if_it_says_so() -> None:
    groups = read_rotary_groups({"model_type": "llama", **SMALL, "rope_theta": 5e5})
    kept = apply_scaling(groups, RopeScaling.from_dict({"rope_type": "default"}))[0]
    changed = apply_scaling(groups, RopeScaling.from_dict({"rope_type": "default", "rope_theta": 1e6}))[0]
    np.testing.assert_allclose(frequencies(kept), 5e5 ** (-np.arange(0, 16, 2) / 16))
    np.testing.assert_allclose(frequencies(changed), 1e6 ** (-np.arange(0, 16, 2) / 16))


def test_a_nested_scaling_names_groups() -> None:
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


def test_lists_are_measured_against_the_model() -> None:
    groups = read_rotary_groups(GEMMA)
    inner = {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [2.0] * 7}
    for obj, param in ((inner, "x.short_factor"), ({"sliding_attention": inner}, "x.sliding_attention.short_factor")):
        with pytest.raises(RequestError, match="must hold 8 numbers") as caught:
            apply_scaling(groups, RopeScaling.from_dict(obj), param="x")
        assert caught.value.param == param
