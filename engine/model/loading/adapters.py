"""From an adapter's files to an `Adapter`: nothing of it is used before all of it has been checked.

Knows PEFT's names of tensors and the specs of the model's weights, which say where each matrix lies. Takes no lock and
changes nothing, so it may run beside the steps.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.errors import LoadError
from windlass.engine.model.adapters.adapter import Adapter
from windlass.engine.model.families.text_part import text_module_name
from windlass.engine.model.loading.adapter_config import WEIGHTS, PeftConfig, read_peft_config, refuse
from windlass.engine.model.loading.row_order import row_order
from windlass.engine.model.loading.safetensors_file import read_tensors
from windlass.engine.model.loading.safetensors_header import SafetensorsHeader, read_header
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec
from windlass.kernels import LowRankPart, LowRankUpdate

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.(?:default\.)?weight")
_FLOATS = ("F32", "F16", "BF16", "F64")
_HEADER_ROOM = 16 << 20  # bytes of a file beside its tensors

Pair = tuple[Tensor, Tensor]  # A [r, K] and B [N, r]


@dataclass(frozen=True, slots=True)
class AdapterStorage:
    """How matrices are kept. compute: what the model computes in. stored: what they are rounded to, None where nobody says."""

    compute: torch.dtype
    device: torch.device
    stored: torch.dtype | None = None

    def matrix(self, matrix: Tensor) -> Tensor:
        """Of a float32 one, in the type that is kept. Raises RequestError where numbers are too large for it."""
        if self.stored is not None:
            found = matrix.to(self.device, self.stored)
            if not found.isfinite().all():
                name = str(self.stored).removeprefix("torch.")
                raise refuse(f"{WEIGHTS} holds numbers that are too large for `adapters.dtype={name}`", "not_finite")
            return found
        if self.device.type == "cpu" and self.compute == torch.float32:
            for narrow in (torch.bfloat16, torch.float16):  # it is read in every step
                found = matrix.to(narrow)
                if torch.equal(found.float(), matrix):
                    return found
        return matrix.to(self.device, self.compute)


def read_adapter(source: AdapterSource, spec: ModelSpec, storage: AdapterStorage, max_rank: int) -> Adapter:
    """The adapter in a directory.

    spec: of the model with its rows in the order of its original weights, whatever file they came from. Raises RequestError
    that says what in the files is at fault.
    """
    if spec.factored:
        raise refuse(
            "the weights of this GGUF file are multiplied by factors that it does not name and the adapter was trained without: "
            "serve the original Hugging Face model",
            "unsupported_adapter",
        )
    directory = Path(source.path)
    described = read_peft_config(directory, max_rank)
    found = _read(directory, described, spec, max_rank)
    digest = hashlib.sha256(str(storage.stored).encode())
    for module, (down, up) in sorted(found.items()):
        digest.update(f"{module} {tuple(down.shape)} {tuple(up.shape)} {described.scale_of(module)!r} ".encode())
        for tensor in (down, up):
            digest.update(tensor.contiguous().numpy().tobytes())
    parts: list[dict[str, LowRankUpdate]] = []
    for prefix, weights in spec.adapted_parts():
        changes = {weight.name: _joined(weight, prefix, found, described, storage) for weight in weights}
        parts.append({name: change for name, change in changes.items() if change is not None})
    info = AdapterInfo(
        source.adapter_id,
        source.name,
        source.path,
        rank=max(down.shape[0] for down, _ in found.values()),
        targets=tuple(sorted({module.rpartition(".")[2] for module in found})),
        num_bytes=sum(change.nbytes for part in parts for change in part.values()),
        digest=digest.hexdigest(),
    )
    return Adapter(info, tuple(parts))


def _modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix that may change, by the module's name."""
    return {
        prefix + stored.name.removesuffix(".weight"): (stored.rows, weight.shape[1])
        for prefix, weights in spec.adapted_parts()
        for weight in weights
        for stored in weight.stored
    }


