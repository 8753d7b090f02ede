"""Classification heads and classifier tokens, from config.json.

A reranker built from a causal model has no head: its score is the logit of one token, or the difference of two (vLLM's key
`classifier_from_token`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.interface.model_info import Activation, ClassifierInfo
from windlass.engine.model.config_json.config_rules import Config, read_flag, read_size
from windlass.engine.rotary.scaling_fields import format_value

_MOST_CLASSES = 100_000

_ACTIVATIONS: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


def read_classifier(config: Config, *, per_token: bool = False) -> ClassifierInfo:
    """The labels in order, and the activation of their logits, as in transformers' text classification."""
    named = config.get("id2label")
    if named is None:
        count = read_size(config, "num_labels", 2, most=_MOST_CLASSES)
        labels = [f"LABEL_{index}" for index in range(count)]
    else:
        if not isinstance(named, Mapping) or not 1 <= len(named) <= _MOST_CLASSES:
            raise LoadError(f"config.json: id2label must name 1 to {_MOST_CLASSES} classes by their numbers")
        found = {str(key): str(label) for key, label in named.items()}
        if found.keys() != {str(index) for index in range(len(found))}:
            raise LoadError(f"config.json: id2label must name the classes 0 to {len(found) - 1}, each once")
        labels = [found[str(index)] for index in range(len(found))]
    if per_token:  # the only one in transformers' token classification
        return ClassifierInfo(tuple(labels), "softmax", per_token=True)
    kind = config.get("problem_type")
    if kind is None:
        return ClassifierInfo(tuple(labels), "sigmoid" if len(labels) == 1 else "softmax")
    if kind not in _ACTIVATIONS:
        raise LoadError(
            f"config.json: problem_type {format_value(kind)} is not known: use one of {', '.join(_ACTIVATIONS)}"
        )
    return ClassifierInfo(tuple(labels), _ACTIVATIONS[kind])


_KEY = "classifier_from_token"
_DIFFERENCE, _PLAIN = "from_2_way_softmax", "no_post_processing"


@dataclass(frozen=True, slots=True)
class ClassifierTokens:
    """Tokens whose logits are the score of a reranker.

    tokens: the token whose logit is the score, and optionally one whose logit is subtracted, by text or id. is_qwen3_reranker:
    whether the model is a published Qwen3-Reranker, whose prompt is known. instruction: default of requests; None: that of the
    prompt.
    """

    tokens: tuple[str | int, ...]
    is_qwen3_reranker: bool = False
    instruction: str | None = None


def has_classifier_tokens(config: Config) -> bool:
    """Whether a `…ForSequenceClassification` has no head: its classes are tokens of the vocabulary."""
    return config.get(_KEY) is not None


def read_classifier_tokens(config: Config) -> ClassifierTokens | None:
    """The tokens named in config.json; None if there are none. Raises LoadError for invalid names or methods."""
    named = config.get(_KEY)
    if named is None:
        return None
    if not isinstance(named, list) or not all(isinstance(token, str) and token for token in named):
        raise LoadError(
            f'config.json: {_KEY} must be a list of tokens, such as ["no", "yes"], got {format_value(named)}'
        )
    is_qwen3_reranker, method = read_flag(config, "is_original_qwen3_reranker"), config.get("method")
    if method not in (None, _DIFFERENCE, _PLAIN):
        raise LoadError(f"config.json: method {format_value(method)} is not known: use {_DIFFERENCE} or {_PLAIN}")
    if len(named) == 2 and (is_qwen3_reranker or method == _DIFFERENCE):
        return ClassifierTokens((named[1], named[0]), is_qwen3_reranker)
    if len(named) == 1 and not is_qwen3_reranker and method != _DIFFERENCE:
        return ClassifierTokens((named[0],), is_qwen3_reranker=False)
    raise LoadError(
        f"config.json: {_KEY} {format_value(named)} gives no score of a pair: name two tokens, the refusal first, with "
        f"method {_DIFFERENCE} (or is_original_qwen3_reranker), or one token with method {_PLAIN}"
    )
