"""Tiny random models with an MTP layer, and its output in transformers.

The layer is transformers' `MtpLayer` around a layer of the model's class, with the names of published files. For Nemotron 3,
which transformers does not support, it is two of the model's layers in the same frame.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.loaded import loaded
from helpers.tiny_experts import BIASES
from helpers.tiny_models import Reference, make_model
from helpers.tiny_multimodal import TextLogits, make_multimodal
from helpers.tiny_unrotated import make_unrotated, reference
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer

from windlass.engine.rotary.rope_scaling import RotarySpec

# Modules that add to the residual stream.
_ADDING = ("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj.weight", "down_proj.bias", "down_proj")
_ATTENDS = re.compile(r"\.(q|k|v|q_a|q_b|kv_b)_proj\.weight$|\.kv_a_proj_with_mqa\.weight$")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_OWN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
_OF_ERNIE = {"enorm": "mtp_emb_norm.0", "hnorm": "mtp_hidden_norm.0", "eh_proj": "mtp_linear_proj.0"}
_OF_NEMOTRON = {"mtp_block": "0.", "experts_block": "1.", "post_norm": "1.final_layernorm."}


class _InParts(nn.Module):
    """MTP layer of Nemotron 3: attention, then experts, in the frame of `MtpLayer`."""

    def __init__(self, config: Any, layers: nn.ModuleList) -> None:
        super().__init__()
        block, kinds = type(layers[0]), list(config.layers_block_type)
        norm, hidden, eps = type(layers[0].norm), config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm, self.post_norm = (norm(hidden, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.mtp_block, self.experts_block = (block(config, kinds.index(kind)) for kind in ("full_attention", "moe"))

    def forward(self, embedded: Tensor, states: Tensor, *, attention_mask: Tensor, **others: Any) -> Tensor:
        mtp_input = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1))
        return self.post_norm(self.experts_block(self.mtp_block(mtp_input, attention_mask=attention_mask)))


def _renaming(family: str, layers: int) -> Callable[[str], str]:
    """Map names within the layer to names in files."""
    among = "model.language_model.layers" if family == "glm4v_moe" else "model.layers"

    def renamed(name: str) -> str:
        part, _, rest = name.partition(".")
        if family.startswith("qwen3"):  # separate from the model's layers
            return f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{_OWN[part]}.{rest}"
        if family.startswith("nemotron"):
            return f"mtp.layers.{_OF_NEMOTRON[part]}{rest}" if part in _OF_NEMOTRON else f"mtp.layers.0.{name}"
        if family.startswith("ernie"):  # the norm after the layer is the model's
            return "model.norm.weight" if part == "post_norm" else f"model.{_OF_ERNIE.get(part, 'mtp_block.0')}.{rest}"
        # As in DeepSeek V3: an additional layer.
        own = {"mtp_block": rest, "post_norm": f"shared_head.norm.{rest}"}.get(part, name)
        return f"{among}.{layers}.{own}"

    return renamed


def _stored(family: str, layer: nn.Module, layers: int) -> dict[str, Tensor]:
    """Return views of the layer's tensors by their names in files; most files have separate experts."""
    renamed, found = _renaming(family, layers), dict[str, Tensor]()
    for own, tensor in layer.state_dict().items():
        name = renamed(own)
        stem, _, kind = name.rpartition(".")
        if family.startswith("qwen3") or not stem.endswith(".experts"):
            found[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)) if kind == "gate_up_proj" else {}
            found |= {f"{stem}.{index}.{part}.weight": one for part, one in (parts or {kind: expert}).items()}
    return found


def _text(model: Any) -> Any:
    """Return the text model without its head."""
    return getattr(model.model, "language_model", model.model)


