"""Tokenizers converted from GGUF metadata, compared with the original tokenizers and with a simple implementation of merging."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from helpers import toy_tokenizers as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from unit_helpers import gguf_vocabularies as vocabularies

from windlass.server.text.chat_template import ChatTemplate
from windlass.server.text.tokenizer import Tokenizer
from windlass.server.text.vocabularies.conversion import gguf_tokenizer_files

TEXTS = [
    "",
    "hello world",
    " leading  spaces and\n\n\ttabs ",
    "Größe 東京 日本 😀 é",
    "<|bos|>hello<tool></s><|user|> the end<|eos|> a",
    "don't stop 12345 and the hello     the",
    "<0x0A> ▁ <unk>",
]


def save(metadata: dict[str, Any], directory: Path) -> Tokenizer:
    files = gguf_tokenizer_files(metadata, "toy.gguf")
    (directory / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(files.config, encoding="utf-8")
    return Tokenizer.from_directory(directory)


@cache
def made_of(make: Callable[[], dict[str, Any]]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(gguf_tokenizer_files(make(), "toy.gguf").tokenizer))


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("the and's 'LL12345 \n\t<|bos|>tool東ß😀.,!"), max_size=40))
def test_byte_level_ids_equal_the_original(text):
    made = made_of(vocabularies.byte_level)
    assert made.encode(text) == toys.byte_level().encode(text).ids
    assert made.decode(made.encode(text)) == toys.byte_level().decode(made.encode(text))


def merged_by_hand(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's merging: the best neighbours first, bytes for the remaining characters."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        found = [
            (-scores[ids[parts[i] + parts[i + 1]]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ids
        ]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        index
        for part in parts
        for index in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


@settings(max_examples=100)
@given(st.text(alphabet=st.sampled_from("thean dhello is\n日本é😀x."), max_size=30))
def test_scored_ids_equal_simple_merging(text):
    text = text.replace("  ", " \n ").replace("  ", "")  # two spaces are a user-defined token, which is found first
    expected = merged_by_hand(vocabularies.scored(), " " + text) if text else []
    assert made_of(vocabularies.scored).encode(text, add_special_tokens=False) == expected


def test_space_is_inserted_after_special_tokens(tmp_path):
    metadata = vocabularies.scored()
    made = save(metadata, tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = made.encode("the<|user|>hello")
    assert [tokens[index] for index in ids] == ["<s>", "▁the", "<|user|>", "▁hello"]
    assert made.decode(ids) == "the hello"


def test_add_space_prefix_false(tmp_path):
    metadata = vocabularies.scored(add_space_prefix=False, add_bos_token=False)
    made = save(metadata, tmp_path)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[index] for index in made.encode("hello the")] == ["he", "ll", "o", "▁the"]
    assert made.decode(made.encode("hello the")) == "hello the"


@pytest.mark.parametrize("metadata", [vocabularies.byte_level(), vocabularies.scored()], ids=["byte_level", "scored"])
def test_transformers_reads_the_files_equally(tmp_path, metadata):
    ours = save(metadata, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) == len(metadata["tokenizer.ggml.tokens"])
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "▁the", "</s>"]),
        ({"add_bos_token": False}, ["▁the"]),
        ({}, ["<s>", "▁the"]),
    ],
)
def test_bos_and_eos(tmp_path, fields, expected):
    metadata = vocabularies.scored(**fields)
    tokens = metadata["tokenizer.ggml.tokens"]
    made = save(metadata, tmp_path)
    assert [tokens[index] for index in made.encode("the")] == expected
    assert [tokens[index] for index in made.encode("the", add_special_tokens=False)] == ["▁the"]


def test_special_and_user_defined_tokens(tmp_path):
    made = save(vocabularies.byte_level(), tmp_path)
    names = {made.backend.id_to_token(index) for index in made.special_token_ids}
    assert names == {"<|bos|>", "<|eos|>"}
    text = "<|bos|>a <tool>b<|eos|>"
    ids = made.encode(text, add_special_tokens=False)
    assert made.decode(ids) == "a <tool>b"
    assert made.decode(ids, skip_special_tokens=False) == text
    assert made.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_ordinary_token_as_padding_is_not_special(tmp_path):
    metadata = vocabularies.byte_level()
    metadata["tokenizer.ggml.padding_token_id"] = metadata["tokenizer.ggml.tokens"].index("!")
    made = save(metadata, tmp_path)
    assert "pad_token" not in made.special_tokens
    assert made.decode(made.encode("stop!")) == "stop!"


def test_absent_special_token_written_as_minus_one():
    """As an unsigned integer of 32 bits."""
    metadata = vocabularies.byte_level(padding_token_id=2**32 - 1, eot_token_id=2**32 - 1)
    absent = vocabularies.byte_level(padding_token_id=None, eot_token_id=None)
    assert gguf_tokenizer_files(metadata, "x.gguf") == gguf_tokenizer_files(absent, "x.gguf")


def test_bos_and_eos_are_special_without_token_types(tmp_path):
    metadata = vocabularies.byte_level(token_type=None)
    made = save(metadata, tmp_path)
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    assert made.special_token_ids == {bos, eos}
    assert made.encode("<|eos|>") == [bos, eos]


def test_phi3_tokens_include_the_white_space_after_them(tmp_path):
    metadata = vocabularies.scored() | {"general.name": "Phi-3 mini"}
    tokens = metadata["tokenizer.ggml.tokens"]
    made = save(metadata, tmp_path)
    assert [tokens[index] for index in made.encode("<|user|>\n the")] == ["<s>", "<|user|>", "▁the"]
    assert [tokens[index] for index in made.encode("<s>\nthe")] == ["<s>", "<s>", "▁", "\n", "t", "he"]


def test_chat_templates(tmp_path):
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = vocabularies.byte_level() | {"tokenizer.chat_template": source}
    made = save(metadata, tmp_path)
    text = ChatTemplate(made.chat_template, made.special_tokens).render([{"role": "user", "content": "hello"}])
    assert text == "<|bos|>hello<|eos|>"
    ids = made.encode(text, add_special_tokens=False)
    assert ids.count(made.bos_token_id) == 1
    both = metadata | {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    assert save(both, tmp_path).chat_templates == {"default": source, "tool_use": "tools"}


def test_file_without_word_rules_uses_the_default_with_a_notice():
    metadata = vocabularies.byte_level(pre=None)
    files = gguf_tokenizer_files(metadata, "old.gguf")
    named = gguf_tokenizer_files(metadata | {"tokenizer.ggml.pre": "default"}, "old.gguf")
    assert files.tokenizer == named.tokenizer
    assert named.notices == ()
    (notice,) = files.notices
    assert notice.startswith("old.gguf does not name its word rules")


def test_empty_token_gets_a_name():
    metadata = vocabularies.byte_level()
    metadata["tokenizer.ggml.tokens"].append("")
    metadata["tokenizer.ggml.token_type"].append(vocabularies.UNUSED)
    vocab = json.loads(gguf_tokenizer_files(metadata, "toy.gguf").tokenizer)["model"]["vocab"]
    last = len(vocab) - 1
    assert vocab[f"[EMPTY_{last}]"] == last
