"""What a model is made for beside generating, as its files tell: how its states are pooled, and its classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.engine.api.pooling import PoolingKind

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """How embeddings are made where a request does not say.

    declared: the model's files say so. refusal: what they ask for that is not offered; then requests have to say.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    declared: bool = False
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class ClassifierInfo:
    """labels: in the order of the head's rows. activation: makes probabilities of what the head gives. per_token: it tells the
    class of each token, not of the text."""

    labels: tuple[str, ...]
    activation: Activation
    per_token: bool = False
