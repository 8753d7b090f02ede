"""Tiny random transformers encoders with any head, and their output with cos and sin of float64 angles."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from windlass.engine.rotary.rope_scaling import RotarySpec

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}

# By name in tests: class without a head, and settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBertModel", {"local_attention": 8}),
    "modernbert_bias": (
        "ModernBertModel",
        {
            "local_attention": 8,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "classifier_activation": "silu",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "eurobert": ("EuroBertModel", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "eurobert_bos": ("EuroBertModel", {"num_key_value_heads": 4, "classifier_pooling": "bos"}),
    "roformer": ("RoFormerModel", {}),
    "nomic_bert": ("NomicBertModel", {}),
}
HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


def make_encoder(family: str, directory: Path, head: str = "Model", *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random encoder; 1-D parameters are random too, to expose errors with norms. head: end of the class name."""
    name, settings = FAMILIES[family]
    stem = name.removesuffix("Model")
    config = getattr(transformers, f"{stem}Config")(**{**_COMMON, **settings, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, stem + head)(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key:
                continue
            # Large enough for peaked attention, in which errors are visible.
            parameter.normal_(0.0, 0.3) if parameter.dim() == 1 else parameter.mul_(4.0)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    return directory


class EncoderReference:
    """transformers model in float32 with eager attention, and cos and sin of float64 angles.

    specs, names: of the rotary groups.
    """

    def __init__(self, directory: Path, specs: Sequence[RotarySpec], names: Sequence[str], head: str = "Model") -> None:
        kind = {
            "Model": transformers.AutoModel,
            "ForMaskedLM": transformers.AutoModel,
            "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
            "ForTokenClassification": transformers.AutoModelForTokenClassification,
        }[head]
        self.model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        by_name, fallback = dict(zip(names, specs, strict=True)), specs[0]

        def rotary(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> Any:
            spec = by_name.get(layer_type, fallback)
            angle = position_ids[..., None].double() * torch.tensor(spec.inv_freq, dtype=torch.float64)
            angle = torch.cat((angle, angle), dim=-1)
            return (angle.cos() * spec.rotary_scale).float(), (angle.sin() * spec.rotary_scale).float()

        for name, module in self.model.named_modules():
            if name.endswith("rotary_emb"):
                module.forward = rotary
            if name.endswith("embed_positions"):  # RoFormer: table of sines, then cosines, by position
                count = module.weight.shape[0]
                angle = torch.arange(count).double()[:, None] * torch.tensor(fallback.inv_freq, dtype=torch.float64)
                table = torch.cat((angle.sin(), angle.cos()), dim=-1) * fallback.rotary_scale
                module.weight = torch.nn.Parameter(table.float(), requires_grad=False)

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], token_types: Sequence[int] | None = None) -> torch.Tensor:
        """Return hidden states [T, hidden], logits of the classes [1, classes], or logits of each token [T, classes]."""
        types = {} if token_types is None else {"token_type_ids": torch.tensor([list(token_types)])}
        found = self.model(torch.tensor([list(token_ids)]), **types)
        if "logits" not in found:
            return found.last_hidden_state[0]
        return found.logits[0] if found.logits.dim() == 3 else found.logits
