"""Families that differ from Llama in a few switches: defaults, biases, windows, activations, norms, order of rotated pairs.

Apertus, Arcee, Baichuan, BitNet, CWM, EXAONE 4, Helium 1, InternLM, NanoChat, Seed-OSS, SmolLM 3.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import (
    Config,
    ConfigRules,
    LayerFacts,
    Sizes,
    every_nth_full,
    nope_layers,
    read_size,
    renamed,
)
from windlass.engine.model.families.family import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    LLAMA_BIASES,
    MLP_BIAS,
    Biases,
    ConfigFlag,
    Family,
    SoftCaps,
)
from windlass.engine.model.families.olmo import NORMS_BEHIND
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, OuterNames
from windlass.engine.model.norm import NormSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION

HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    rules=ConfigRules(
        sizes=Sizes(context=4096, hidden=2560, layers=24, heads=20, kv_heads=20, head_dim=128),
        rms_norm_eps=1e-8,
        rope_theta=100_000.0,
    ),
    biases=Biases(qkv=ATTENTION_BIAS, feed_forward=MLP_BIAS),
    interleaved=True,
)


def _windows_without_rotation(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """With `use_sliding_window`, layers that do not rotate have a window, or those that `layer_types` lists."""
    full = [FULL_ATTENTION] * facts.count
    if not config.get("use_sliding_window", False):
        return full, full
    return facts.given or [FULL_ATTENTION if rotates else SLIDING_ATTENTION for rotates in facts.rotates], full


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    title="SmolLM 3",
    model_type="smollm3",
    rules=ConfigRules(
        layer_pattern=_windows_without_rotation,
        sizes=Sizes(context=32_768, hidden=2048, layers=36, heads=16, kv_heads=4),
        tie_word_embeddings=True,
        rope_theta=2_000_000.0,
        no_rope_layer_interval=4,
    ),
    biases=LLAMA_BIASES,
)

SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    title="Seed-OSS",
    model_type="seed_oss",
    rules=ConfigRules(
        sizes=Sizes(context=524_288, layers=64, heads=80, kv_heads=8, head_dim=128),
    ),
    biases=Biases(ConfigFlag("attention_bias", default=True), ConfigFlag("attention_out_bias"), MLP_BIAS),
)

CWM = Family(
    architecture="CwmForCausalLM",
    title="CWM",
    model_type="cwm",
    rules=ConfigRules(
        layer_pattern=every_nth_full(4, first=True),
        sizes=Sizes(context=131_072, hidden=6144, layers=64, heads=48, kv_heads=8, head_dim=128),
        rms_norm_eps=1e-5,
        eos_token_id=(128_001, 128_008, 128_009),
        sliding_window=8192,
        rope_theta=1_000_000.0,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    biases=Biases(feed_forward=MLP_BIAS),
)

ARCEE = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    rules=ConfigRules(Sizes(context=4096, hidden=2560), rms_norm_eps=1e-5),
    biases=LLAMA_BIASES,
    activation="relu2",
    feed_forward_names=PlainMLPNames(),
)

APERTUS = Family(
    architecture="ApertusForCausalLM",
    title="Apertus",
    model_type="apertus",
    rules=ConfigRules(
        sizes=Sizes(context=65_536),
        rms_norm_eps=1e-5,
        rope_theta=12_000_000.0,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    biases=ATTENTION_BIASES,
    qk_norm="before",
    activation="xielu",
    feed_forward_names=PlainMLPNames(),
    norms=LayerNorms(mixer="attention_layernorm", feed_forward="feedforward_layernorm"),
    fixed_values={"qk_norm": (True,), "post_norm": (False,)},  # in its files, and no longer read by its class
)

# Unquantized files only: packed weights, and the rounding of activations, are not part of the family.
BITNET = Family(
    architecture="BitNetForCausalLM",
    title="BitNet",
    model_type="bitnet",
    rules=ConfigRules(
        sizes=Sizes(context=2048, hidden=2560, layers=30, heads=20, kv_heads=5),
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
    biases=ATTENTION_BIASES,
    activation="relu2",
    attention_names=AttentionNames(output_norm="self_attn.attn_sub_norm"),
    feed_forward_names=GatedMLPNames(inner_norm="mlp.ffn_sub_norm"),
)

_ALIBI_HEADS = 40  # of the 13B models, which differ by nothing else
_SECOND_VOCAB = 125_696


def _baichuan_variant(family: Family, config: Config) -> Family:
    if read_size(config, "num_attention_heads", family.rules.sizes.heads) == _ALIBI_HEADS:
        family = replace(family, positions="alibi", rules=replace(family.rules, layer_pattern=nope_layers))
    second = config.get("vocab_size") == _SECOND_VOCAB or "z_loss_weight" in config
    return replace(family, unit_head=second)


# Its class is not in transformers but next to the weights; defaults are from its configuration there. Baichuan 2 has a
# head of unit rows; the 13B models have ALiBi instead of rotation.
BAICHUAN = Family(
    architecture="BaichuanForCausalLM",
    other_names=("BaiChuanForCausalLM",),
    title="Baichuan 1 and 2",
    model_type="baichuan",
    rules=ConfigRules(Sizes(context=4096)),
    attention_names=AttentionNames(qkv="self_attn.W_pack"),
    variant=_baichuan_variant,
    extra_keys=frozenset({"z_loss_weight", "model_max_length"}),
)

# Projections are fused by key head. Its class is not in transformers but next to the weights; defaults are from its
# configuration there.
INTERNLM2 = Family(
    architecture="InternLM2ForCausalLM",
    title="InternLM 2 and 2.5",
    model_type="internlm2",
    rules=ConfigRules(Sizes(context=2048)),
    biases=Biases(ConfigFlag("bias", default=True), ConfigFlag("bias", default=True)),
    attention_names=AttentionNames(qkv="attention.wqkv", qkv_order="groups", out="attention.wo"),
    feed_forward_names=GatedMLPNames(gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2"),
    norms=LayerNorms(mixer="attention_norm", feed_forward="ffn_norm"),
    outer_names=OuterNames(embedding="model.tok_embeddings", head="output"),
)

INTERNLM3 = Family(
    architecture="InternLM3ForCausalLM",
    title="InternLM 3",
    model_type="internlm3",
    rules=ConfigRules(
        sizes=Sizes(context=32_768, layers=48, kv_heads=2, head_dim=128),
        rms_norm_eps=1e-5,
        rewrite=renamed({"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    ),
    biases=Biases(ATTENTION_BIAS, MLP_BIAS, MLP_BIAS),
)

# No norm has weights, and the rotation has the opposite sign.
_WITHOUT_WEIGHT = NormSpec(weight=False)

NANOCHAT = Family(
    architecture="NanoChatForCausalLM",
    title="NanoChat",
    model_type="nanochat",
    rules=ConfigRules(Sizes(context=2048, hidden=768, layers=12, heads=6)),
    biases=ATTENTION_BIASES,
    qk_norm="after",
    qk_norm_form=_WITHOUT_WEIGHT,
    embedding_norm=_WITHOUT_WEIGHT,
    swapped=True,
    activation="relu2",
    soft_caps=SoftCaps(logits=15.0),
    feed_forward_names=PlainMLPNames(up="mlp.fc1", down="mlp.fc2"),
    norms=LayerNorms(form=_WITHOUT_WEIGHT),
)


def _exaone4_layers(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """`sliding_window_pattern` is a number n, where every n-th layer is global, or letters L and G that repeat."""
    full = [FULL_ATTENTION] * facts.count
    kinds = facts.given or _exaone4_kinds(config, facts)
    if not facts.windowed:
        return full, list(full)
    return kinds, [FULL_ATTENTION if kind == SLIDING_ATTENTION else None for kind in kinds]


def _exaone4_kinds(config: Config, facts: LayerFacts) -> list[str]:
    given = config.get("sliding_window_pattern", 4)
    if isinstance(given, str):
        if not given or set(given) - set("LG"):
            raise LoadError("config.json: sliding_window_pattern must be a number or letters L and G")
        letters = (given * facts.count)[: facts.count]
        return [SLIDING_ATTENTION if letter == "L" else FULL_ATTENTION for letter in letters]
    interval = read_size(config, "sliding_window_pattern", 4) if facts.windowed else 1
    return [SLIDING_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(facts.count)]


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    title="EXAONE 4",
    model_type="exaone4",
    other_model_types=("exaone4_5_text",),  # in the first files of EXAONE 4.5
    rules=ConfigRules(
        layer_pattern=_exaone4_layers,
        sizes=Sizes(context=2048, kv_heads=32),
        rms_norm_eps=1e-5,
        sliding_window=4096,
    ),
    qk_norm="before",
    norms=NORMS_BEHIND,
)
