"""Families that transformers does not support: tiny random checkpoints, and their logits by float32 formulas.

Written from the code published with the weights, independent of the tested decoder: one sequence, no cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, VOCAB, LAYERS = 64, 4, 2, 16, 96, 128, 4

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_CHATGLM = {
    "model_type": "chatglm",
    "padded_vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": WIDTH,
    "num_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_channels": DIM,
    "multi_query_attention": True,
    "multi_query_group_num": KV_HEADS,
    "seq_length": 256,
    "layernorm_epsilon": 1e-6,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2": ("InternLM2", {**_COMMON, "model_type": "internlm2", "num_key_value_heads": KV_HEADS, "bias": True}),
    "internlm2_plain": (
        "InternLM2",
        {**_COMMON, "model_type": "internlm2", "num_key_value_heads": KV_HEADS, "bias": False},
    ),
    "baichuan": ("Baichuan", {**_COMMON, "model_type": "baichuan"}),
    "baichuan2": ("Baichuan", {**_COMMON, "model_type": "baichuan", "z_loss_weight": 0}),
    "chatglm": ("ChatGLMModel", {**_CHATGLM, "add_qkv_bias": True, "rope_ratio": 1.0}),
    "chatglm_every_head": (
        "ChatGLMModel",
        {**_CHATGLM, "multi_query_attention": False, "add_qkv_bias": False, "add_bias_linear": True},
    ),
}


def architecture(prefix: str) -> str:
    return prefix if prefix.endswith("Model") else f"{prefix}ForCausalLM"


# Without rotation, included in `tiny_unrotated`.
UNROTATED: dict[str, tuple[str, dict[str, Any]]] = {
    "baichuan_13b": (
        "Baichuan",
        {**_COMMON, "model_type": "baichuan", "hidden_size": 320, "num_attention_heads": 40, "z_loss_weight": 0},
    ),
}
ARCHITECTURES = {architecture(prefix) for prefix, _ in FAMILIES.values()}


def save(family: str, directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Return a random checkpoint; vectors are random too, so that errors with biases and norms are visible."""
    prefix, config = (FAMILIES | UNROTATED)[family]
    config = {**config, "architectures": [architecture(prefix)], **overrides}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _SHAPES[prefix](config).items():
        drawn = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and name.endswith(".weight")
        tensors[name] = drawn * (0.3 if len(shape) == 1 else 0.8 * shape[-1] ** -0.5) + (1.0 if norm else 0.0)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class PlainModel:
    """Load a model that `save` wrote."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")

    def logits(self, token_ids: Sequence[int], inv_freq: Tensor) -> Tensor:
        """Return logits [T, V] float32. inv_freq: [d/2] float64."""
        angles = torch.arange(len(token_ids), dtype=torch.float64)[:, None] * inv_freq
        rotation = angles.cos().float(), angles.sin().float()  # [T, d/2] each
        family = self.config["architectures"][0].removesuffix("ForCausalLM")
        return _FORWARD[family](self.config, self.tensors, torch.tensor(list(token_ids)), *rotation)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _product(tensors: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D]; dimension j is paired with j + D / 2."""
    one, two = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _attended(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> Tensor:
    """q: [T, H, D], k and v: [T, G, D]. Returns [T, H * D]; H / G neighbouring query heads share a key head. slopes: [H]."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    if slopes is not None:
        scores = scores + slopes[:, None, None] * torch.arange(len(k))
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def _internlm2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    rows = (HEADS + 2 * KV_HEADS) * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.tok_embeddings.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        shapes |= {
            f"{layer}attention_norm.weight": (HIDDEN,),
            f"{layer}attention.wqkv.weight": (rows, HIDDEN),
            f"{layer}attention.wo.weight": (HIDDEN, HEADS * DIM),
            f"{layer}ffn_norm.weight": (HIDDEN,),
            f"{layer}feed_forward.w1.weight": (WIDTH, HIDDEN),
            f"{layer}feed_forward.w2.weight": (HIDDEN, WIDTH),
            f"{layer}feed_forward.w3.weight": (WIDTH, HIDDEN),
        }
        if config["bias"]:
            shapes |= {f"{layer}attention.wqkv.bias": (rows,), f"{layer}attention.wo.bias": (HIDDEN,)}
    return shapes


def _internlm2(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Split fused rows: for each key head its queries, its key, its value."""
    x = tensors["model.tok_embeddings.weight"][ids]
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        normed = _rms(x, tensors[f"{layer}attention_norm.weight"])
        qkv = _product(tensors, f"{layer}attention.wqkv", normed).view(len(ids), KV_HEADS, HEADS // KV_HEADS + 2, DIM)
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        attended = _attended(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        x = x + _product(tensors, f"{layer}attention.wo", attended)
        normed = _rms(x, tensors[f"{layer}ffn_norm.weight"])
        gate, up = (_product(tensors, f"{layer}feed_forward.{name}", normed) for name in ("w1", "w3"))
        x = x + _product(tensors, f"{layer}feed_forward.w2", F.silu(gate) * up)
    return _product(tensors, "output", _rms(x, tensors["model.norm.weight"]))


def _slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes: for n = 2^k, n steps down to 2^-8; else those of the lower power and every second of its double."""
    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
    return torch.cat((_slopes(power), _slopes(2 * power)[0::2][: heads - power]))


def _baichuan_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
    }
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}self_attn.W_pack.weight": (3 * hidden, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}mlp.gate_proj.weight": (WIDTH, hidden),
            f"{layer}mlp.up_proj.weight": (WIDTH, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, WIDTH),
        }
    return shapes


def _baichuan(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Baichuan: queries, keys and values in one product; the head of version 2 has normalized rows. Models with 40 heads do not
    rotate, but add a slope per head times the key's position to scores."""
    heads = config["num_attention_heads"]
    slopes = None if heads == HEADS else _slopes(heads)
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        packed = _product(tensors, f"{layer}self_attn.W_pack", _rms(x, tensors[f"{layer}input_layernorm.weight"]))
        q, k, v = packed.view(len(ids), 3, heads, -1).unbind(1)
        if slopes is None:
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        x = x + _product(tensors, f"{layer}self_attn.o_proj", _attended(q, k, v, slopes))
        normed = _rms(x, tensors[f"{layer}post_attention_layernorm.weight"])
        gate, up = (_product(tensors, f"{layer}mlp.{name}_proj", normed) for name in ("gate", "up"))
        x = x + _product(tensors, f"{layer}mlp.down_proj", F.silu(gate) * up)
    head = tensors["lm_head.weight"]
    if "z_loss_weight" in config:
        head = head / head.norm(dim=1, keepdim=True)
    return _rms(x, tensors["model.norm.weight"]) @ head.T


def _chatglm_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = KV_HEADS if config["multi_query_attention"] else HEADS
    rows = (HEADS + 2 * groups) * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.output_layer.weight": (VOCAB, HIDDEN),
    }
    for layer in (f"transformer.encoder.layers.{i}." for i in range(config["num_layers"])):
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}self_attention.query_key_value.weight": (rows, HIDDEN),
            f"{layer}self_attention.dense.weight": (HIDDEN, HIDDEN),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}mlp.dense_h_to_4h.weight": (2 * WIDTH, HIDDEN),
            f"{layer}mlp.dense_4h_to_h.weight": (HIDDEN, WIDTH),
        }
        if config.get("add_qkv_bias") or config.get("add_bias_linear"):
            shapes[f"{layer}self_attention.query_key_value.bias"] = (rows,)
        if config.get("add_bias_linear"):
            shapes |= {
                f"{layer}self_attention.dense.bias": (HIDDEN,),
                f"{layer}mlp.dense_h_to_4h.bias": (2 * WIDTH,),
                f"{layer}mlp.dense_4h_to_h.bias": (HIDDEN,),
            }
    return shapes


