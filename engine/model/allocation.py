"""Memory for weights as their specs describe them, taken from a backend. Knows kinds of weights and no layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from windlass.engine.model.weight_spec import WeightSpec
from windlass.kernels import Backend, Weight


def allocate(backend: Backend, specs: Iterable[WeightSpec]) -> dict[str, Any]:
    """An uninitialised weight for each spec, by name. Norms are float32, biases of the compute dtype."""
    return {spec.name: _one(backend, spec) for spec in specs}


def _one(backend: Backend, spec: WeightSpec) -> Weight:
    match spec.kind:
        case "norm":
            return backend.empty(spec.shape, torch.float32)
        case "bias":
            return backend.empty(spec.shape, backend.dtype)
        case "table":
            return backend.table(spec.shape[0], spec.shape[1])
        case "head":
            return backend.head(*spec.shape)
        case "table and head":
            return backend.table_and_head(spec.shape[0], spec.shape[1])
        case "matrix":
            return backend.matrix(spec.shape[0], spec.shape[1])
