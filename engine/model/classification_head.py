"""Classification head: specification with weight names, and the layer from normed hidden states to class logits in
float32.

Torch is imported only where the head runs, because the API process reads specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.model.norm import Norm, NormSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import Backend


# The hidden state that a text is classified by: the last or first token's, or the mean; "late": the mean of all tokens' logits.
HeadPooling = Literal["last", "first", "mean", "late"]

HeadActivation = Literal["gelu", "gelu_tanh", "silu", "relu", "tanh"]


@dataclass(frozen=True, slots=True)
class ClassificationHeadNames:
    """Checkpoint tensor names of the class rows, and of the dense layer and norm before them; None: no such layer."""

    out: str = "score"
    dense: str | None = None
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class ClassificationHeadSpec:
    """out(norm(activation(dense(state)))), or out(state). `pooling` is ignored for token classes
    (`ClassifierInfo.per_token`)."""

    classes: ClassifierInfo
    names: ClassificationHeadNames = field(default_factory=ClassificationHeadNames)
    pooling: HeadPooling = "last"
    out_bias: bool = False
    dense_bias: bool = False
    activation: HeadActivation = "gelu"
    norm_form: NormSpec = field(default_factory=NormSpec)

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """In order of use; all float32, whatever the storage of the model."""
        names, count = self.names, len(self.classes.labels)
        result: tuple[WeightSpec, ...] = ()
        if names.dense is not None:
            result += _layer("head_dense", names.dense, (hidden_size, hidden_size), bias=self.dense_bias)
        if names.norm is not None:
            result += self.norm_form.weights("head_norm", names.norm, hidden_size)
        return result + _layer("score", names.out, (count, hidden_size), bias=self.out_bias)


def _layer(name: str, stored: str, shape: tuple[int, int], *, bias: bool) -> tuple[WeightSpec, ...]:
    rows = shape[0]
    matrix = WeightSpec(name, "score", shape, (StoredTensor(f"{stored}.weight", rows),))
    if not bias:
        return (matrix,)
    return matrix, WeightSpec(f"{name}_bias", "shift", (rows,), (StoredTensor(f"{stored}.bias", rows),))


def _activate(name: HeadActivation, x: Tensor) -> Tensor:
    import torch
    from torch.nn import functional

    functions: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
        "tanh": torch.tanh,
    }
    return functions[name](x)


class ClassificationHead:
    """weights: those of `ClassificationHeadSpec.weights`, by name."""

    def __init__(
        self, spec: ClassificationHeadSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend
    ) -> None:
        self.spec = spec
        self._out, self._out_bias = weights["score"], weights.get("score_bias")  # [classes, hidden], [classes]
        self._dense, self._dense_bias = weights.get("head_dense"), weights.get("head_dense_bias")
        self._norm: Norm | None = None
        if spec.names.norm is not None:
            weight, bias = weights["head_norm"], weights.get("head_norm_bias")
            self._norm = Norm(spec.norm_form, weight, bias, norm_eps, backend)

    def pooled_logits(self, hidden: Tensor) -> Tensor:
        """Logits [1, classes] of a text from the hidden states [T, hidden] of its tokens; with pooling "last", the last
        suffices."""
        if self.spec.pooling == "late":
            return self.logits(hidden).double().mean(dim=0, keepdim=True).float()
        if self.spec.pooling == "mean":
            return self.logits(hidden.double().mean(dim=0, keepdim=True).float())
        return self.logits(hidden[:1] if self.spec.pooling == "first" else hidden[-1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, classes] of hidden states [R, hidden], row by row."""
        from torch.nn import functional

        x = hidden.float()
        if self._dense is not None:
            x = _activate(self.spec.activation, functional.linear(x, self._dense, self._dense_bias))
        if self._norm is not None:
            x = self._norm(x)
        return functional.linear(x, self._out, self._out_bias)
