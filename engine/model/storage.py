"""The storage plan of a model: in what form each of its weights lies in memory.

Sizes, the checks before a start, allocation and the fingerprint of a weight cache all go by it. A storage is a name: a plain
type ("float32", "bfloat16", "float16") or a form of blocks ("q4_k", see `kernels.layouts.forms`); "q4_k:4" is the form with 4
groups to a common scale instead of its own number. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from windlass.engine.model.recipes import RECIPES
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.weight_spec import WeightSpec

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
