"""The classes of a model with a classification head, as config.json names them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from windlass.engine.api.model_heads import Activation, ClassifierInfo
from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.rotary.fields import format_value

_MOST_CLASSES = 100_000
_ACTIVATIONS: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


def read_classifier(config: Config, *, per_token: bool = False) -> ClassifierInfo:
    """The labels in order, and what makes probabilities of their logits, as transformers' text classification has it."""
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
    if per_token:  # transformers' token classification has no other
        return ClassifierInfo(tuple(labels), "softmax", per_token=True)
    kind = config.get("problem_type")
    if kind is None:
        return ClassifierInfo(tuple(labels), "sigmoid" if len(labels) == 1 else "softmax")
    if kind not in _ACTIVATIONS:
        raise LoadError(
            f"config.json: problem_type {format_value(kind)} is not known: use one of {', '.join(_ACTIVATIONS)}"
        )
    return ClassifierInfo(tuple(labels), _ACTIVATIONS[kind])