def _layer(family: str, model: Any) -> nn.Module:
    """Return an uninitialized attention layer, with experts if the model has any (except ERNIE 4.5)."""
    layers = _text(model).layers
    config = copy.deepcopy(_text(model).config)
    if family.startswith("nemotron"):
        return _InParts(config, layers)
    attends = next(layer for layer in reversed(layers) if hasattr(layer, "self_attn"))
    with_experts = [index for index, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
    like = 0 if family.startswith("ernie") else with_experts[-1] if with_experts else len(layers) - 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * len(layers)
    return MtpLayer(config, type(attends), type(attends.input_layernorm), like)


def make_predicting(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of the family with such a layer to `directory`.

    Its layers add little to the residual stream. The next token mostly depends on the last one, so that the MTP layer, which
    adds little of a state to that token's embedding, is often right.
    """
    if family == "glm4v_moe":
        model = TextLogits(make_multimodal(family, directory)).model
    elif family.startswith("nemotron"):
        model = reference(make_unrotated(family, directory, seed=seed, **overrides))
    else:
        model = loaded(make_model(family, directory, seed=seed, **overrides))
    generator, text = torch.Generator().manual_seed(seed + 1), _text(model)
    layer, hidden, layers = _layer(family, model), text.config.hidden_size, len(text.layers)
    offset = float(family.startswith("qwen3"))  # norms with a factor of 1 + w
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            # Large enough for peaked attention, in which errors are visible.
            width = 0.3 if tensor.dim() == 1 or name.endswith(BIASES) else 0.15 if _ATTENDS.search(name) else 0.02
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * width)
            if tensor.dim() == 1 and "norm" in name:
                tensor.add_(1.0 - offset)
            if name.endswith(_ADDING):
                tensor.mul_(0.1)
        layer.enorm.weight.fill_(1.0 - offset)
        layer.eh_proj.weight[:, :hidden].add_(torch.eye(hidden))
        layer.post_norm.weight.copy_((text.norm_f if family.startswith("nemotron") else text.norm).weight)
        if not family.startswith("ernie"):
            layer.post_norm.weight.add_(torch.randn(hidden, generator=generator) * 0.1)
    further = {name: one.detach().clone() for name, one in _stored(family, layer, layers).items()}
    norm = "shared_head.norm.weight"
    # Such files have copies of embedding and head. Here they differ, and must not be read.
    for first in [name.removesuffix(norm) for name in further if name.endswith(norm)]:
        for name in ("embed_tokens", "shared_head.head"):
            further[f"{first}{name}.weight"] = torch.randn(text.config.vocab_size, hidden, generator=generator)
    if family == "glm4_moe_lite":  # a second layer with different values
        further |= {name.replace(f".{layers}.", f".{layers + 1}.", 1): -one for name, one in further.items()}
    path = directory / "model.safetensors"
    weights = {
        name: one * (0.1 if name.endswith(_ADDING) else 4.0 if name.endswith(_EMBEDDINGS) else 1.0)
        for name, one in load_file(path).items()
    }
    save_file({**weights, **further}, path, metadata={"format": "pt"})
    if not family.startswith(("qwen3", "glm4v")):
        config, count = json.loads((directory / "config.json").read_text()), 1 + (family == "glm4_moe_lite")
        (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return directory


class PredictionOracle:
    """Reference predictions in float32 with eager attention over the entire text. Angles in float64, except text models."""

    def __init__(self, family: str, directory: Path, specs: Sequence[RotarySpec]) -> None:
        if family == "glm4v_moe":
            self._model = TextLogits(directory).model
        elif family.startswith("nemotron"):
            self._model = reference(directory)
        else:
            self._model = Reference(directory, specs, ["full_attention"]).model
        self._layer, weights = _layer(family, self._model), load_file(directory / "model.safetensors")
        for name, tensor in _stored(family, self._layer, len(_text(self._model).layers)).items():
            tensor.copy_(weights[name])

    @torch.no_grad()
    def proposals(self, token_ids: Sequence[int], count: int) -> list[torch.Tensor]:
        """Return the logits [V] of each of `count` tokens after `token_ids`, whose last token is the model's own prediction."""
        found = []
        states = self._model.model(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state  # [1, T, hidden]
        following = list(token_ids[1:])
        for _ in range(count):
            made = self._run(states, following)
            logits = self._model.lm_head(made[0, -1])
            found.append(logits)
            states = torch.cat((states, made[:, -1:]), dim=1)
            following.append(int(logits.argmax()))
        return found

    def _run(self, states: torch.Tensor, following: list[int]) -> torch.Tensor:
        count, text = states.shape[1], _text(self._model)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        embedded = self._model.get_input_embeddings()(torch.tensor([following]))
        angles = None
        if hasattr(text, "rotary_emb"):
            in_parts = hasattr(self._model.model, "language_model")  # time, height and width
            angles = text.rotary_emb(embedded, position_ids=positions.expand(3, 1, -1) if in_parts else positions)
        return self._layer(
            embedded, states, position_embeddings=angles, attention_mask=mask, position_ids=positions, cache=None
        )
