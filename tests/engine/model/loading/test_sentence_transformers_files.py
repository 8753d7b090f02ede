"""Files of sentence-transformers that specify how a model scores pairs, and refused ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.classifier_head import ClassifierTokens, has_classifier_tokens
from windlass.engine.model.loading.sentence_transformers_files import read_reranker_config

LOGIT_SCORE = [
    {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
]


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "declared"),
    [
        ({}, None),
        ({"config.json": {"architectures": ["Qwen3ForCausalLM"], "_name_or_path": "Qwen3-Reranker"}}, None),
        (
            {"config.json": {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}},
            ClassifierTokens(("yes", "no"), is_qwen3_reranker=True),
        ),
        (
            {"config.json": {"classifier_from_token": ["0", "1"], "method": "from_2_way_softmax"}},
            ClassifierTokens(("1", "0")),
        ),
        (
            {"config.json": {"classifier_from_token": ["Yes"], "method": "no_post_processing"}},
            ClassifierTokens(("Yes",)),
        ),
        (
            {"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": 4}},
            ClassifierTokens((9, 4)),
        ),
        (
            {
                "modules.json": LOGIT_SCORE,
                "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": None},
                "config_sentence_transformers.json": {"prompts": {"a": "be strict"}, "default_prompt_name": "a"},
            },
            ClassifierTokens((9,), instruction="be strict"),
        ),
        ({"modules.json": LOGIT_SCORE[:1]}, None),
    ],
)
def test_declared_scoring_is_read(files: dict[str, Any], declared: ClassifierTokens | None, tmp_path: Path) -> None:
    assert read_reranker_config(write(tmp_path, files)) == declared
    assert has_classifier_tokens(files.get("config.json", {})) == ("classifier_from_token" in str(files))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": {"classifier_from_token": "yes"}}, "must be a list of tokens"),
        ({"config.json": {"classifier_from_token": ["no", "yes"]}}, "with method from_2_way_softmax"),
        ({"config.json": {"classifier_from_token": ["yes"], "is_original_qwen3_reranker": True}}, "name two tokens"),
        ({"config.json": {"classifier_from_token": ["a", "b"], "method": "magic"}}, "method .*magic.* is not known"),
        ({"config.json": {"classifier_from_token": []}}, "gives no score"),
        ({"config.json": {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": 1}}, "true or false"),
        ({"modules.json": LOGIT_SCORE}, "missing"),
        ({"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": "yes"}}, "must be token ids"),
        ({"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": -1}}, "must be token ids"),
        ({"modules.json": "[", "config.json": "{}"}, "cannot read"),
    ],
)
def test_unsupported_declaration_is_reported(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=says) as caught:
        read_reranker_config(write(tmp_path, files))
    assert "\n" not in str(caught.value)
