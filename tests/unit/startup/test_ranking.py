"""Ranking settings from options and files, and options that a model does not support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_rerankers import add_logit_score

from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.model_spec import ModelSpec
from windlass.server.config.server_options import ServerOptions
from windlass.server.config.settings import RankSettings
from windlass.server.startup.model_defaults import rank_settings
from windlass.server.text.tokenizer_files import QWEN3_RERANKER_TEMPLATE

PAIR = "{{ messages[0].content }} {{ messages[1].content }}"


def spec(architecture: str, **config: Any) -> ModelSpec:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    kv = {"num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 16}
    return read_spec({"architectures": [architecture], **sizes, **kv, **config})


PLAIN = spec("Qwen3ForCausalLM")
JUDGE = spec("Qwen3ForSequenceClassification", num_labels=1)
SEVERAL = spec("Qwen3ForSequenceClassification", num_labels=3)
TOKENS = spec("Qwen3ForTokenClassification", num_labels=1)
HEADLESS = spec("Qwen3Model", tie_word_embeddings=False)
ENCODER = spec("ModernBertForSequenceClassification", num_labels=1, global_attn_every_n_layers=3)


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "pair.jinja"
    file.write_text(PAIR)
    return str(file)


def settings(
    directory: Path, model: ModelSpec | None, *tokens: str, template: str | None = None
) -> RankSettings | None:
    options = ServerOptions(rerank_tokens=list(tokens) or None, rerank_template=template)
    return rank_settings(directory, options, model)


@pytest.mark.parametrize("model", [PLAIN, None])
def test_options_make_a_causal_model_a_reranker(model: ModelSpec | None, template: str, tmp_path: Path) -> None:
    assert settings(tmp_path, model) is None
    qwen3 = RankSettings(template=QWEN3_RERANKER_TEMPLATE, needs_template=True, tokens=("yes", "no"))
    assert settings(tmp_path, model, template="qwen3") == qwen3
    assert settings(tmp_path, model, "0", "1", template="qwen3") == RankSettings(
        template=QWEN3_RERANKER_TEMPLATE, needs_template=True, tokens=("1", "0")
    )
    assert settings(tmp_path, model, "no,yes") == RankSettings(needs_template=True, tokens=("yes", "no"))
    assert settings(tmp_path, model, "yes", template=template) == RankSettings(
        template=PAIR, needs_template=True, tokens=("yes",)
    )


def test_files_make_a_reranker_and_options_win(template: str, tmp_path: Path) -> None:
    add_logit_score(tmp_path, 9, 4, "be strict")
    assert settings(tmp_path, PLAIN) == RankSettings(tokens=(9, 4), instruction="be strict")
    assert settings(tmp_path, PLAIN, "no", "yes", template=template) == RankSettings(
        template=PAIR, needs_template=True, tokens=("yes", "no"), instruction="be strict"
    )
    assert settings(tmp_path, HEADLESS) is None  # it cannot generate an answer
    keys = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert settings(tmp_path, PLAIN) == RankSettings(
        template=QWEN3_RERANKER_TEMPLATE, needs_template=True, tokens=("yes", "no")
    )
    found = settings(tmp_path, PLAIN, template=template)
    assert found is not None and found.template == PAIR


def test_a_head_of_one_class_uses_a_given_prompt(template: str, tmp_path: Path) -> None:
    assert settings(tmp_path, JUDGE) == RankSettings()
    assert settings(tmp_path, JUDGE, template=template) == RankSettings(template=PAIR, needs_template=True)
    assert [settings(tmp_path, model) for model in (SEVERAL, TOKENS, HEADLESS, ENCODER)] == [None] * 4


@pytest.mark.parametrize(
    ("model", "tokens", "given", "says"),
    [
        (PLAIN, (), True, "set `rerank_tokens`, such as no,yes"),
        (PLAIN, ("a", "b", "c"), False, "one token or two, the refusal first: no,yes; got 3"),
        (PLAIN, (",",), False, "got 0"),
        (JUDGE, ("no,yes",), False, "a Qwen3ForSequenceClassification generates no tokens"),
        (HEADLESS, ("no,yes",), False, "a Qwen3Model generates no tokens"),
        (SEVERAL, (), True, "without exactly one class ranks no pairs"),
        (TOKENS, (), True, "without exactly one class ranks no pairs"),
        (HEADLESS, (), True, "without exactly one class ranks no pairs"),
        (ENCODER, (), True, "joined by the tokenizer of this model"),
    ],
)
def test_unsupported_options_are_refused(
    model: ModelSpec, tokens: tuple[str, ...], given: bool, says: str, template: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=says):
        settings(tmp_path, model, *tokens, template=template if given else None)


def test_a_template_that_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("x" * 2**20 + "x")
    with pytest.raises(LoadError, match="is larger") as caught:
        settings(tmp_path, PLAIN, "no,yes", template=str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