def _chatglm(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """ChatGLM: the first half of each head rotates, dimension 2j with 2j + 1; gate and up are one product, the gate first."""
    groups = KV_HEADS if config["multi_query_attention"] else HEADS

    def rotated(x: Tensor) -> Tensor:
        half = DIM // 2
        pairs = torch.view_as_complex(x[..., :half].reshape(len(ids), -1, half // 2, 2).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(2)
        return torch.cat((turned, x[..., half:]), -1)

    x = tensors["transformer.embedding.word_embeddings.weight"][ids]
    for layer in (f"transformer.encoder.layers.{i}." for i in range(config["num_layers"])):
        normed = _rms(x, tensors[f"{layer}input_layernorm.weight"])
        mixed = _product(tensors, f"{layer}self_attention.query_key_value", normed)
        q, k, v = (
            part.view(len(ids), -1, DIM) for part in mixed.split((HEADS * DIM, groups * DIM, groups * DIM), dim=-1)
        )
        x = x + _product(tensors, f"{layer}self_attention.dense", _attended(rotated(q), rotated(k), v))
        normed = _rms(x, tensors[f"{layer}post_attention_layernorm.weight"])
        gate, up = _product(tensors, f"{layer}mlp.dense_h_to_4h", normed).chunk(2, dim=-1)
        x = x + _product(tensors, f"{layer}mlp.dense_4h_to_h", F.silu(gate) * up)
    return _product(tensors, "transformer.output_layer", _rms(x, tensors["transformer.encoder.final_layernorm.weight"]))


_SHAPES = {"InternLM2": _internlm2_shapes, "Baichuan": _baichuan_shapes, "ChatGLMModel": _chatglm_shapes}
_FORWARD = {"InternLM2": _internlm2, "Baichuan": _baichuan, "ChatGLMModel": _chatglm}
