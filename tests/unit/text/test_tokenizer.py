"""Tokenizer of a directory, compared with transformers; errors for broken directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import toy_tokenizers as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast

from windlass.engine.errors import LoadError, RequestError
from windlass.server.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "hello world",
    " leading  spaces ",
    "Größe 東京 😀\n\tx",
    "<|bos|>hello<tool></s><extra>",
    "a<|eos|> b",
    "don't stop",
]


def write(directory: Path, name: str, value: object) -> None:
    (directory / name).write_text(json.dumps(value), encoding="utf-8")


def reference(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(directory)


def assert_same(directory: Path) -> Tokenizer:
    ours, theirs = Tokenizer.from_directory(directory), reference(directory)
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.backend.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    return ours


@pytest.mark.parametrize("name", sorted(toys.ALL))
def test_tokenizer_json_alone(tmp_path, name):
    assert_same(toys.save(toys.ALL[name](), tmp_path))


def test_current_configuration(tmp_path):
    toys.save(toys.byte_level(), tmp_path)
    last = toys.byte_level().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eos|>", **flags, "special": True},
        "pad_token": None,
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(last + 1): {"content": "<second>", **flags, "special": False},
            str(last): {"content": "<extra>", **flags, "special": True},
        },
        "additional_special_tokens": ["<nameless>", "<extra>"],
        "image_token": "<image>",
        "model_max_length": 1000000000000000019884624838656,
        "chat_template": "{{ messages }}",
    }
    write(tmp_path, "tokenizer_config.json", config)
    write(tmp_path, "special_tokens_map.json", {"bos_token": "ignored"})
    ours = assert_same(tmp_path)
    assert ours.special_tokens["image_token"] == "<image>"
    assert ours.chat_template == "{{ messages }}"
    assert ours.backend.token_to_id("<extra>") == last
    assert ours.decode(ours.encode("x<extra><second>")) == "x<second>"


def test_legacy_configuration(tmp_path):
    toys.save(toys.llama_style(), tmp_path)
    last = toys.llama_style().get_vocab_size()
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<wrong>", "eos_token": "</s>"})
    write(
        tmp_path,
        "special_tokens_map.json",
        {
            "bos_token": {
                "content": "<s>",
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            },
            "pad_token": "<extra>",
            "additional_special_tokens": ["<more>"],
        },
    )
    write(tmp_path, "added_tokens.json", {"<extra>": last, "<plain>": last + 1})
    ours = assert_same(tmp_path)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<extra>"}


def test_truncation_and_padding_are_ignored(tmp_path):
    backend = toys.copy_of(toys.byte_level())
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_token="<|eos|>")
    toys.save(backend, tmp_path)
    ids = Tokenizer.from_directory(tmp_path).encode("one two three four five six seven eight nine ten eleven")
    assert len(ids) > 16
    assert ids == toys.byte_level().encode("one two three four five six seven eight nine ten eleven").ids


@pytest.mark.parametrize("form", ["list", "dict"])
def test_named_chat_templates(tmp_path, form):
    toys.save(toys.byte_level(), tmp_path)
    named = {"default": "D", "tool_use": "T"}
    write(
        tmp_path,
        "tokenizer_config.json",
        {"chat_template": [{"name": k, "template": v} for k, v in named.items()] if form == "list" else named},
    )
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.chat_template == "D" and ours.chat_templates == named
    theirs = reference(tmp_path)
    for tools in (None, [{"type": "function"}]):
        assert ours.template_for(bool(tools)) == theirs.get_chat_template(tools=tools) == ("T" if tools else "D")
    ours.tool_template = None
    assert ours.template_for(True) == "D"


def test_chat_template_files_in_order_of_precedence(tmp_path):
    toys.save(toys.byte_level(), tmp_path)
    assert Tokenizer.from_directory(tmp_path).chat_template is None
    write(tmp_path, "chat_template.json", {"chat_template": "from json"})
    assert Tokenizer.from_directory(tmp_path).chat_template == "from json"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "from config"})
    assert Tokenizer.from_directory(tmp_path).chat_template == "from config"
    (tmp_path / "chat_template.jinja").write_text("from jinja", encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).chat_template == "from jinja" == reference(tmp_path).chat_template
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.chat_templates == {"default": "from jinja", "tool_use": "tools"} == reference(tmp_path).chat_template


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "copy it from the model's repository"),
        ({"spiece.model": "x"}, "save_pretrained"),
        ({"tokenizer.json": "{"}, "fetch the file again"),
        ({"tokenizer.json": "{}"}, "fetch the file again"),
        ({"tokenizer.json": '{"model": {"type": "New"}, "added_tokens": []}'}, "fetch the file again"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "must contain a JSON object"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{,"}, "fetch the file again or remove"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": '{"added_tokens_decoder": {"x": {}}}'},
            "tokenizer_config.json",
        ),
        (
            {"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": [{"nome": 1}]}'},
            "tokenizer_config.json",
        ),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"added_tokens_decoder": 3}'}, "tokenizer_config.json"),
    ],
)
def test_broken_directories(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(toys.byte_level().to_str() if text is None else text, encoding="utf-8")
    with pytest.raises(LoadError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_missing_directory(tmp_path):
    with pytest.raises(LoadError, match="is not a directory"):
        Tokenizer.from_directory(tmp_path / "none")


def test_offsets_are_characters():
    tokenizer = Tokenizer(toys.copy_of(toys.byte_level()))
    text = "Größe 東京 hello"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and len(ids) == len(offsets)
    assert offsets[0] == (0, 0)  # the BOS token has no text
    assert text[offsets[-1][0] : offsets[-1][1]].strip() == "hello"
    assert max(end for _, end in offsets) == len(text)


def test_lone_surrogates_and_bad_ids_are_request_errors():
    tokenizer = Tokenizer(toys.copy_of(toys.byte_level()))
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")
    for bad in (-1, 2**32, 2**70):
        with pytest.raises(RequestError, match="not a token id"):
            tokenizer.decode([bad])
        assert tokenizer.token_text(bad) == "" and tokenizer.token_bytes(bad) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


@pytest.mark.parametrize("name", sorted(toys.ALL))
def test_bytes_of_tokens_join_to_the_text(name):
    tokenizer = Tokenizer(toys.copy_of(toys.ALL[name]()))
    for text in ["hello world", "quick brown fox", "the lazy dog"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids) == text
        assert "".join(tokenizer.token_text(token_id) for token_id in ids) == joined


def test_text_of_partial_and_special_tokens():
    tokenizer = Tokenizer(toys.copy_of(toys.byte_level()), {"eos_token": "<|eos|>"})
    partial = tokenizer.backend.token_to_id("Ħ")  # byte 0x84 in GPT-2's alphabet
    assert tokenizer.token_bytes(partial) == b"\x84"
    assert tokenizer.token_text(partial) == "bytes:\\x84"
    assert tokenizer.token_text(tokenizer.eos_token_id) == "<|eos|>"
    fallback = Tokenizer(toys.copy_of(toys.llama_style()))
    assert fallback.token_bytes(fallback.backend.token_to_id("<0xE6>")) == b"\xe6"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["byte_level", "llama_style", "gemma_style", "composed"])
@given(text=st.one_of(st.text(max_size=60), st.text(alphabet="e\u0301o\u0323\u0302 ^", max_size=60)))
@settings(max_examples=150, deadline=None)
def test_max_token_chars_is_a_bound(name, text):
    backend = toys.copy_of(toys.byte_level() if name == "composed" else toys.ALL[name]())
    if name == "composed":
        backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    assert tokenizer.max_token_chars < 100
    assert len(text) <= tokenizer.max_token_chars * len(tokenizer.encode(text))


def test_max_token_chars_if_tokenizing_removes_characters():
    backend = toys.copy_of(toys.byte_level())
    longest = Tokenizer(toys.copy_of(backend)).max_token_chars
    assert longest == max(len(backend.decode([i], skip_special_tokens=False)) for i in range(backend.get_vocab_size()))
    backend.add_special_tokens([AddedToken("<greedy>", rstrip=True)])
    assert Tokenizer(backend).max_token_chars >= 4096
    assert Tokenizer(toys.copy_of(toys.word_piece())).max_token_chars >= 4096
