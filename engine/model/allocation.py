"""Memory for weights as their specs and the storage plan describe them, taken from a backend. Knows kinds of weights and no
layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.engine.model.storage import StoragePlan, StoredPart, is_block_format, split_block_format
from windlass.engine.model.weight_spec import WeightSpec

if TYPE_CHECKING:
    from windlass.kernels import Backend, Storage, Weight


def allocate(backend: Backend, specs: Iterable[WeightSpec], plan: StoragePlan) -> dict[str, Any]:
    """An uninitialised weight for each spec, by name. Norms, numbers and scores are float32, biases of the compute dtype.

    plan: of the weights with rows and columns; what it does not name is of the backend's weight dtype.
    """
    return {spec.name: _allocate_weight(backend, spec, plan.get(spec.name)) for spec in specs}


def kernel_storage(name: str) -> Storage:
    """What the kernels call a storage of a plan."""
    if not is_block_format(name):
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    from windlass.kernels import FORMS

    form, supers = split_block_format(name)
    return FORMS[form] if supers is None else replace(FORMS[form], super_groups=supers)


def _allocate_weight(backend: Backend, spec: WeightSpec, parts: tuple[StoredPart, ...] | None) -> Weight:
    import torch

    if spec.kind in ("norm", "shift", "number", "score"):
        return backend.empty(spec.shape, torch.float32)
    if spec.kind == "bias":
        return backend.empty(spec.shape, backend.dtype)
    rows, columns = spec.shape
    tables = {
        "table": backend.table,
        "wide table": backend.table,
        "heads": backend.table,
        "table and head": backend.tied_embedding,
    }
    make = tables.get(spec.kind, backend.matrix)
    if parts is None:
        return make(rows, columns, backend.weight_dtype)
    stacked = [make(part.rows, columns, kernel_storage(part.storage)) for part in parts]
    return stacked[0] if len(stacked) == 1 else backend.stack(stacked)
