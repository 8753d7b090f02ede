"""Small vocabularies as GGUF metadata, key -> plain value."""

from __future__ import annotations

import json
from typing import Any

from helpers import toy_tokenizers as toys

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level(**fields: Any) -> dict[str, Any]:
    """Return the vocabulary of `toy_tokenizers.byte_level`. fields: keys below tokenizer.ggml, None to omit one."""
    backend = toys.byte_level()
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {"<|bos|>": CONTROL, "<|eos|>": CONTROL, "<tool>": USER_DEFINED}
    own: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [kinds.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": vocab["<|bos|>"],
        "eos_token_id": vocab["<|eos|>"],
        "add_bos_token": True,
    }
    return metadata(own | fields)


def scored(**fields: Any) -> dict[str, Any]:
    """Return a SentencePiece vocabulary: pieces scored by their order, bytes, and a user-defined token."""
    pieces = (
        "▁ e t a o i n s h r d l u . , ! ? ▁t he ▁a in re on ▁the er nd ▁and en or es ▁is ed ing ▁h ▁he at an it st "
        "ll ▁w el ell ▁hell ▁hello lo ▁▁ ▁▁▁▁ ▁▁▁ \n \n\n é ü 日 本 日本"
    ).split(" ")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|user|>", "  "]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), CONTROL, USER_DEFINED]
    own: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0, -1000.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return metadata(own | fields)


def metadata(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the full keys of fields below tokenizer.ggml, without those that are None."""
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
