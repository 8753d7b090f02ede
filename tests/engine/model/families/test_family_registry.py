"""Every family is listed once, and its defaults are those of transformers' own configuration class."""

from __future__ import annotations

import pytest
import transformers
from transformers import AutoConfig

from windlass.engine.model.families.family import Family
from windlass.engine.model.families.registry import FAMILIES


def test_every_family_is_listed_once() -> None:
    for names in ([family.architecture for family in FAMILIES], [family.model_type for family in FAMILIES]):
        assert len(set(names)) == len(names)


REMOTE = {"baichuan", "chatglm", "internlm2"}  # their classes are published with their weights
UNSPECIFIED = {("bloom", "max_position_embeddings")}  # by the configuration class
OF_ANOTHER = {"internlm3"}  # run by another family's class


def test_families_without_a_class_of_transformers() -> None:
    without = {family.model_type for family in FAMILIES if not hasattr(transformers, family.architecture)}
    assert without == REMOTE | OF_ANOTHER


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.model_type not in REMOTE],
    ids=lambda family: family.model_type,
)
def test_defaults_equal_the_configuration_class(family: Family) -> None:
    theirs, rules = AutoConfig.for_model(family.model_type), family.rules
    theirs.allow_global_per_layer_attribute_access = True  # for Gemma 4, whose global layers have other heads
    if family.model_type not in OF_ANOTHER:
        assert getattr(transformers, family.architecture).config_class is type(theirs)
    sizes = rules.sizes
    for name, default in {
        "max_position_embeddings": sizes.context,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "tie_word_embeddings": rules.tie_word_embeddings,
    }.items():
        if (family.model_type, name) not in UNSPECIFIED:
            assert default == getattr(theirs, name), name
    if family.norm_eps_key is not None:
        assert rules.rms_norm_eps == getattr(theirs, family.norm_eps_key)
    kv_heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    assert (sizes.kv_heads or sizes.heads) == kv_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (sizes.head_dim or sizes.hidden // sizes.heads) == head_dim
    if hasattr(theirs, family.activation_key):
        assert family.activation == getattr(theirs, family.activation_key)
    assert family.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)
