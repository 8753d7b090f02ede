"""Tiny checkpoints quantized with GPTQ, AWQ, compressed-tensors or to float8, each with a plain one of the same numbers.

The layouts are written from the description of the formats with Python integers, one code at a time, independent
of the reader. `numbers` is a float64 formula that is exact for these numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class IntegerWeight:
    """Integers [N, K] with zeros and scales [N, G] and the group of each column [K]: scale * (code - zero)."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: Tensor
    groups: np.ndarray
    bits: int

    def numbers(self) -> Tensor:
        """Return the numbers, float32 [N, K]."""
        scales = self.scales.double().numpy()[:, self.groups]
        return torch.from_numpy((self.codes - self.zeros[:, self.groups]) * scales).float()


def quantize(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    order: Sequence[int] | None = None,
) -> IntegerWeight:
    """Round a weight [N, K] to integers. order: the group of each column; None: groups of `group_size` successive columns."""
    columns = weight.shape[1]
    groups = np.arange(columns) // group_size if order is None else np.asarray(order)
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    w = weight.double().numpy()
    low, high = (np.stack([f(w[:, groups == g], axis=1) for g in range(count)], axis=1) for f in (np.min, np.max))
    if symmetric:
        steps, zeros = 2 * np.maximum(-low, high) / top, np.full(low.shape, 1 << (bits - 1))
    else:
        steps = (np.maximum(high, 0) - np.minimum(low, 0)) / top
        zeros = np.rint(-np.minimum(low, 0) / steps).astype(int).clip(1, top)
    scales = torch.from_numpy(steps).to(dtype)
    steps = scales.double().numpy()
    codes = np.rint(w / steps[:, groups] + zeros[:, groups]).astype(int).clip(0, top)
    return IntegerWeight(codes, zeros, scales, groups, bits)


def words(values: Sequence[int] | np.ndarray, bits: int) -> list[int]:
    """Pack numbers as a bit stream from the lowest bit of the first word, in signed 32-bit words."""
    stream = sum(int(value) << (bits * i) for i, value in enumerate(values))
    count = -(-len(values) * bits // 32)
    return [int(word) for word in np.frombuffer(stream.to_bytes(4 * count, "little"), "<i4")]


def padded_words(values: Sequence[int] | np.ndarray, bits: int) -> list[int]:
    """Pack as many complete numbers as fit into each 32-bit word, from the lowest bit."""
    each = 32 // bits
    return [word for first in range(0, len(values), each) for word in words(values[first : first + each], bits)]


def as_gptq(module: str, w: IntegerWeight, *, less_one: bool = True) -> dict[str, Tensor]:
    qzeros = np.array([words(w.zeros[:, g], w.bits) for g in range(w.zeros.shape[1])], dtype=np.int64)
    if less_one and w.bits != 3:
        qzeros -= sum(1 << shift for shift in range(0, 32, w.bits))  # of complete words
    elif less_one:
        qzeros = np.array([words(w.zeros[:, g] - 1, 3) for g in range(w.zeros.shape[1])], dtype=np.int64)
    return {
        f"{module}.qweight": torch.tensor([words(row, w.bits) for row in w.codes], dtype=torch.int32).t().contiguous(),
        f"{module}.qzeros": torch.from_numpy(qzeros.astype(np.uint64).astype(np.uint32).view(np.int32)),
        f"{module}.scales": w.scales.t().contiguous(),
        f"{module}.g_idx": torch.from_numpy(w.groups).int(),
    }


def as_awq(module: str, w: IntegerWeight) -> dict[str, Tensor]:
    def pack(numbers: np.ndarray) -> Tensor:
        """[R, N] -> [R, N / 8]."""
        eights = numbers.reshape(len(numbers), -1, 8)
        rows = [[words([eight[o] for o in AWQ_ORDER], 4)[0] for eight in row] for row in eights]
        return torch.tensor(rows, dtype=torch.int32)

    return {
        f"{module}.qweight": pack(w.codes.T),
        f"{module}.qzeros": pack(w.zeros.T),
        f"{module}.scales": w.scales.t().contiguous(),
    }


def as_packed(
    module: str, w: IntegerWeight, *, symmetric: bool = True, ordered: bool = True, padded: bool = False
) -> dict[str, Tensor]:
    pack = padded_words if padded else words
    made = {
        f"{module}.weight_packed": torch.tensor([pack(row, w.bits) for row in w.codes], dtype=torch.int32),
        f"{module}.weight_scale": w.scales.contiguous(),
        f"{module}.weight_shape": torch.tensor(w.codes.shape),
    }
    if not symmetric:
        zeros = torch.tensor([pack(w.zeros[:, g], w.bits) for g in range(w.zeros.shape[1])], dtype=torch.int32)
        made[f"{module}.weight_zero_point"] = zeros.t().contiguous()
    if not ordered:
        made[f"{module}.weight_g_idx"] = torch.from_numpy(w.groups).int()
    return made


def as_bytes(module: str, w: IntegerWeight, *, symmetric: bool = True) -> dict[str, Tensor]:
    made = {
        f"{module}.weight": torch.from_numpy(w.codes - 128).to(torch.int8),
        f"{module}.weight_scale": w.scales.contiguous(),
    }
    if not symmetric:
        made[f"{module}.weight_zero_point"] = torch.from_numpy(w.zeros - 128).to(torch.int8)
    return made


def as_floats(module: str, weight: Tensor, kind: str, end: str = "weight_scale") -> tuple[dict[str, Tensor], Tensor]:
    """Return float8 weights with a scale per "tensor", "row" or "32x48" block of rows and columns, and their numbers, float32."""
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "row": (1, columns)}.get(kind) or tuple(map(int, kind.split("x")))
    grid = torch.empty(-(-rows // height), -(-columns // width))
    codes, numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            here = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            grid[i, j] = weight[here].abs().max() / 448
            codes[here] = (weight[here] / grid[i, j]).to(torch.float8_e4m3fn)
            numbers[here] = codes[here].float() * grid[i, j]
    return {f"{module}.weight": codes, f"{module}.{end}": grid.view(()) if kind == "tensor" else grid}, numbers


# A module's name and its weight [N, K] -> tensors of the checkpoint, and their numbers.
Layout = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def make_quantized(
    source: Path,
    folder: Path,
    quantization: dict[str, Any],
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    leave: Sequence[str] = ("lm_head",),
) -> tuple[Path, Path]:
    """Save the model `source` quantized, and a model of the same plain numbers.

    dtype: of the tensors that are not quantized; None: unchanged. leave: modules that are not quantized.
    """
    tensors = {n: t if dtype is None else t.to(dtype) for n, t in load_file(source / "model.safetensors").items()}
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() < 2 or "embed_tokens" in name or module in leave:
            stored[name] = plain[name] = tensor
        else:
            made, plain[name] = layout(module, tensor.float())
            stored |= made
    quantized = folder / "quantized"
    for made_of, directory in ((stored, quantized), (plain, folder / "plain")):
        shutil.copytree(source, directory)
        save_file({n: t.contiguous() for n, t in made_of.items()}, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return quantized, folder / "plain"
