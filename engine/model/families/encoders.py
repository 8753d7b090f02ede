"""Encoders that rotate: ModernBERT, EuroBERT, RoFormer, NomicBERT. Attention is bidirectional; they embed and classify."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.classification_head import ClassificationHeadNames
from windlass.engine.model.config_json.config_rules import (
    GPT_NAMES,
    Config,
    ConfigRules,
    LayerFacts,
    Sizes,
    read_flag,
    read_size,
    renamed,
)
from windlass.engine.model.families.family import (
    CLASSIFIER_HEAD,
    LLAMA_BIASES,
    Biases,
    ConfigFlag,
    Family,
    FamilyClassificationHead,
)
from windlass.engine.model.feed_forward.mlp import GatedMLPNames, PlainMLPNames
from windlass.engine.model.mixers.attention import AttentionNames
from windlass.engine.model.model_spec import LayerNorms, OuterNames
from windlass.engine.model.norm import LAYER_NORM, NormSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION

# The defaults of BERT, with RoFormer's context length.
_RULES = ConfigRules(
    sizes=Sizes(context=1536, hidden=768, layers=12, heads=12),
    rms_norm_eps=1e-12,
    tie_word_embeddings=True,
)


def _rewrite_modernbert(config: Config) -> dict[str, Any]:
    """`local_attention` counts the tokens on both sides. A window counts those on one side and the token itself."""
    return {**config, "sliding_window": read_size(config, "local_attention", 128) // 2 + 1}


def _every_nth_global(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """The first of every `global_attn_every_n_layers` layers is global; the others rotate with their own theta."""
    interval = read_size(config, "global_attn_every_n_layers", 3)
    kinds = facts.given or [SLIDING_ATTENTION if i % interval else FULL_ATTENTION for i in range(facts.count)]
    return kinds, list(kinds)


def _modernbert(family: Family, config: Config) -> Family:
    """Norms have biases if `norm_bias` is set. The first layer uses the embedding's norm instead of its own."""
    form = NormSpec(centered=True, bias=read_flag(config, "norm_bias"))
    norms = replace(family.norms, form=form)
    return replace(family, norms=norms, first_norms=replace(norms, mixer=None), embedding_norm=form)


_MODERNBERT_HEAD = FamilyClassificationHead(
    ClassificationHeadNames(out="classifier", dense="head.dense", norm="head.norm"),
    pooling="first",
    pooling_key="classifier_pooling",
    poolings={"cls": "first", "mean": "mean"},
    out_bias=True,
    dense_bias=ConfigFlag("classifier_bias"),
    activation_key="classifier_activation",
)

MODERNBERT = Family(
    architecture="ModernBertModel",
    title="ModernBERT",
    model_type="modernbert",
    other_names=("ModernBertForMaskedLM",),
    causal=False,
    rules=replace(
        _RULES,
        layer_pattern=_every_nth_global,
        sizes=Sizes(context=8192, hidden=768, layers=22, heads=12),
        rms_norm_eps=1e-5,
        rope_theta=160_000.0,
        local_rope_theta=10_000.0,
        rewrite=_rewrite_modernbert,
    ),
    biases=LLAMA_BIASES,
    activation="gelu",
    activation_key="hidden_activation",
    attention_names=AttentionNames(qkv="attn.Wqkv", out="attn.Wo"),
    feed_forward_names=GatedMLPNames(gate_up="mlp.Wi", down="mlp.Wo"),
    norms=LayerNorms(mixer="attn_norm", feed_forward="mlp_norm"),
    norm_eps_key="norm_eps",
    outer_names=OuterNames(
        "model.embeddings.tok_embeddings", "model.layers", "model.final_norm", embedding_norm="model.embeddings.norm"
    ),
    text_head=_MODERNBERT_HEAD,
    token_head=_MODERNBERT_HEAD,
    unused_heads=("head.", "decoder."),
    variant=_modernbert,
    extra_keys=frozenset(
        "norm_bias local_attention global_attn_every_n_layers classifier_pooling classifier_bias classifier_activation "
        "decoder_bias mlp_dropout deterministic_flash_attn sparse_prediction sparse_pred_ignore_index "
        "initializer_cutoff_factor reference_compile repad_logits_with_grad position_embedding_type".split()
    ),
)

EUROBERT = Family(
    architecture="EuroBertModel",
    title="EuroBERT",
    model_type="eurobert",
    other_names=("EuroBertForMaskedLM",),
    causal=False,
    rules=replace(
        _RULES,
        sizes=Sizes(context=8192, hidden=768, layers=12, heads=12),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rewrite=renamed({"clf_pooling": "classifier_pooling"}),
    ),
    biases=LLAMA_BIASES,
    text_head=FamilyClassificationHead(
        ClassificationHeadNames(out="classifier", dense="dense"),
        pooling="late",
        pooling_key="classifier_pooling",
        poolings={"late": "late", "bos": "first", "mean": "mean"},
        out_bias=True,
        dense_bias=True,
    ),
    token_head=CLASSIFIER_HEAD,
    unused_heads=("lm_head.",),
    extra_keys=frozenset({"classifier_pooling", "mask_token_id"}),
)


