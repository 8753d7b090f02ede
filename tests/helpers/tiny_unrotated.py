"""Tiny random models without rotation: learned positions, ALiBi, recurrent layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers import tiny_experts, tiny_plain

_FALCON = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "alibi": True}
_GRANITE = {
    **tiny_experts.STATES,
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention", "mlp"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 12,
    "max_position_embeddings": 256,
    "layer_norm_epsilon": 1e-3,
}
_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
# By name in tests: class and settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 96}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 4, "n_head": 4}),
    "bloom_six_heads": ("BloomForCausalLM", {"hidden_size": 96, "n_layer": 4, "n_head": 6}),
    "falcon_rw": ("FalconForCausalLM", {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_rw_six_heads": ("FalconForCausalLM", {**_FALCON, "hidden_size": 96, "num_attention_heads": 6}),
    "baichuan_13b": ("BaichuanForCausalLM", {}),  # of `tiny_plain`
    "nemotron_h": ("NemotronHForCausalLM", {**_NEMOTRON, "use_bias": True, "mlp_bias": True}),
    "nemotron_h_plain": ("NemotronHForCausalLM", {**_NEMOTRON, "use_conv_bias": False}),
    "nemotron_h_experts": ("NemotronHForCausalLM", {**_NEMOTRON, **_EXPERTS}),
    "granite4_h_nope": ("GraniteMoeHybridForCausalLM", {**_GRANITE, "num_local_experts": 0}),
    "granite4_h_nope_experts": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, "position_embedding_type": "nope", "num_local_experts": 6, "mamba_n_groups": 1},
    ),
}


def make_unrotated(family: str, directory: Path, *, head: str | None = None, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model; 1-D parameters are random too. head: end of another class name."""
    if family in tiny_plain.UNROTATED:
        return tiny_plain.save(family, directory, seed, **overrides)
    name, settings = FAMILIES[family]
    stem = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    config = getattr(transformers, f"{stem}Config")(vocab_size=128, bos_token_id=1, eos_token_id=2, **settings)
    for key, value in overrides.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = getattr(transformers, name if head is None else stem + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() == 1 else parameter.mul_(4.0)
            if parameter.dim() == 1:
                parameter.add_(1.0)
        for key, parameter in model.named_parameters():
            if key.endswith(".A_log"):  # so that a token's contribution lasts for many more
                parameter.sub_(3.0)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def logits_of(directory: Path, ids: list[int]) -> torch.Tensor:
    """Return logits of transformers or `tiny_plain` for the text, [T, V] float32."""
    if json.loads((directory / "config.json").read_text())["architectures"][0] in tiny_plain.ARCHITECTURES:
        return tiny_plain.PlainModel(directory).logits(ids, torch.zeros(1, dtype=torch.float64))
    return reference(directory)(torch.tensor([ids]), use_cache=False).logits[0]


def reference(directory: Path, auto: Any = transformers.AutoModelForCausalLM) -> transformers.PreTrainedModel:
    """Return the transformers model in float32. Falcon's eager attention adds ALiBi twice, once with the mask; sdpa once."""
    falcon = json.loads((directory / "config.json").read_text())["model_type"] == "falcon"
    kernel = "sdpa" if falcon else "eager"
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation=kernel).eval()


def exact_falcon_alibi(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Replacement of Falcon's `build_alibi_tensor` by that of BLOOM, without rounding to bfloat16."""
    return transformers.models.bloom.modeling_bloom.build_alibi_tensor(mask, num_heads, dtype)
