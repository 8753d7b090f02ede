"""The directory derived for a model without tokenizer.json: created once, renewed with its files, and served from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.tiny_models import make_model
from unit_helpers.tiktoken_files import ranked_tokens, write_tiktoken

from windlass.engine.errors import LoadError
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.text.tokenizer import Tokenizer

TOKENS = ranked_tokens("llama-bpe", 300)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    directory = make_model("llama", tmp_path / "model", vocab_size=len(TOKENS) + 256, num_hidden_layers=2)
    config = json.loads((directory / "config.json").read_text())
    return write_tiktoken(directory / "tokenizer.model", TOKENS, config, chat_template="{{ messages }}")


def test_the_directory_is_recreated_if_any_file_changes(model: Path, tmp_path: Path) -> None:
    made = ensure_tokenizer(model)
    assert made.parent == tmp_path / "cache" / "tokenizers" and ensure_tokenizer(model) == made
    assert {path.name for path in made.iterdir()} == {path.name for path in model.iterdir()} | {
        "derived.json",
        "tokenizer.json",
    }
    assert (made / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    ours, whole = Tokenizer.from_directory(model), Tokenizer.from_directory(made)
    assert whole.backend.to_str() == ours.backend.to_str() and whole.special_tokens == ours.special_tokens
    assert whole.chat_template == "{{ messages }}"
    os.utime(model / "model.safetensors", ns=(1, 1))
    anew = ensure_tokenizer(model)
    assert (
        anew != made and made.exists() and (anew / "model.safetensors").exists()
    )  # this process may still load from the first


def test_a_directory_with_tokenizer_json_is_used_as_it_is(model: Path) -> None:
    (model / "tokenizer.json").write_text(Tokenizer.from_directory(model).backend.to_str(), encoding="utf-8")
    assert ensure_tokenizer(model) == model


def test_an_unreadable_vocabulary_leaves_no_directory(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.model").write_text("YQ== x\n")
    with pytest.raises(LoadError):
        ensure_tokenizer(model)
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def test_without_a_writable_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "a file"))
    assert (ensure_tokenizer(model) / "tokenizer.json").is_file()
    assert "set WINDLASS_CACHE" in capsys.readouterr().err
