"""GPT-J and CodeGen: interleaved pairs on the first dimensions of each head, mixer and feed-forward under one norm."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.rules import GPT_NAMES, ConfigRules, renamed
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.model.families.family import Family
from windlass.engine.model.feed_forward.plain_spec import PlainMLPNames
from windlass.engine.model.mixers.attention_spec import AttentionNames
from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.spec import LayerNorms, OuterNames

_RULES = ConfigRules(
    max_position_embeddings=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
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
    feed_forward_bias=True,
    activation="gelu_new",
    activation_key="activation_function",
    interleaved=True,
    attention_names=AttentionNames(q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", out="attn.out_proj"),
    feed_forward_names=PlainMLPNames(up="mlp.fc_in", down="mlp.fc_out"),
    norms=LayerNorms(mixer="ln_1", feed_forward=None, form=NormSpec(centered=True, bias=True), parallel=True),
    norm_eps_key="layer_norm_epsilon",
    outer_names=OuterNames("transformer.wte", "transformer.h", "transformer.ln_f"),
    head_bias=True,
)


def _check_head_quarters(family: Family, config: Config) -> Family:
    heads = read_size(config, "num_attention_heads", family.rules.num_attention_heads)
    if heads % 4:
        raise LoadError(
            f"config.json: n_head {heads} is not a multiple of 4, which CodeGen's projections are stored by"
        )
    return family


# Its projections are stored for four devices, and values before keys.
CODEGEN = replace(
    GPTJ,
    architecture="CodeGenForCausalLM",
    title="CodeGen",
    model_type="codegen",
    attention_names=AttentionNames(qkv="attn.qkv_proj", qkv_order="quarters", out="attn.out_proj"),
    variant=_check_head_quarters,
)
