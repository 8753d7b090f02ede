"""Gemma 4 from config.json: heads of two widths, KV sharing and per-layer embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.tiny_families import FAMILIES
from helpers.tiny_models import SIZES, make_model

from windlass.engine.cache.kv_cache_spec import KVGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.model_spec import ModelSpec

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def config(name: str, **changes: Any) -> dict[str, Any]:
    """As in published files, with the sizes of global layers under separate keys."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **SIZES,
        **FAMILIES[name][1],
        **changes,
    }


def attention(spec: ModelSpec) -> list[AttentionSpec]:
    found = [layer.mixer for layer in spec.layers]
    assert all(isinstance(mixer, AttentionSpec) for mixer in found)
    return found  # type: ignore[return-value]


def test_sizes_are_read_as_published_and_as_transformers_writes_them(tmp_path: Path) -> None:
    for name in ("gemma4_31b", "gemma4_e2b", "gemma4_26b"):
        written = transformers.AutoConfig.from_pretrained(make_model(name, tmp_path / name)).to_dict()
        written["per_layer_config"] = {str(index): sizes for index, sizes in written["per_layer_config"].items()}
        written["architectures"] = ["Gemma4ForCausalLM"]
        ours, theirs = read_spec(config(name)), read_spec(written)
        assert ours.layers == theirs.layers and ours.kv_groups == theirs.kv_groups
        assert ours.rotary_groups == theirs.rotary_groups and ours.per_layer_embeddings == theirs.per_layer_embeddings


def test_layers_read_the_keys_of_the_last_of_their_kind() -> None:
    spec = read_spec(config("gemma4_e2b"))
    mixers = attention(spec)
    assert [mixer.kv_source_layer for mixer in mixers] == [None, None, None, 1, 2, 1]
    assert [mixer.window for mixer in mixers] == [8, None] * 3
    assert spec.kv_groups == (KVGroupSpec((0, 2), 2, 16, 8), KVGroupSpec((1,), 2, 32, None))
    widths = [getattr(layer.feed_forward, "intermediate_size", None) for layer in spec.layers]
    assert widths == [96] * 3 + [192] * 3
    assert (
        "model.layers.3.self_attn.k_proj." in spec.unused_tensors
        and "model.layers.2.self_attn.k_proj." not in spec.unused_tensors
    )


def test_global_layers_have_their_own_heads() -> None:
    mixers = attention(read_spec(config("gemma4_31b")))
    assert [(mixer.head_dim, mixer.num_kv_heads, mixer.keys_as_values) for mixer in mixers] == [
        (16, 2, False),
        (32, 1, True),
    ] * 2
    # Without the switch they have as many heads of keys as the others.
    plain = attention(read_spec(config("gemma4_31b", attention_k_eq_v=False)))
    assert [(mixer.num_kv_heads, mixer.keys_as_values) for mixer in plain] == [(2, False)] * 4


def test_the_last_layer_sees_everything() -> None:
    spec = read_spec(config("gemma4_31b", layer_types=[LOCAL] * 4))
    assert [layer.mixer.window for layer in spec.layers] == [8, 8, 8, None]


def test_the_kind_without_inputs_and_experts_has_defaults_of_its_own() -> None:
    given = config("gemma4_31b", model_type="gemma4_unified_text")
    for key in ("sliding_window", "max_position_embeddings", "hidden_size_per_layer_input"):
        del given[key]
    spec = read_spec({**given, "architectures": ["Gemma4UnifiedForCausalLM"]})
    assert spec.trained_len == 262_144 and spec.layers[0].mixer.window == 1024
    assert spec.per_layer_embeddings is None and all(layer.per_layer_projection is None for layer in spec.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 6}, "leaves none of a kind"),
        ({"num_kv_shared_layers": 5}, "leaves none of a kind"),
        ({"num_kv_shared_layers": 7}, "leaves none of a kind"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be"),
        ({"vocab_size_per_layer_input": 100}, "each token needs a row"),
        ({"hidden_size_per_layer_input": "12"}, "hidden_size_per_layer_input must be"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "not a multiple of num_global_key_value_heads 3"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"global_head_dim": 33}, "cannot form pairs"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "the same of all layers of full attention"),
        (
            {"per_layer_config": {str(i): {"head_dim": 32} for i in range(6)}},
            "the same of all layers of full attention",
        ),
        ({"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 32}, "5": {}}}, "the same of all layers"),
        ({"per_layer_config": {str(i): {"rank": 2} for i in (1, 3, 5)}}, "per_layer_config may say head_dim and"),
        ({"per_layer_config": {str(i): 2 for i in (1, 3, 5)}}, "per_layer_config may say head_dim and"),
        ({"per_layer_config": {"1": {"head_dim": 32}}, "layer_types": 3}, "the same of all layers"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 9},
            "do not go together",
        ),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size must be"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_spec(config("gemma4_e2b", **changes))


def test_images_may_look_both_ways() -> None:
    assert read_spec(config("gemma4_e2b", use_bidirectional_attention="vision")) == read_spec(config("gemma4_e2b"))


def test_what_such_models_do_not_have_changes_nothing() -> None:
    plain = read_spec(config("gemma4_e2b"))
    default = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    proportional = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
    for changes in (
        {"partial_rotary_factor": 0.5},
        {"attn_logit_softcapping": 5.0},
        {"rope_parameters": {LOCAL: default, GLOBAL: proportional}},
    ):
        spec = read_spec(config("gemma4_e2b", **changes))
        assert (spec.rotary_groups, spec.layers) == (plain.rotary_groups, plain.layers), changes
    whole = read_spec(config("gemma4_e2b", rope_parameters={LOCAL: default, GLOBAL: default}))
    assert [group.base.rotary_dim for group in whole.rotary_groups] == [32, 16]
