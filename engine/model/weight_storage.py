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


# Chooses the storage of one tensor of a weight; None: the weight dtype. Adjacent tensors with other storages are separate parts.
Recipe: TypeAlias = Callable[[WeightSpec, StoredTensor, ModelSpec], str | None]


def int8_recipe(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """8-bit blocks of 32 with one scale each. Separate embedding tables stay plain, since only one row per token is
    read from them."""
    return None if weight.kind == "table" else "q8_0"


# Narrow models lose more: rounding all of SmolLM2 135M to 4 bits raises perplexity by 22 %, of a wide model by a few percent.
_NARROW = 1024

# Storages by role. Measured on SmolLM2 135M with only one role at 4 bits, perplexity rises by 6.6 % for values (3 % of the
# weights), 6.1 % for down and 4.3 % for up (a quarter each), 1.3 % for gate, 0.8 % for keys, 0.6 % for out, 0.5 % for queries.
_NARROW_MATRICES = {"q": "q5_k", "k": "q6_k", "v": "q6_k", "q k v": "q6_k", "gate": "q4_k"}
_WIDE_MATRICES = {"v": "q6_k", "q k v": "q5_k"}


def int4_recipe(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """4 bits where that costs little, more bits elsewhere; no more bytes than llama.cpp's Q4_K_M."""
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
    """The first and last eighth of the layers and every third in between, as in llama.cpp's mixtures."""
    eighth = layers // 8
    return layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2


RECIPES: dict[str, Recipe] = {"int8": int8_recipe, "int4": int4_recipe}

_PLAIN_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PANEL_ROWS = 16  # of block formats, see `kernels.layouts.blocks`


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Sizes of a block format, repeated from `kernels.layouts.forms` because the kernels import torch."""

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
    """Consecutive rows of a weight with the same storage."""

    rows: int
    storage: str


# By name of the weight. It covers weights with rows and columns; norms and scores are float32, biases have the compute dtype.
StoragePlan: TypeAlias = Mapping[str, tuple[StoredPart, ...]]


def is_block_format(storage: str) -> bool:
    return split_block_format(storage)[0] in BLOCK_SIZES


def split_block_format(storage: str) -> tuple[str, int | None]:
    """Name of a block format and its number of groups per common scale; None: the format's default."""
    name, _, supers = storage.partition(":")
    return name, int(supers) if supers else None


def plan_storage(
    spec: ModelSpec,
    weight_dtype: str,
    quantization: str = "none",
    checkpoint_storages: Mapping[str, str] | None = None,
    per_head_dtype: str | None = None,
) -> dict[str, tuple[StoredPart, ...]]:
    """Storage plan of a model.

    weight_dtype: storage of everything without another one. quantization: `compute.quantization`. checkpoint_storages:
    storages of checkpoint tensors that are loaded without conversion, by tensor name; only without quantization.
    per_head_dtype: plain dtype of matrices of kind "heads" that the checkpoint has in blocks; None: the weight dtype.
    """
    recipe = RECIPES.get(quantization)
    stored = checkpoint_storages or {}
    plan = {}
    for weight in spec.weights():
        if len(weight.shape) < 2 or weight.kind == "score":
            continue
        parts: list[StoredPart] = []
        in_blocks = all(is_block_format(stored.get(tensor.name, weight_dtype)) for tensor in weight.stored)
        for tensor in weight.stored:
            storage = recipe(weight, tensor, spec) if recipe is not None else stored.get(tensor.name)
            if weight.kind == "heads":
                storage = per_head_dtype if in_blocks else None
            storage = storage or weight_dtype
            if parts and parts[-1].storage == storage:
                parts[-1] = StoredPart(parts[-1].rows + tensor.rows, storage)
            else:
                parts.append(StoredPart(tensor.rows, storage))
        plan[weight.name] = tuple(parts)
    return plan


def plan_bytes(spec: ModelSpec, plan: StoragePlan) -> int:
    """Bytes of all planned weights. Loading needs a little more: padding rows, norms and biases are not counted."""
    return sum(part.rows * _row_bytes(weight, part) for weight in spec.weights() for part in plan.get(weight.name, ()))


def total_weight_bytes(spec: ModelSpec, plan: StoragePlan, compute_dtype: str) -> int:
    """Bytes of every weight, with padding rows, norms, scores and biases."""
    total = 0
    for weight in spec.weights():
        parts = plan.get(weight.name)
        if parts is None:
            item = _PLAIN_BYTES[compute_dtype] if weight.kind == "bias" else _PLAIN_BYTES["float32"]
            total += prod(weight.shape) * item
            continue
        for part in parts:
            rows = -(-part.rows // _PANEL_ROWS) * _PANEL_ROWS if is_block_format(part.storage) else part.rows
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
    """Block formats in a plan, most frequent first."""
    counts: Counter[str] = Counter()
    for weight in spec.weights():
        for part in plan.get(weight.name, ()):
            if is_block_format(part.storage):
                counts[split_block_format(part.storage)[0]] += part.rows * weight.shape[1]
    return [name for name, _ in counts.most_common()]


def allocate(backend: Backend, specs: Iterable[WeightSpec], plan: StoragePlan) -> dict[str, Any]:
    """Uninitialised weights by name. Norms, numbers and scores are float32, biases have the compute dtype.

    plan: storages of weights with rows and columns; weights it does not name have the backend's weight dtype.
    """
    return {spec.name: _allocate_weight(backend, spec, plan.get(spec.name)) for spec in specs}


def kernel_storage(name: str) -> Storage:
    """The kernels' object for a storage name."""
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
