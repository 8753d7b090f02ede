"""Makes the model every contestant runs: a Llama of 1B shape with random bfloat16 weights and a small byte tokenizer.

Random weights cost what trained ones cost: nothing measured here depends on their values. The tokenizer is a Llama one
(byte fallback, no merges), so that every peer's converter understands it. Needs torch, safetensors and tokenizers.
"""

from __future__ import annotations

import json
from collections import abc
from pathlib import Path
from typing import Any

import torch
from harness.shape import ModelShape
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor

_SPECIAL = ("<unk>", "<s>", "</s>")


def make_checkpoint(directory: Path, shape: ModelShape, seed: int = 0) -> None:
    """Write config.json, model.safetensors and the tokenizer into `directory`; it is complete when config.json is there."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    save_file(dict(_weights(shape, generator)), directory / "model.safetensors", metadata={"format": "pt"})
    make_config(directory, shape)


def make_config(directory: Path, shape: ModelShape) -> None:
    """Only config.json and the tokenizer, for weights that are drawn while they are loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, shape)
    _write_json(directory / "config.json", _config(shape))


def _weights(shape: ModelShape, generator: torch.Generator) -> abc.Iterator[tuple[str, Tensor]]:
    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.02).to(torch.bfloat16)

    def ones() -> Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden)  # [V, D], also the output matrix
    yield "model.norm.weight", ones()
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", ones()
        yield prefix + "post_attention_layernorm.weight", ones()
        for name, (rows, columns) in shape.layer_matrices().items():
            yield f"{prefix}{name}.weight", matrix(rows, columns)


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _write_tokenizer(directory: Path, shape: ModelShape) -> None:
    texts = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    texts += [f"▁filler{index}" for index in range(shape.vocab - len(texts))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts[: shape.vocab])},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "LlamaTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": False,
            "add_eos_token": False,
            "model_max_length": shape.context,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
