"""Which words of its vocabulary a causal model answers with when it judges a pair of texts, as config.json names them.

The keys are vLLM's, which makes a classifier of such a model while it loads. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.values import Config, read_flag
from windlass.engine.rotary.fields import format_value

_KEY = "classifier_from_token"
_DIFFERENCE, _PLAIN = "from_2_way_softmax", "no_post_processing"


@dataclass(frozen=True, slots=True)
class ClassifierTokens:
    """tokens: the one whose logit counts, and perhaps one whose logit is taken off it. is_qwen3_reranker: whether the model is a
    Qwen3-Reranker as it was published, of which the prompt is known."""

    tokens: tuple[str, ...]
    is_qwen3_reranker: bool


def has_classifier_tokens(config: Config) -> bool:
    """Whether a `…ForSequenceClassification` has no head of its own: its classes are words that the model goes on with."""
    return config.get(_KEY) is not None


def read_classifier_tokens(config: Config) -> ClassifierTokens | None:
    """None where config.json names none. Raises LoadError for names or methods that cannot be understood."""
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
