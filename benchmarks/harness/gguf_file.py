"""Writes a Llama as a GGUF file, for llama.cpp's quantizer and its benchmarks, with another file's metadata or its own."""

from __future__ import annotations

import json
from collections import abc
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGUFValueType as Type
from torch import Tensor

_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Field(NamedTuple):
    """One entry of the metadata. element: the type of each, of an array."""

    key: str
    value: Any
    kind: Type
    element: Type | None = None


def fields_of(file: Path) -> list[Field]:
    """The metadata of a GGUF file, without the keys that the next writer sets itself."""
    found = []
    for key, field in gguf.GGUFReader(file).fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        several = field.types[0] == Type.ARRAY
        found.append(Field(key, field.contents(), field.types[0], field.types[-1] if several else None))
    return found


def fields_of_checkpoint(directory: Path) -> list[Field]:
    """The same from config.json and tokenizer.json of a Llama whose tokenizer is one of bytes, as harness.checkpoint makes."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    vocabulary = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [_kind_of(piece) for piece in pieces]
    counts = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    numbers = {"rope.freq_base": config["rope_theta"], "attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
    return [
        *(Field(f"llama.{key}", value, Type.UINT32) for key, value in counts.items()),
        *(Field(f"llama.{key}", value, Type.FLOAT32) for key, value in numbers.items()),
        Field("tokenizer.ggml.model", "llama", Type.STRING),
        Field("tokenizer.ggml.tokens", pieces, Type.ARRAY, Type.STRING),
        Field("tokenizer.ggml.scores", [0.0] * len(pieces), Type.ARRAY, Type.FLOAT32),
        Field("tokenizer.ggml.token_type", kinds, Type.ARRAY, Type.INT32),
        Field("tokenizer.ggml.bos_token_id", config["bos_token_id"], Type.UINT32),
        Field("tokenizer.ggml.eos_token_id", config["eos_token_id"], Type.UINT32),
    ]


def _kind_of(piece: str) -> int:
    if piece.startswith("<0x"):
        return int(gguf.TokenType.BYTE)
    known = {"<unk>": gguf.TokenType.UNKNOWN, "<s>": gguf.TokenType.CONTROL, "</s>": gguf.TokenType.CONTROL}
    return int(known.get(piece, gguf.TokenType.NORMAL))


def write_gguf(
    weights: abc.Mapping[str, Tensor],
    config: abc.Mapping[str, int],
    fields: abc.Iterable[Field],
    target: Path,
    *,
    wide: bool = True,
) -> None:
    """A GGUF of a Llama, for llama.cpp: its rows of queries and keys hold pairs (2j, 2j + 1). wide: float32, else float16."""
    writer = gguf.GGUFWriter(target, "llama")
    for field in fields:
        writer.add_key_value(field.key, field.value, field.kind, sub_type=field.element)
    writer.add_uint32("general.file_type", 0 if wide else 1)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in weights.items():
        rows = tensor.float().numpy()
        parts = name.removesuffix(".weight").split(".")
        if parts[-1] in heads:
            shape = rows.shape
            rows = rows.reshape(heads[parts[-1]], 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
        known = _OUTER.get(name) or f"blk.{parts[2]}.{_INNER['.'.join(parts[3:])]}.weight"
        halved = rows.ndim > 1 and not wide
        writer.add_tensor(known, np.ascontiguousarray(rows.astype(np.float16) if halved else rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
