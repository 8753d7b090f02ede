"""Word rules of GGUF files: each is valid for the library, and the words of rules that differ."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from unit_helpers import gguf_vocabularies as vocabularies

from windlass.server.text.vocabularies.conversion import gguf_tokenizer_files
from windlass.server.text.vocabularies.vocabulary import WORD_RULES

TEXT = "Don't WE'LL 12345  x\n\n  y=[a_b] Ünder 東京é"


def words(kind: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in WORD_RULES[kind].splits]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", sorted(WORD_RULES))
def test_rules_preserve_the_text(kind):
    for text in (
        TEXT,
        "",
        " ",
        "\n",
        "日本語 text\t\t1,234,567.89 …—«»",
        "a\u0301 \u0e01\u0e33 \u1100\u1161 \U00010400 \U0001f600",
    ):
        assert "".join(words(kind, text)) == text


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("gpt-2 olmo", ["Don", "'t", " WE", "'", "LL", " 12345", " ", " x", "\n\n "]),
        ("llama-bpe dbrx glm4", ["Don", "'t", " WE", "'LL", " ", "123", "45", " ", " x", "\n\n", " "]),
        ("qwen2 hunyuan", ["Don", "'t", " WE", "'LL", " ", "1", "2", "3", "4", "5", " ", " x", "\n\n", " "]),
        ("smollm starcoder", ["Don", "'t", " WE", "'", "LL", " ", "1", "2", "3", "4", "5", " ", " x", "\n\n "]),
        ("gpt-4o", ["Don't", " WE'LL", " ", "123", "45", " ", " x", "\n\n", " "]),
        ("deepseek-v3", ["Don", "'t", " WE", "'LL", " ", "123", "45", " ", " x", "\n\n", " "]),
        ("afmoe", ["Don", "'t", " WE", "'LL", " ", "12", "345", " ", " x", "\n\n", " "]),
        ("bloom", ["Don't", " WE'LL", " 12345", " ", " x", "\n\n ", " y=[a_b]"]),
    ],
)
def test_words(kinds, expected):
    for kind in kinds.split():
        assert words(kind, TEXT)[: len(expected)] == expected, kind


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("falcon", "1234567 a$b", ["123", "456", "7", " a", "$", "b"]),
        ("tekken", "HelloWorld foo12", ["Hello", "World", " foo", "1", "2"]),
        ("qwen35", "e\u0301a b", ["e\u0301a", " b"]),
        ("qwen2", "e\u0301a b", ["e", "\u0301a", " b"]),
        ("kimi-k2", "ab東京cd", ["ab", "東京", "cd"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("superbpe", "a 1234567 b", ["a ", "1", "234", "567", " b"]),
        ("chameleon", "IMGIMGABZ 1", ["IMGIMGABZ", " ", "1"]),
        ("deepseek-llm", "a\n\xe9\u4e2d12", ["a", "\n", "\xe9", "\u4e2d", "12"]),
        ("deepseek-llm", "\U00010400\U00010401\u01bb", ["\U00010400\U00010401", "\u01bb"]),
        ("seed-coder", "x;\n\ny", ["x", ";", "\n\n", "y"]),
        ("llama-bpe", "x;\n\ny", ["x", ";\n\n", "y"]),
        ("jais-2", "a     b", ["a", "    ", " b"]),
        ("laguna", "a;\nb", ["a", ";", "\n", "b"]),
    ],
)
def test_differences_between_rules(kind, text, expected):
    assert words(kind, text) == expected


def test_whole_words_are_not_merged():
    metadata = vocabularies.byte_level()
    metadata["tokenizer.ggml.tokens"].append("zqzq")  # no merges form it
    metadata["tokenizer.ggml.token_type"].append(vocabularies.NORMAL)
    found = {}
    for kind in ("gpt-2", "llama-bpe"):
        made = Tokenizer.from_str(gguf_tokenizer_files(metadata | {"tokenizer.ggml.pre": kind}, "x").tokenizer)
        found[kind] = made.encode("zqzq", add_special_tokens=False).tokens
    assert found == {"gpt-2": ["z", "q", "z", "q"], "llama-bpe": ["zqzq"]}
