"""Product with a weight that adapters may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import Backend, Weight


def adapted_linear(
    backend: Backend, name: str, x: Tensor, weight: Weight, bias: Tensor | None = None, lora: LayerLoRA | None = None
) -> Tensor:
    """`Backend.linear`, plus the update of the weight `name` by each row's adapter; None: no row has one."""
    out = backend.linear(x, weight, bias)
    if lora is not None:
        lora.add(name, out, x)
    return out
