"""A small transformer whose tokens learn their places in one of four ways: rotation, sinusoids, a learned table, or not at all.

Responsible for the network and for writing the rotary one as a checkpoint that the server reads. Rotation, its angles and its
frequencies are the project's own functions; the table of sinusoids is the gallery's. It knows no data and no training.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.kernels.torch.reference import rotary_angles, rotate_half_split
from windlass.lab.encoding_formulas import sinusoids

Positions = Literal["rotary", "sinusoidal", "learned", "none"]
POSITIONS: tuple[Positions, ...] = ("rotary", "sinusoidal", "learned", "none")
VOCABULARY = 257  # bytes, and one token that begins a text
BEGINNING = 256
WIDTH, HEADS, LAYERS, INNER, THETA, EPSILON = 96, 3, 3, 256, 10000.0, 1e-5
HEAD_DIM = WIDTH // HEADS
STD = WIDTH**-0.5  # scores and logits of size one to begin with, so that heads differ from the first step on


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """x: [B, T, width]. turns: cos and sin [B * T, head_dim / 2], or None where nothing is turned."""
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch * length, HEADS, HEAD_DIM) for p in (self.q_proj, self.k_proj, self.v_proj))
        if turns is not None:
            q, k = rotate_half_split(q, *turns), rotate_half_split(k, *turns)
        q, k, v = (t.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(WIDTH, eps=EPSILON) for _ in range(2))
        self.self_attn, self.mlp = Attention(causal), FeedForward()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class SmallTransformer(nn.Module):
    """Bytes [B, T] to states [B, T, width].

    trained_len: tokens of a training text. longest: rows of the learned table; those past trained_len are never trained.
    causal: a token sees those before it only (a language model), or all (a classifier).
    """

    def __init__(self, positions: Positions, trained_len: int, longest: int, causal: bool) -> None:
        super().__init__()
        self.positions, self.trained_len = positions, trained_len
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(causal) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.base = RotaryBase(rope_theta=THETA, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM, trained_len=trained_len)
        for name, matrix in self.named_parameters():
            if matrix.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(matrix, std=STD / math.sqrt(2 * LAYERS) if deep else STD)
        if positions == "learned":
            self.table = nn.Parameter(STD * torch.randn(longest, WIDTH))
        elif positions == "sinusoidal":
            # As large as an embedding: sines of size one would drown the tokens.
            fixed = STD * sinusoids(np.arange(float(longest)), WIDTH)
            self.register_buffer("table", torch.from_numpy(fixed).float(), persistent=False)

    def forward(self, ids: Tensor, scaling: RopeScaling | None = None) -> Tensor:
        """scaling: of the rotation, where there is one; None: as trained."""
        batch, length = ids.shape
        x, turns = self.embed_tokens(ids), None
        if self.positions in ("learned", "sinusoidal"):
            x = x + self.table[:length]
        elif self.positions == "rotary":
            spec = resolve(scaling or RopeScaling(), self.base, length)
            frequencies = torch.tensor(spec.inv_freq, dtype=torch.float64)[None, None]
            places = torch.arange(length).repeat(batch)
            cos, sin = rotary_angles(frequencies, torch.zeros_like(places), places)
            turns = cos[0] * spec.rotary_scale, sin[0] * spec.rotary_scale
        for layer in self.layers:
            x = layer(x, turns)
        return self.norm(x)

    def losses(self, ids: Tensor, scaling: RopeScaling | None = None) -> Tensor:
        """Of a language model: nats of each next byte, [B, T - 1]; the output matrix is the embedding."""
        logits = F.linear(self(ids[:, :-1], scaling), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def save_checkpoint(model: SmallTransformer, folder: Path) -> None:
    """The rotary language model as a Llama that `windlass serve` reads, with a tokenizer of bytes."""
    if model.positions != "rotary":
        raise ValueError("only the rotary model is one that the server reads")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": model.trained_len,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": BEGINNING,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "model_max_length": model.trained_len,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b, written in GPT-2's letters for bytes: printable bytes as themselves, the others from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    letters = {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>"])
    return tokenizer
