"""References for rotations that change with the length of a text, without code of Windlass.

`Uncached`: transformers without a cache, frequencies injected, angles in float64. `cached_by_transformers`: its ordinary
cached generation. `UnrotatedCache`: Llama in plain torch with a cache of unrotated keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.loaded import loaded
from safetensors.torch import load_file
from torch import Tensor

# Frequencies in radians per token, float64 [d/2], by number of tokens.
Frequencies = Callable[[int], Tensor]


def plain_frequencies(theta: float, dim: int) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def dynamic_frequencies(theta: float, dim: int, factor: float, trained: int, *, grid: bool) -> Frequencies:
    """Dynamic NTK for the exact length, or for the next trained * 2^(k/4)."""
    points = [trained * 2 ** (k / 4) for k in range(64)]

    def at(length: int) -> Tensor:
        reach: float = max(length, trained)
        if grid:
            reach = next(point for point in points if point >= length)
        stretch = factor * reach / trained - (factor - 1)
        return plain_frequencies(theta * stretch ** (dim / (dim - 2)), dim)

    return at


def longrope_frequencies(theta: float, dim: int, scaling: dict[str, Any]) -> Frequencies:
    """The short list up to the original length, the long one after it."""
    plain = plain_frequencies(theta, dim)
    short, long = (torch.tensor(scaling[name], dtype=torch.float64) for name in ("short_factor", "long_factor"))
    return lambda length: plain / (short if length <= scaling["original_max_position_embeddings"] else long)


def longrope_attention_factor(scaling: dict[str, Any]) -> float:
    return math.sqrt(1 + math.log(scaling["factor"]) / math.log(scaling["original_max_position_embeddings"]))


class Uncached:
    """transformers model without a cache, with given frequencies."""

    def __init__(self, directory: Path, attention_factor: float = 1.0) -> None:
        self.model = loaded(directory)
        self._inv_freq = torch.empty(0)

        def rotary(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
            angle = position_ids[..., None].double() * self._inv_freq
            angle = torch.cat((angle, angle), dim=-1)
            return (angle.cos() * attention_factor).float(), (angle.sin() * attention_factor).float()

        self.model.model.rotary_emb.forward = rotary

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], inv_freq: Tensor) -> Tensor:
        """Return [T, V] of the text under one set of frequencies."""
        self._inv_freq = inv_freq
        ids = torch.tensor([list(token_ids)])
        return self.model(ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits[0]

    def at_each_length(self, token_ids: Sequence[int], frequencies: Frequencies) -> Tensor:
        """Return [T, V]: row i from a pass over i + 1 tokens under the frequencies of i + 1 tokens."""
        rows: list[Tensor] = []
        while len(rows) < len(token_ids):
            first = len(rows)
            inv_freq, end = frequencies(first + 1), first + 1
            while end < len(token_ids) and torch.equal(frequencies(end + 1), inv_freq):
                end += 1
            rows += self.logits(token_ids[:end], inv_freq)[first:]
        return torch.stack(rows)


@torch.no_grad()
def cached_by_transformers(directory: Path, token_ids: Sequence[int], prompt: int) -> Tensor:
    """Return [T, V]: the prompt in one pass, then single tokens over transformers' cache, like `generate`."""
    # A new model, because the module stores the last dynamic frequencies.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cache = transformers.DynamicCache(config=model.config)
    ids, rows = torch.tensor([list(token_ids)]), []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(token_ids)))]:
        positions = torch.arange(start, end)[None]
        answer = model(ids[:, start:end], position_ids=positions, past_key_values=cache, use_cache=True)
        rows.append(answer.logits[0])
    return torch.cat(rows)


class UnrotatedCache:
    """Llama in float64, one token at a time, with a cache of unrotated keys that each step rotates by its frequencies."""

    def __init__(self, directory: Path, attention_factor: float = 1.0) -> None:
        self._config = transformers.AutoConfig.from_pretrained(directory)
        self._weights = {name: w.double() for name, w in load_file(directory / "model.safetensors").items()}
        self._attention_factor = attention_factor

    def logits(self, token_ids: Sequence[int], frequencies: Frequencies, prompt: int = 1) -> Tensor:
        """Return [T, V] float32: the first `prompt` tokens under the frequencies of that length, each later one under its own."""
        layers = self._config.num_hidden_layers
        self._keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(layers)]
        steps = [self._step(token, frequencies(max(i + 1, prompt))) for i, token in enumerate(token_ids)]
        return torch.stack(steps).float()

    def _step(self, token: int, inv_freq: Tensor) -> Tensor:
        w, config = self._weights, self._config
        x = w["model.embed_tokens.weight"][token]
        for i in range(config.num_hidden_layers):
            name = f"model.layers.{i}."
            x = x + self._attend(i, self._norm(x, w[name + "input_layernorm.weight"]), inv_freq)
            y = self._norm(x, w[name + "post_attention_layernorm.weight"])
            gate, up = w[name + "mlp.gate_proj.weight"] @ y, w[name + "mlp.up_proj.weight"] @ y
            x = x + w[name + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return w["lm_head.weight"] @ self._norm(x, w["model.norm.weight"])

    def _attend(self, layer: int, x: Tensor, inv_freq: Tensor) -> Tensor:
        config, dim = self._config, self._config.head_dim
        q, k, v = (
            (self._weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"] @ x).view(-1, dim) for part in "qkv"
        )
        self._keys[layer].append(k)
        self._values[layer].append(v)
        repeat = config.num_attention_heads // config.num_key_value_heads
        keys = torch.stack(self._keys[layer]).repeat_interleave(repeat, dim=1)  # [S, H, D]
        values = torch.stack(self._values[layer]).repeat_interleave(repeat, dim=1)
        angle = torch.arange(len(keys), dtype=torch.float64)[:, None] * inv_freq  # [S, D/2]
        turned = self._rotate(keys, angle[:, None])
        query = self._rotate(q, angle[-1])
        scores = (turned * query).sum(-1) * dim**-0.5 * self._attention_factor**2  # [S, H]
        mixed = (scores.softmax(dim=0)[..., None] * values).sum(0)  # [H, D]
        return self._weights[f"model.layers.{layer}.self_attn.o_proj.weight"] @ mixed.flatten()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean() + self._config.rms_norm_eps) * weight

    @staticmethod
    def _rotate(x: Tensor, angle: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CachedInOnePass:
    """Result of `cached_by_transformers` under frequencies that depend on the length, in one pass over the text.

    There the key at position i is rotated once, by the frequencies of i + 1 tokens (of the prompt's length, inside the
    prompt), and so is the query. So one pass that rotates each position by its own frequencies sees the same numbers.
    """

    def __init__(self, directory: Path) -> None:
        self.model = loaded(directory, "sdpa")

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int], frequencies: Frequencies, prompt: int) -> Tensor:
        """Return [T, hidden] after the last norm."""
        inv_freq = torch.stack([frequencies(max(i + 1, prompt)) for i in range(len(token_ids))])  # [T, d/2]

        def rotary(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
            angle = position_ids[..., None].double() * inv_freq
            angle = torch.cat((angle, angle), dim=-1)
            return angle.cos().float(), angle.sin().float()

        self.model.model.rotary_emb.forward = rotary
        ids = torch.tensor([list(token_ids)])
        return self.model.model(ids, use_cache=False).last_hidden_state[0]