def _roformer(family: Family, config: Config) -> Family:
    """Reject embeddings narrower than the hidden state."""
    hidden = read_size(config, "hidden_size", family.rules.sizes.hidden)
    if (narrow := read_size(config, "embedding_size", hidden)) != hidden:
        raise LoadError(
            f"config.json: embedding_size {narrow} is not hidden_size {hidden}: embeddings that are widened are not supported"
        )
    return family


_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size")

ROFORMER = Family(
    architecture="RoFormerModel",
    title="RoFormer",
    model_type="roformer",
    other_names=("RoFormerForMaskedLM",),
    causal=False,
    rules=_RULES,
    biases=Biases.everywhere(True),
    activation="gelu",
    interleaved=True,
    attention_names=AttentionNames(
        q="attention.self.query", k="attention.self.key", v="attention.self.value", out="attention.output.dense"
    ),
    feed_forward_names=PlainMLPNames(up="intermediate.dense", down="output.dense"),
    norms=LayerNorms(mixer=None, feed_forward="attention.output.LayerNorm", output="output.LayerNorm", form=LAYER_NORM),
    embedding_norm=LAYER_NORM,
    norm_eps_key="layer_norm_eps",
    outer_names=OuterNames(
        "roformer.embeddings.word_embeddings",
        "roformer.encoder.layer",
        None,
        embedding_norm="roformer.embeddings.LayerNorm",
        token_types="roformer.embeddings.token_type_embeddings",
    ),
    token_types=True,
    text_head=FamilyClassificationHead(
        ClassificationHeadNames(out="classifier.out_proj", dense="classifier.dense"),
        pooling="first",
        out_bias=True,
        dense_bias=True,
        activation_key="hidden_act",
    ),
    token_head=CLASSIFIER_HEAD,
    # Sines of every position, which follow from config.json.
    unused_tensors=("roformer.encoder.embed_positions.", "encoder.embed_positions."),
    unused_heads=("cls.",),
    fixed_values={"rotary_value": (False,), "is_decoder": (False,)},
    variant=_roformer,
    extra_keys=frozenset({"embedding_size", *_DROPOUTS}),
)

_nomic_names = renamed({**GPT_NAMES, "layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act"})


def _rewrite_nomic(config: Config) -> dict[str, Any]:
    result = _nomic_names(config)
    if result.get("hidden_act") == "swiglu":  # a SiLU gate, which the class always has
        result["hidden_act"] = "silu"
    return result


NOMIC_BERT = Family(
    architecture="NomicBertModel",
    title="NomicBERT (nomic-embed-text)",
    model_type="nomic_bert",
    other_names=("NomicBertForMaskedLM", "NomicBertForPreTraining"),
    causal=False,
    rules=replace(
        _RULES,
        sizes=Sizes(context=2048, hidden=768, layers=12, heads=12),
        rope_theta=1000.0,
        intermediate_factor=4,
        rewrite=_rewrite_nomic,
    ),
    attention_names=AttentionNames(qkv="attn.Wqkv", out="attn.out_proj"),
    feed_forward_names=GatedMLPNames(gate="mlp.fc12", up="mlp.fc11", down="mlp.fc2"),
    norms=LayerNorms(mixer=None, feed_forward="norm1", output="norm2", form=LAYER_NORM),
    embedding_norm=LAYER_NORM,
    norm_eps_key="layer_norm_eps",
    outer_names=OuterNames(
        "nomic_bert.embeddings.word_embeddings",
        "nomic_bert.encoder.layers",
        None,
        embedding_norm="nomic_bert.emb_ln",
        token_types="nomic_bert.embeddings.token_type_embeddings",
    ),
    token_types=True,
    text_head=FamilyClassificationHead(
        ClassificationHeadNames(out="classifier", dense="nomic_bert.pooler.dense"),
        pooling="first",
        out_bias=True,
        dense_bias=True,
        activation="tanh",
    ),
    token_head=CLASSIFIER_HEAD,
    unused_heads=("cls.",),
    fixed_values={  # of published models, in files with their own code
        **dict.fromkeys(
            "prenorm parallel_block use_rms_norm rotary_emb_interleaved qkv_proj_bias mlp_fc1_bias mlp_fc2_bias causal "
            "scale_attn_by_inverse_layer_idx".split(),
            (False,),
        ),
        "rotary_emb_fraction": (1.0,),
        "rotary_emb_scale_base": (),
        "rotary_scaling_factor": (),
    },
    extra_keys=frozenset(
        (
            *_DROPOUTS,
            *"attn_pdrop embd_pdrop resid_pdrop use_flash_attn use_xentropy fused_bias_fc fused_dropout_add_ln dense_seq_output "
            "last_layer_subset pad_vocab_size_multiple scale_attn_weights max_trained_positions reorder_and_upcast_attn".split(),
        )
    ),
)
