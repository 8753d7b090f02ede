"""GPT-2 (learned positions), BLOOM (ALiBi), GPT-J and CodeGen (interleaved pairs in the first dimensions of each head)."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import (
    GPT_NAMES,
    Config,
    ConfigRules,
    Sizes,
    nope_layers,
    read_size,
    renamed,
)
from windlass.engine.model.families.family import CLASSIFIER_HEAD, Biases, Family
from windlass.engine.model.feed_forward.mlp import PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, OuterNames
from windlass.engine.model.norm import LAYER_NORM

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    title="GPT-2",
    model_type="gpt2",
    positions="learned",
    rules=ConfigRules(
        layer_pattern=nope_layers,
        sizes=Sizes(context=1024, hidden=768, layers=12, heads=12),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=(50_256,),
        intermediate_factor=4,
        rewrite=renamed(GPT_NAMES),
    ),
    biases=Biases.everywhere(True),
    activation="gelu_new",
    activation_key="activation_function",
    attention_names=AttentionNames(qkv="attn.c_attn", out="attn.c_proj", transposed=True),
    feed_forward_names=PlainMLPNames(up="mlp.c_fc", down="mlp.c_proj", transposed=True),
    norms=LayerNorms(mixer="ln_1", feed_forward="ln_2", form=LAYER_NORM),
    norm_eps_key="layer_norm_epsilon",
    outer_names=OuterNames("transformer.wte", "transformer.h", "transformer.ln_f", positions="transformer.wpe"),
    token_head=CLASSIFIER_HEAD,
    fixed_values={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    extra_keys=frozenset({"reorder_and_upcast_attn"}),
)

BLOOM = replace(
    GPT2,
    architecture="BloomForCausalLM",
    title="BLOOM",
    model_type="bloom",
    positions="alibi",
    rules=replace(
        GPT2.rules,
        sizes=Sizes(context=2048, hidden=64, layers=2, heads=8),
        eos_token_id=(2,),
        rewrite=renamed(
            {
                "n_embed": "hidden_size",
                "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads",
                "seq_length": "max_position_embeddings",
            }
        ),
    ),
    activation_key="hidden_act",
    attention_names=AttentionNames(
        qkv="self_attention.query_key_value", qkv_order="groups", out="self_attention.dense"
    ),
    feed_forward_names=PlainMLPNames(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    norms=LayerNorms(form=LAYER_NORM),
    embedding_norm=LAYER_NORM,
    outer_names=OuterNames(
        "transformer.word_embeddings",
        "transformer.h",
        "transformer.ln_f",
        embedding_norm="transformer.word_embeddings_layernorm",
    ),
    fixed_values={},
    extra_keys=frozenset(
        "slow_but_exact attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi "
        "skip_bias_add skip_bias_add_qkv".split()
    ),
)

_RULES = ConfigRules(
    sizes=Sizes(context=2048, layers=28, heads=16),
    rms_norm_eps=1e-5,
    intermediate_factor=4,
    partial_rotary_factor=0.25,
    rewrite=renamed(GPT_NAMES),
)

GPTJ = Family(
    architecture="GPTJForCausalLM",
    title="GPT-J",
    model_type="gptj",
    rules=_RULES,
    biases=Biases(feed_forward=True),
    activation="gelu_new",
    activation_key="activation_function",
    interleaved=True,
    attention_names=AttentionNames(q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", out="attn.out_proj"),
    feed_forward_names=PlainMLPNames(up="mlp.fc_in", down="mlp.fc_out"),
    norms=LayerNorms(mixer="ln_1", feed_forward=None, form=LAYER_NORM, parallel=True),
    norm_eps_key="layer_norm_epsilon",
    outer_names=OuterNames("transformer.wte", "transformer.h", "transformer.ln_f"),
    head_bias=True,
)


def _check_head_quarters(family: Family, config: Config) -> Family:
    heads = read_size(config, "num_attention_heads", family.rules.sizes.heads)
    if heads % 4:
        raise LoadError(
            f"config.json: n_head {heads} is not a multiple of 4, as the layout of CodeGen's projections requires"
        )
    return family


# Its projections are stored in four groups of heads, with values before keys.
CODEGEN = replace(
    GPTJ,
    architecture="CodeGenForCausalLM",
    title="CodeGen",
    model_type="codegen",
    attention_names=AttentionNames(qkv="attn.qkv_proj", qkv_order="quarters", out="attn.out_proj"),
    variant=_check_head_quarters,
)
