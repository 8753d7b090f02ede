"""SentencePiece models trained here: ids, offsets and text, compared with SentencePiece itself."""

from __future__ import annotations

import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import toy_tokenizers as toys
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from unit_helpers.any_text import ANY_TEXT

from windlass.engine.errors import LoadError
from windlass.server.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("google.protobuf")

PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
FORMS: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "gemma": PLAIN | {"add_dummy_prefix": False, "user_defined_symbols": ["<sep>", "\n"]},
    "symbols": PLAIN | {"user_defined_symbols": ["<sep>", "\n", "[x]"], "allow_whitespace_only_pieces": True},
    "no bytes": {"normalization_rule_name": "identity"},
}
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def trained(kind: str, form: str) -> bytes:
    return train(kind, **FORMS[form])


def train(kind: str, **options: Any) -> bytes:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(toys.CORPUS),
        model_writer=made,
        model_type=kind,
        **{"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **options},
    )
    return made.getvalue()


def load(directory: Path, data: bytes, **config: Any) -> Tokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(data)
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_directory(directory)


@cache
def pair(kind: str, form: str) -> tuple[Any, Tokenizer]:
    """Return SentencePiece's tokenizer and ours for one model."""
    return both(trained(kind, form))


def both(data: bytes) -> tuple[Any, Tokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        return sentencepiece.SentencePieceProcessor(model_proto=data), load(Path(folder), data)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@quick
@given(text=ANY_TEXT)
@example(text="\u2581the quick brown ")  # SentencePiece treats this character in a text as a space
@example(text=" \u2581\u2581the")
def test_ids_text_and_offsets(kind: str, form: str, text: str) -> None:
    theirs, ours = pair(kind, form)
    assume(text not in FORMS[form].get("user_defined_symbols", ()))  # a text that is only a symbol gets no space here
    assume(
        not any(control in text for control in ("<s>", "</s>", "<unk>"))
    )  # recognized in a text here, as chats require
    wanted = theirs.encode(text, return_type="proto").pieces
    ids = [piece.id for piece in wanted]
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == [theirs.bos_id(), *ids]
    if theirs.unk_id() in ids:  # decoded by SentencePiece as a placeholder, by transformers and here as nothing
        return
    assert ours.decode(ids) == theirs.decode(ids)
    full = b"".join(map(ours.token_bytes, ids)).decode()  # with the leading spaces that decoding removes
    most = len(full) if form == "no bytes" else 1
    assert theirs.decode(ids) in {full[count:] for count in range(most + 1) if not full[:count].strip(" ")}
    if form == "no bytes":  # SentencePiece assigns removed spaces to the remaining one
        return
    at = ours.encode_with_offsets(text, add_special_tokens=False)[1]
    for (begin, end), piece in zip(at, wanted, strict=True):
        if not theirs.is_byte(piece.id) and piece.begin > 0:  # an inserted space has no position in the text
            assert (len(text[:begin].encode()), len(text[:end].encode())) == (piece.begin, piece.end)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rules", ["nfkc", "nmt_nfkc"])
@quick
@given(
    parts=st.lists(
        st.sampled_from(
            "ﬁ ½ １２ ｱ ① Ⅳ é e\u0301 が か\u3099 가 ᄀ\u1161 ～ ~ \t \n \u200b ▁ \x07 \ufffd x  日本".split(" ")
        ),
        max_size=12,
    )
)
def test_normalization(kind: str, rules: str, parts: list[str]) -> None:
    theirs, ours = normalizing(kind, rules)
    text = " ".join(parts)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


@cache
def normalizing(kind: str, rules: str) -> tuple[Any, Tokenizer]:
    return both(train(kind, normalization_rule_name=rules, byte_fallback=True))


def test_precompiled_rules() -> None:
    theirs, ours = both(train("bpe", normalization_rule_name="nmt_nfkc_cf"))
    for text in ("HELLO World", "Größe ① Ⅳ", "  THE   Quick  "):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_space_after_special_tokens(tmp_path: Path) -> None:
    """As in transformers, `legacy: false` puts a space before the text only."""
    data = trained("bpe", "llama")
    old, new = load(tmp_path / "old", data), load(tmp_path / "new", data, legacy=False)
    bare = load(tmp_path / "bare", data, add_prefix_space=False)
    tokens = [
        [one.backend.id_to_token(i) for i in one.encode("hello</s>hello", add_special_tokens=False)]
        for one in (old, new, bare)
    ]
    assert tokens[0] == ["▁hello", "</s>", "▁hello"]
    assert tokens[1][:2] == ["▁hello", "</s>"] and "".join(tokens[1][2:]) == "hello"
    assert "".join(tokens[2]) == "hello</s>hello"
    assert (
        old.decode(old.encode("hello"))
        == new.decode(new.encode("hello"))
        == bare.decode(bare.encode("hello"))
        == "hello"
    )


def test_tokens_of_other_files(tmp_path: Path) -> None:
    data = trained("bpe", "llama")
    size = sentencepiece.SentencePieceProcessor(model_proto=data).get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size, "<|user|>": size + 1}), encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"pad_token": "<pad>", "eos_token": "<|user|>"}), encoding="utf-8"
    )
    ours = load(tmp_path, data, add_bos_token=False, add_eos_token=True, bos_token=None)
    assert ours.special_tokens == {"unk_token": "<unk>", "eos_token": "<|user|>", "pad_token": "<pad>"}
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (None, size + 1, size + 2)
    assert ours.encode("hello")[-1] == size + 1 and ours.encode("<pad>hello", add_special_tokens=False)[0] == size
    assert ours.decode(ours.encode("<pad>hello<|user|>")) == "hello"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, "words or characters"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    kind = options.pop("model_type")
    with pytest.raises(LoadError, match=message):
        load(tmp_path, train(kind, **options))


@pytest.mark.parametrize(
    "damage", [b"", b"\x00" * 100, b"version https://git-lfs.github.com/spec/v1", "cut", "flipped"]
)
def test_damaged_files(tmp_path: Path, damage: bytes | str) -> None:
    whole = trained("bpe", "llama")
    data = {"cut": whole[: len(whole) // 2 + 1], "flipped": b"\x0a\xff\xff\xff\xff\x0f" + whole}.get(damage, damage)  # type: ignore[call-overload]
    with pytest.raises(LoadError) as caught:
        load(tmp_path, data)
    assert "tokenizer.model" in str(caught.value) and "\n" not in str(caught.value)
