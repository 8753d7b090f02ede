"""Storage of weights: the storage plan, quantization recipes, sizes in bytes, and allocation from a backend.

A storage is a name: a plain type ("float32", "bfloat16", "float16") or a block format ("q4_k", see `kernels.layouts.forms`);
"q4_k:4" is the format with 4 groups per common scale instead of its default. Size checks, allocation and the fingerprint of the
weight cache all use the plan. Torch is imported only where memory is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec

if TYPE_CHECKING:
    from windlass.kernels import Backend, Storage, Weight


# From one tensor of a weight, as a checkpoint has it, to the name of its storage; None: it stays as it is. Neighbouring
# tensors of a weight with different storages are parts of their own.
Recipe: TypeAlias = Callable[[WeightSpec, StoredTensor, ModelSpec], str | None]


def int8_recipe(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """A signed byte each, with a scale for every 32. A table of its own is only gathered from, a row per token."""
    return None if weight.kind == "table" else "q8_0"


# A model this narrow has less to spare: rounding all of SmolLM2 135M to 4 bits costs 22 % of perplexity, a wide model a few.
_NARROW = 1024

# Storages by role. Measured on SmolLM2 135M, each role alone at 4 bits: values cost 6.6 % of perplexity for 3 % of the
# weights, down 6.1 % and up 4.3 % for a quarter each, gate 1.3 %, keys 0.8 %, out 0.6 %, queries 0.5 %.
_NARROW_MATRICES = {"q": "q5_k", "k": "q6_k", "v": "q6_k", "q k v": "q6_k", "gate": "q4_k"}

_WIDE_MATRICES = {"v": "q6_k", "q k v": "q5_k"}


def int4_recipe(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """4 bits where that costs little, more where it costs much; no more bytes than llama.cpp's Q4_K_M has."""
    if weight.kind == "table":
        return None
    narrow = spec.hidden_size < _NARROW
    if weight.kind not in ("matrix", "expert") or tensor.role is None:
        return "q8_0" if narrow else "q6_k"
    if narrow:
        return _NARROW_MATRICES.get(tensor.role, "q5_k")
    if tensor.role == "down" and _is_sensitive_layer(int(weight.name.split(".")[1]), len(spec.layers)):
        return "q5_k"
    return _WIDE_MATRICES.get(tensor.role, "q4_k")


def _is_sensitive_layer(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers and every third between, as llama.cpp has it in its mixtures."""
    eighth = layers // 8
    return layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2


RECIPES: dict[str, Recipe] = {"int8": int8_recipe, "int4": int4_recipe}

_PLAIN_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_PANEL = 16  # blocks lie in panels of so many rows, see `kernels.layouts.blocks`


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What decides the bytes of a form of blocks; the same facts as in `kernels.layouts.forms`, which needs torch beside it."""

    bits: int
    group: int
    super_groups: int
    parts: int

    def row_bytes(self, columns: int) -> int:
        groups = -(-columns // self.group)
        codes = groups * self.group * self.bits // 8
        if not self.super_groups:
            return codes + 2 * self.parts * groups
        return codes + self.parts * groups + 2 * self.parts * -(-groups // self.super_groups)


BLOCK_SIZES = {
    "q4_0": BlockSize(4, 32, 0, 1),
    "q4_1": BlockSize(4, 32, 0, 2),
    "q5_0": BlockSize(5, 32, 0, 1),
    "q5_1": BlockSize(5, 32, 0, 2),
    "q8_0": BlockSize(8, 32, 0, 1),
    "q4_k": BlockSize(4, 32, 8, 2),
    "q5_k": BlockSize(5, 32, 8, 2),
    "q6_k": BlockSize(6, 16, 16, 1),
}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Consecutive rows of a weight that are stored alike."""

    rows: int
    storage: str


# By the name of the weight, of those that have rows and columns; norms and scores are float32, biases of the compute dtype.
StoragePlan: TypeAlias = Mapping[str, tuple[StoredPart, ...]]


def is_block_format(storage: str) -> bool:
    return split_block_format(storage)[0] in BLOCK_SIZES


def split_block_format(storage: str) -> tuple[str, int | None]:
    """The name of a form and its number of groups to a common scale, None for the form's own."""
    name, _, supers = storage.partition(":")
    return name, int(supers) if supers else None


def plan_storage(
    spec: ModelSpec,
    weight_dtype: str,
    quantization: str = "none",
    kept: Mapping[str, str] | None = None,
    heads: str | None = None,
) -> dict[str, tuple[StoredPart, ...]]:
    """The plan of a model.

    weight_dtype: what has no other form. quantization: `compute.quantization`. kept: storages of a checkpoint's tensors, by
    name, that are loaded in the form they come in; only without a quantization. heads: the plain type of heads' matrices that
    lie in blocks there; None: the weight dtype.
    """
    recipe = RECIPES.get(quantization)
    kept = kept or {}
    plan = {}
    for weight in spec.weights():
        if len(weight.shape) < 2 or weight.kind == "score":
            continue
        parts: list[StoredPart] = []
        in_blocks = all(is_block_format(kept.get(tensor.name, weight_dtype)) for tensor in weight.stored)
        for tensor in weight.stored:
            storage = recipe(weight, tensor, spec) if recipe is not None else kept.get(tensor.name)
            storage = (storage if weight.kind != "heads" else heads if in_blocks else None) or weight_dtype
            if parts and parts[-1].storage == storage:
                parts[-1] = StoredPart(parts[-1].rows + tensor.rows, storage)
            else:
                parts.append(StoredPart(tensor.rows, storage))
        plan[weight.name] = tuple(parts)
    return plan


def plan_bytes(spec: ModelSpec, plan: StoragePlan) -> int:
    """Bytes of all that is planned, a little less than what loading takes: rows of padding, norms and biases are not counted."""
    return sum(part.rows * _row_bytes(weight, part) for weight in spec.weights() for part in plan.get(weight.name, ()))


def total_weight_bytes(spec: ModelSpec, plan: StoragePlan, compute_dtype: str) -> int:
    """Bytes of every weight: of what is planned with its rows of padding, of norms, numbers, scores and biases."""
    total = 0
    for weight in spec.weights():
        parts = plan.get(weight.name)
        if parts is None:
            item = _PLAIN_BYTES[compute_dtype] if weight.kind == "bias" else _PLAIN_BYTES["float32"]
            total += prod(weight.shape) * item
            continue
        for part in parts:
            rows = -(-part.rows // _PANEL) * _PANEL if is_block_format(part.storage) else part.rows
            total += rows * _row_bytes(weight, part)
    return total


def _row_bytes(weight: WeightSpec, part: StoredPart) -> int:
    name, supers = split_block_format(part.storage)
    if name in _PLAIN_BYTES:
        return weight.shape[1] * _PLAIN_BYTES[name]
    size = BLOCK_SIZES[name]
    if supers is not None:
        size = BlockSize(size.bits, size.group, supers, size.parts)
    return size.row_bytes(weight.shape[1])


def block_formats(spec: ModelSpec, plan: StoragePlan) -> list[str]:
    """The forms of blocks in a plan, that of most weights first."""
    counts: Counter[str] = Counter()
    for weight in spec.weights():
        for part in plan.get(weight.name, ()):
            if is_block_format(part.storage):
                counts[split_block_format(part.storage)[0]] += part.rows * weight.shape[1]
    return [name for name, _ in counts.most_common()]


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
