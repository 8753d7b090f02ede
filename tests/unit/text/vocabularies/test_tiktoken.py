"""tiktoken and tekken files, compared with tiktoken itself, which mistral-common uses for tekken files too."""

from __future__ import annotations

import tempfile
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from unit_helpers.any_text import ANY_TEXT
from unit_helpers.tiktoken_files import pattern, ranked_tokens, write_tekken, write_tiktoken

from windlass.server.text.tokenizer import Tokenizer

tiktoken = pytest.importorskip("tiktoken")

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
KINDS = {"qwen": "qwen2", "llama3": "llama-bpe", "kimi": "kimi-k2", "tekken": "tekken"}


@cache
def pair(kind: str) -> tuple[Any, int, Tokenizer]:
    """Return tiktoken's encoding, the difference between our ids and its ids, and our tokenizer."""
    words = KINDS[kind]
    tokens = ranked_tokens(words)
    with tempfile.TemporaryDirectory() as folder:
        offset = 0
        if kind == "tekken":
            offset = 10
            write_tekken(Path(folder) / "tekken.json", tokens, SPECIAL, offset)
            tokens = tokens[:-20]
        elif kind == "qwen":
            write_tiktoken(Path(folder) / "qwen.tiktoken", tokens, {"model_type": "qwen"})
        elif kind == "llama3":
            write_tiktoken(Path(folder) / "tokenizer.model", tokens, {"model_type": "llama"})
        else:
            config = {
                "tokenizer_class": "TikTokenTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_kimi.X", None]},
            }
            write_tiktoken(Path(folder) / "tiktoken.model", tokens, {"model_type": "kimi_k2"}, **config)
        ours = Tokenizer.from_directory(Path(folder))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(kind, pat_str=pattern(words), mergeable_ranks=ranks, special_tokens={}), offset, ours


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
def test_ids_text_and_offsets(kind: str, text: str) -> None:
    theirs, offset, ours = pair(kind)
    assume(not any(token in text for token in SPECIAL))
    if kind == "qwen":
        text = unicodedata.normalize("NFC", text)
    wanted = theirs.encode_ordinary(text)
    ids, offsets = ours.encode_with_offsets(text, add_special_tokens=False)
    assert ids == [rank + offset for rank in wanted]
    assert ours.decode(ids) == theirs.decode(wanted) == text
    assert [ours.token_bytes(i) for i in ids] == [theirs.decode_single_token_bytes(rank) for rank in wanted]
    # tiktoken's offset of a token is that of the character in which it begins.
    assert [begin for begin, _ in offsets] == theirs.decode_with_offsets(wanted)[1]


def test_nfc_normalization() -> None:
    theirs, _, ours = pair("qwen")
    assert ours.encode("Gro\u0308ße") == theirs.encode_ordinary("Größe") != theirs.encode_ordinary("Gro\u0308ße")
