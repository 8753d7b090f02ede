"""A classification head: from normed hidden states to the logits of classes, in float32. Knows its spec and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from windlass.engine.model.head_spec import ClassificationHeadSpec, HeadActivation
from windlass.engine.model.norm import Norm

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import Backend


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
    """weights: those that `ClassificationHeadSpec.weights` lists, by name. norm_eps: of its norm."""

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
        """Logits [1, classes] of a text from the states [T, hidden] of its tokens, the last ones alone where only they count."""
        if self.spec.pooling == "late":
            return self.logits(hidden).double().mean(dim=0, keepdim=True).float()
        if self.spec.pooling == "mean":
            return self.logits(hidden.double().mean(dim=0, keepdim=True).float())
        return self.logits(hidden[:1] if self.spec.pooling == "first" else hidden[-1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, classes] of states [R, hidden], each on its own."""
        from torch.nn import functional

        x = hidden.float()
        if self._dense is not None:
            x = _activate(self.spec.activation, functional.linear(x, self._dense, self._dense_bias))
        if self._norm is not None:
            x = self._norm(x)
        return functional.linear(x, self._out, self._out_bias)