def _read(directory: Path, described: PeftConfig, spec: ModelSpec, max_rank: int) -> dict[str, Pair]:
    """Both matrices of every changed module, float32, checked."""
    path, known = directory / WEIGHTS, _modules(spec)
    if not path.is_file():
        other = (
            " (adapter_model.bin may run code when it is read: convert it)"
            if (directory / "adapter_model.bin").exists()
            else ""
        )
        raise refuse(f"{directory.name} holds no {WEIGHTS}{other}")
    most = _HEADER_ROOM + sum(8 * max_rank * (rows + columns) for rows, columns in known.values())
    try:
        size = path.stat().st_size
        if size > most:
            raise refuse(f"{WEIGHTS} has {size} bytes, more than an adapter of this model of rank {max_rank} can have")
        header = read_header(path)
        names = _check_tensor_names(header, known, described)
        tensors: dict[str, Tensor] = {}

        def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            return tensors.setdefault(name, torch.empty(shape, dtype=dtype))

        for part in read_tensors(path, place):
            if not part.finite:
                raise refuse(f"tensor {part.name!r} holds NaN or infinite numbers", "not_finite")
    except (OSError, SafetensorError, LoadError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else str(error).replace(str(path), WEIGHTS)
        )
        raise refuse(f"cannot read {WEIGHTS}: {reason}") from None
    return {module: (tensors[down].float(), tensors[up].float()) for module, (down, up) in names.items()}


def _check_tensor_names(
    header: SafetensorsHeader, known: dict[str, tuple[int, int]], described: PeftConfig
) -> dict[str, tuple[str, str]]:
    """The names of A and B of every module in the file; shapes and types are those of an adapter of this model."""
    names: dict[str, dict[str, str]] = {}
    for name, tensor in header.tensors.items():
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise refuse(
                f"tensor {name[:200]!r} is not supported: only lora_A and lora_B of linear layers are",
                "unsupported_adapter",
            )
        module, which = matched[1], matched[2]
        module = next((name for name in (module, text_module_name(module)) if name in known), f"model.{module}")
        if module not in known:
            raise refuse(
                f"tensor {name[:200]!r}: this model has no linear layer {matched[1][:200]!r} that an adapter can change",
                "unknown_module",
            )
        if which in names.setdefault(module, {}):
            raise refuse(f"module {module!r} has two tensors lora_{which}")
        names[module][which] = name
        rank, (rows, columns) = described.rank_of(module), known[module]
        wanted = (rank, columns) if which == "A" else (rows, rank)
        if tensor.shape != wanted:
            raise refuse(
                f"tensor {name[:200]!r} has the shape {list(tensor.shape)[:4]} where this model and the adapter's rank ask for "
                f"{list(wanted)}: it is an adapter of another model or rank",
                "wrong_shape",
            )
        if tensor.dtype not in _FLOATS:
            raise refuse(f"tensor {name[:200]!r} has the type {str(tensor.dtype)[:20]!r}: use F32, F16 or BF16")
    if not names:
        raise refuse(f"{WEIGHTS} holds no tensors")
    for module, pair in names.items():
        if len(pair) < 2:
            raise refuse(f"module {module!r} has only one of lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in names.items()}


def _joined(
    weight: WeightSpec,
    prefix: str,
    found: dict[str, Pair],
    described: PeftConfig,
    storage: AdapterStorage,
) -> LowRankUpdate | None:
    """The changes of all that a weight is made of; None where nothing of it changes."""
    downs: list[Tensor] = []
    parts: list[LowRankPart] = []
    first = rank_first = 0
    for stored in weight.stored:
        module = prefix + stored.name.removesuffix(".weight")
        if module in found:
            down, up = found[module]
            own = storage.matrix(_ordered(up, stored))
            parts.append(LowRankPart.of(own, first, rank_first, described.scale_of(module)))
            downs.append(down)
            rank_first += len(down)
        first += stored.rows
    return LowRankUpdate.of(storage.matrix(torch.cat(downs)), parts) if downs else None


def _ordered(up: Tensor, stored: StoredTensor) -> Tensor:
    order = row_order(stored)
    return up if order is None else up[order]
