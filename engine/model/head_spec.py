"""The description of a classification head: what it reads, its layers, and its weights with their names in checkpoints.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.api.model_heads import ClassifierInfo
from windlass.engine.model.norm_spec import NormSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec

# Which states a text's classes come from: its last token's, its first one's, the mean of all; "late": the mean of the logits that
# every token's state gives (EuroBERT).
HeadPooling = Literal["last", "first", "mean", "late"]
HeadActivation = Literal["gelu", "gelu_tanh", "silu", "relu", "tanh"]


@dataclass(frozen=True, slots=True)
class ClassificationHeadNames:
    """Of a checkpoint's tensors. out: the rows of classes. dense, norm: of what stands before them, None where nothing does."""

    out: str = "score"
    dense: str | None = None
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class ClassificationHeadSpec:
    """out(norm(activation(dense(state)))), or out(state).

    pooling is not looked at where the classes are those of each token (`ClassifierInfo.per_token`).
    """

    classes: ClassifierInfo
    names: ClassificationHeadNames = field(default_factory=ClassificationHeadNames)
    pooling: HeadPooling = "last"
    out_bias: bool = False
    dense_bias: bool = False
    activation: HeadActivation = "gelu"
    norm_form: NormSpec = field(default_factory=NormSpec)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """In the order in which they are used; all float32, whatever the model is stored in."""
        names, count = self.names, len(self.classes.labels)
        found: tuple[WeightSpec, ...] = ()
        if names.dense is not None:
            found += _layer("head_dense", names.dense, (hidden_size, hidden_size), bias=self.dense_bias)
        if names.norm is not None:
            found += self.norm_form.weights("head_norm", names.norm, hidden_size)
        return found + _layer("score", names.out, (count, hidden_size), bias=self.out_bias)


def _layer(name: str, stored: str, shape: tuple[int, int], *, bias: bool) -> tuple[WeightSpec, ...]:
    rows = shape[0]
    matrix = WeightSpec(name, "score", shape, (StoredTensor(f"{stored}.weight", rows),))
    if not bias:
        return (matrix,)
    return matrix, WeightSpec(f"{name}_bias", "shift", (rows,), (StoredTensor(f"{stored}.bias", rows),))
