"""Families with LayerNorm: Cohere's Command R and R7B, GPT-NeoX (Pythia), Jais 2, Nemotron, Persimmon, Phi 1 and 2, StableLM,
StarCoder 2."""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.model.config_json.config_rules import (
    ConfigRules,
    Sizes,
    local_layers_rotate,
    sliding_window_layers,
)
from windlass.engine.model.families.family import (
    ATTENTION_BIASES,
    CLASSIFIER_HEAD,
    LLAMA_BIASES,
    Biases,
    ConfigFlag,
    ConfigNumber,
    Family,
    Multipliers,
)
from windlass.engine.model.feed_forward.mlp import PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, OuterNames
from windlass.engine.model.norm import LAYER_NORM, NormSpec

_ATTENTION_BIAS = ConfigFlag("attention_bias", default=True)
_QK_LAYERNORM = ConfigFlag("qk_layernorm")
_DENSE = PlainMLPNames(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
_CENTERED = NormSpec(centered=True)
_NORMS = LayerNorms(form=LAYER_NORM)
_ONE_NORM = LayerNorms(feed_forward=None, form=LAYER_NORM, parallel=True)


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    title="StarCoder 2",
    model_type="starcoder2",
    rules=ConfigRules(
        layer_pattern=sliding_window_layers,
        sizes=Sizes(context=4096, hidden=3072, layers=30, heads=24, kv_heads=2),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    biases=Biases.everywhere(ConfigFlag("use_bias", default=True)),
    activation="gelu_pytorch_tanh",
    feed_forward_names=PlainMLPNames(up="mlp.c_fc", down="mlp.c_proj"),
    norms=_NORMS,
    norm_eps_key="norm_epsilon",
)

STABLELM = Family(
    architecture="StableLmForCausalLM",
    title="StableLM",
    model_type="stablelm",
    rules=ConfigRules(
        sizes=Sizes(context=4096, hidden=2560, kv_heads=32),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.25,
    ),
    biases=Biases(qkv=ConfigFlag("use_qkv_bias")),
    qk_norm="by head",
    qk_norm_form=_CENTERED,
    attention_names=AttentionNames(
        q_norm="self_attn.q_layernorm.norms.{head}", k_norm="self_attn.k_layernorm.norms.{head}"
    ),
    qk_norm_flag=_QK_LAYERNORM,
    norms=_NORMS,
    parallel=ConfigFlag("use_parallel_residual"),
    parallel_norms=_ONE_NORM,
    norm_eps_key="layer_norm_eps",
)

PHI = Family(
    architecture="PhiForCausalLM",
    title="Phi 1, 1.5 and 2",
    model_type="phi",
    rules=ConfigRules(
        sizes=Sizes(context=2048, hidden=2048, layers=24),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    biases=Biases.everywhere(True),
    activation="gelu_new",
    qk_norm="before",
    qk_norm_form=LAYER_NORM,
    attention_names=AttentionNames(
        out="self_attn.dense", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"
    ),
    qk_norm_flag=_QK_LAYERNORM,
    feed_forward_names=PlainMLPNames(up="mlp.fc1", down="mlp.fc2"),
    norms=_ONE_NORM,
    norm_eps_key="layer_norm_eps",
    outer_names=OuterNames(final_norm="model.final_layernorm"),
    head_bias=True,
)

NEMOTRON = Family(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    rules=ConfigRules(
        sizes=Sizes(context=4096, hidden=6144, heads=48),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    biases=LLAMA_BIASES,
    norm_offset=1.0,
    activation="relu2",
    feed_forward_names=PlainMLPNames(),
    norms=_NORMS,
    norm_eps_key="norm_eps",
)

GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    title="GPT-NeoX, Pythia",
    model_type="gpt_neox",
    rules=ConfigRules(
        sizes=Sizes(context=2048, hidden=6144, layers=44, heads=64),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.25,
    ),
    biases=Biases(_ATTENTION_BIAS, _ATTENTION_BIAS, True),
    activation="gelu",
    attention_names=AttentionNames(qkv="attention.query_key_value", qkv_order="groups", out="attention.dense"),
    feed_forward_names=_DENSE,
    norms=_NORMS,
    parallel=ConfigFlag("use_parallel_residual", default=True),
    parallel_norms=LayerNorms(form=LAYER_NORM, parallel=True),
    norm_eps_key="layer_norm_eps",
    outer_names=OuterNames("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
    token_head=CLASSIFIER_HEAD,
)

PERSIMMON = replace(
    PHI,
    architecture="PersimmonForCausalLM",
    title="Persimmon",
    model_type="persimmon",
    rules=ConfigRules(
        sizes=Sizes(context=16_384, layers=36, heads=64),
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
    ),
    activation="relu2",
    attention_names=replace(PHI.attention_names, qkv="self_attn.query_key_value", qkv_order="groups"),
    feed_forward_names=_DENSE,
    norms=_NORMS,
    head_bias=False,
    qk_norm_flag=ConfigFlag("qk_layernorm", default=True),
)

JAIS2 = Family(
    architecture="Jais2ForCausalLM",
    title="Jais 2",
    model_type="jais2",
    rules=ConfigRules(Sizes(context=8192, hidden=3328, heads=26), rms_norm_eps=1e-5),
    biases=Biases(_ATTENTION_BIAS, _ATTENTION_BIAS, ConfigFlag("mlp_bias", default=True)),
    activation="relu2",
    feed_forward_names=PlainMLPNames(),
    norms=_NORMS,
    norm_eps_key="layer_norm_eps",
)

_COHERE_RULES = ConfigRules(
    sizes=Sizes(context=8192, hidden=8192, layers=40, heads=64),
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_theta=500_000.0,
)

# Mixer and feed-forward in parallel, interleaved pairs, scaled logits.
COHERE = Family(
    architecture="CohereForCausalLM",
    title="Cohere Command R and R+",
    model_type="cohere",
    rules=_COHERE_RULES,
    biases=ATTENTION_BIASES,
    interleaved=True,
    multipliers=Multipliers(logits=ConfigNumber("logit_scale", 0.0625)),
    norms=LayerNorms(feed_forward=None, form=_CENTERED, parallel=True),
    norm_eps_key="layer_norm_eps",
    qk_norm="by head",  # in Command R+
    qk_norm_form=_CENTERED,
    qk_norm_flag=ConfigFlag("use_qk_norm"),
)

# Its global layers do not rotate.
COHERE2 = replace(
    COHERE,
    architecture="Cohere2ForCausalLM",
    title="Cohere Command R7B (Cohere 2)",
    model_type="cohere2",
    qk_norm=None,
    qk_norm_flag=None,
    rules=replace(_COHERE_RULES, layer_pattern=local_layers_rotate, sliding_window=4096, rope_theta=10_000.0),
)
