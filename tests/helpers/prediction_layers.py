"""Tiny random models with a layer that predicts a token further, and what transformers makes of it.

The layer is transformers' own (`MtpLayer`), around a layer of the model's class, under the names that publishers' files have.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.loaded import loaded
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from windlass.engine.rotary.scaling import RotarySpec

_ADDING = ("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj.weight", "down_proj")  # to the stream
_OWN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def _beside(name: str) -> str:
    """As Qwen 3.5 has them: beside the model's layers."""
    part, _, rest = name.partition(".")
    return f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{_OWN[part]}.{rest}"


def _behind(layers: int) -> Callable[[str], str]:
    """As DeepSeek V3 has them: as one layer more."""

    def renamed(name: str) -> str:
        part, _, rest = name.partition(".")
        own = {"mtp_block": rest, "post_norm": f"shared_head.norm.{rest}"}.get(part, name)
        return f"model.layers.{layers}.{own}"

    return renamed


def _names(family: str, layers: int) -> Callable[[str], str]:
    return _beside if family.startswith("qwen3") else _behind(layers)


def _layer(model: Any) -> MtpLayer:
    """Uninitialised: a layer that attends, with experts where the model has any."""
    layers = model.model.layers
    attends = next(layer for layer in reversed(layers) if hasattr(layer, "self_attn"))
    like = [index for index, layer in enumerate(layers) if hasattr(layer.mlp, "experts")] or [len(layers) - 1]
    config = copy.deepcopy(model.config)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * len(layers)
    return MtpLayer(config, type(attends), type(attends.input_layernorm), like[-1])


def make_predicting(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of the family with such a layer to `directory`.

    What its layers add to the stream is little. So the next token depends on the last one for the most part, and the layer, which
    joins little of a state to that token's embedding, is often right.
    """
    make_model(family, directory, seed=seed, **overrides)
    model = loaded(directory)
    generator = torch.Generator().manual_seed(seed + 1)
    layer, hidden = _layer(model), model.config.hidden_size
    offset = float(family.startswith("qwen3"))  # norms that multiply by 1 + w
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.02))
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(1.0 - offset)
            if name.endswith(_ADDING):
                parameter.mul_(0.1)
        layer.enorm.weight.fill_(1.0 - offset)
        layer.eh_proj.weight[:, :hidden].add_(torch.eye(hidden))
        layer.post_norm.weight.copy_(model.model.norm.weight)
    names = _names(family, model.config.num_hidden_layers)
    further = {names(name): one.detach().clone() for name, one in layer.state_dict().items()}
    path = directory / "model.safetensors"
    scales = {"model.embed_tokens.weight": 4.0}
    weights = {
        name: one * (0.1 if name.endswith(_ADDING) else scales.get(name, 1.0)) for name, one in load_file(path).items()
    }
    save_file({**weights, **further}, path, metadata={"format": "pt"})
    if not family.startswith("qwen3"):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return directory


class PredictionOracle:
    """What the layer predicts: in float32 and eager, over the whole text each time, with angles in float64."""

    def __init__(self, family: str, directory: Path, specs: Sequence[RotarySpec]) -> None:
        self._model = Reference(directory, specs, ["full_attention"]).model
        self._layer = _layer(self._model)
        names, weights = (
            _names(family, self._model.config.num_hidden_layers),
            load_file(directory / "model.safetensors"),
        )
        self._layer.load_state_dict({name: weights[names(name)] for name in self._layer.state_dict()})

    @torch.no_grad()
    def proposals(self, token_ids: Sequence[int], count: int) -> list[torch.Tensor]:
        """The logits [V] of so many tokens behind the one that the model itself draws behind all but the last of `token_ids`."""
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
        count = states.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        embedded = self._model.get_input_embeddings()(torch.tensor([following]))
        angles = self._model.model.rotary_emb(embedded, position_ids=positions)
        return self._layer(
            embedded, states, position_embeddings=angles, attention_mask=mask, position_ids=positions, cache=None
        )
