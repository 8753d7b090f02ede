"""Integers of every layout become blocks or numbers with exactly the stored values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers.quantized_checkpoints import (
    IntegerWeight,
    as_awq,
    as_bytes,
    as_floats,
    as_gptq,
    as_packed,
    quantize,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.quantization_config import Method, QuantizationConfig
from windlass.engine.model.loading import dequantize
from windlass.engine.model.loading.checkpoint import read_headers
from windlass.engine.model.loading.dequantize import decode_blocks, decode_numbers
from windlass.engine.model.loading.quantized_checkpoint import (
    ACT_ORDER,
    ODD_GROUPS,
    WIDE_SCALES,
    WIDE_ZEROS,
    ExpectedTensor,
    QuantizedTensor,
    describe_compressed,
    describe_gptq,
    fits_float16,
)
from windlass.kernels.layouts.weight_layouts import FORMS, BlockWeight, store_block_rows

ROWS, COLUMNS = 80, 192
DESCRIBE = {"gptq": describe_gptq, "gptq_v2": describe_gptq, "awq": describe_gptq}


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)) * 0.02 + 0.005


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return three parts of a weight, the last one shorter."""
    monkeypatch.setattr(dequantize, "_ELEMENTS", 32 * COLUMNS)


def described(
    layout: str, tensors: dict[str, Tensor], folder: Path, group_size: int | None = None, bits: tuple[int, ...] = ()
) -> QuantizedTensor:
    save_file(tensors, folder / "model.safetensors")
    method: Method = "AWQ" if layout == "awq" else "GPTQ"
    told = QuantizationConfig(method, group_size, zeros_less_one=layout == "gptq", bits=bits)
    found = DESCRIBE.get(layout, describe_compressed)(wanted(folder), told)
    assert found is not None and (found.rows, found.columns) == (ROWS, COLUMNS)
    return found


def wanted(folder: Path) -> ExpectedTensor:
    return ExpectedTensor(read_headers(folder), "m", ROWS, COLUMNS)


def sources_of(found: QuantizedTensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {role: tensors[source.name] for role, source in found.sources.items()}


def through_blocks(found: QuantizedTensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return the numbers of decoded blocks in memory."""
    assert found.storage is not None
    name, _, supers = found.storage.partition(":")
    form = replace(FORMS[name], super_groups=int(supers)) if supers else FORMS[name]
    held = BlockWeight.empty(ROWS, COLUMNS, form)
    for first, rows in decode_blocks(found, sources_of(found, tensors)):
        store_block_rows(held.narrow(first, len(rows.codes)), rows.codes, rows.scales, rows.supers)
    return held.dequantize()


def numbers(found: QuantizedTensor, tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([part for _, part in decode_numbers(found, sources_of(found, tensors))])


def stored(layout: str, w: IntegerWeight, *, symmetric: bool = True) -> dict[str, Tensor]:
    if layout == "awq":
        return as_awq("m", w)
    if layout in ("packed", "padded"):
        return as_packed("m", w, symmetric=symmetric, padded=layout == "padded")
    if layout == "bytes":
        return as_bytes("m", w, symmetric=symmetric)
    return as_gptq("m", w, less_one=layout == "gptq")


EXACT = [
    *(("gptq", bits, size, sym) for bits in (2, 3, 4) for size in (32, 128, COLUMNS) for sym in (True, False)),
    ("gptq", 8, 64, True),
    ("gptq_v2", 4, 64, False),
    ("gptq_v2", 8, COLUMNS, True),
    *(("awq", 4, size, sym) for size in (32, 64, 128) for sym in (True, False)),
    *(("packed", bits, size, True) for bits in range(1, 9) for size in (32, 96, COLUMNS)),
    *(("packed", bits, size, False) for bits in range(1, 8) for size in (64, COLUMNS)),
    *(("padded", bits, size, sym) for bits in (2, 3, 5, 6, 7) for size in (64, COLUMNS) for sym in (True, False)),
    ("bytes", 8, 32, True),
    ("bytes", 8, COLUMNS, True),
]
FORM = {4: ("q4_0", "q4_k"), 5: ("q5_0", "q5_k"), 6: ("q6_k", "q8_0"), 7: ("q8_0", "q8_0"), 8: ("q8_0", "")}


@pytest.mark.quick_cases(34)
@pytest.mark.parametrize(("layout", "bits", "group_size", "symmetric"), EXACT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_are_exact(
    layout: str, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype, weight: Tensor, tmp_path: Path
) -> None:
    if bits == 1:  # there is no step above zero
        weight = -weight.abs()
    w = quantize(weight, bits, group_size, symmetric=symmetric, dtype=dtype)
    tensors = stored(layout, w, symmetric=symmetric)
    found = described(layout, tensors, tmp_path, group_size, (bits,) if layout == "padded" else ())
    assert found.bits == bits
    by_zeros = not (symmetric and (layout, bits) != ("gptq", 3))  # a stream of 3 bits is not checked
    assert found.storage is not None and found.storage.partition(":")[0] == FORM[max(bits, 4)][by_zeros]
    assert torch.equal(through_blocks(found, tensors), w.numbers())
    assert torch.equal(numbers(found, tensors), w.numbers())


@pytest.mark.parametrize("layout", ["gptq", "packed"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_in_activation_order(layout: str, symmetric: bool, weight: Tensor, tmp_path: Path) -> None:
    order = np.random.default_rng(5).permutation(np.arange(COLUMNS) // 32).tolist()
    w = quantize(weight, 4, 32, symmetric=symmetric, order=order)
    tensors = as_gptq("m", w) if layout == "gptq" else as_packed("m", w, symmetric=symmetric, ordered=False)
    found = described(layout, tensors, tmp_path, 32)
    assert (found.storage, found.reason) == (None, ACT_ORDER)
    assert torch.equal(numbers(found, tensors), w.numbers())
    name = found.sources["order"].name
    for wrong in (6, -1):
        damaged = {**tensors, name: tensors[name].clone().index_fill_(0, torch.tensor([7]), wrong)}
        if layout == "packed" and wrong == -1:  # which means no order
            assert described(layout, damaged, tmp_path, 32).storage is not None
            continue
        with pytest.raises(LoadError, match=r"names groups outside 0 \.\. 5"):
            numbers(described(layout, damaged, tmp_path, 32), damaged)


def test_trivial_order_fits_blocks(weight: Tensor, tmp_path: Path) -> None:
    w = quantize(weight, 4, 32, order=(np.arange(COLUMNS) // 32).tolist())
    tensors = as_packed("m", w, ordered=False)
    found = described("packed", tensors, tmp_path)
    assert found.storage == "q4_0"
    assert torch.equal(through_blocks(found, tensors), w.numbers())


@pytest.mark.parametrize(
    ("layout", "bits", "group_size", "symmetric", "dtype", "reason"),
    [
        ("gptq", 8, 32, False, torch.float16, WIDE_ZEROS),
        ("packed", 8, 32, False, torch.float16, WIDE_ZEROS),
        ("bytes", 8, COLUMNS, False, torch.float16, WIDE_ZEROS),
        ("gptq", 4, 24, True, torch.float16, ODD_GROUPS),
        ("packed", 4, 48, False, torch.float16, ODD_GROUPS),
        ("gptq", 4, 32, True, torch.float32, WIDE_SCALES),
        ("bytes", 8, COLUMNS, True, torch.float32, WIDE_SCALES),
    ],
)
def test_unsuitable_layouts_are_dequantized(
    layout: str,
    bits: int,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
    reason: str,
    weight: Tensor,
    tmp_path: Path,
) -> None:
    w = quantize(weight, bits, group_size, symmetric=symmetric, dtype=dtype)
    tensors = stored(layout, w, symmetric=symmetric)
    found = described(layout, tensors, tmp_path, group_size)
    assert (found.storage, found.reason) == (None, reason)
    assert torch.equal(numbers(found, tensors), w.numbers())


def test_zero_point_of_zero_borrows_from_the_next_one(weight: Tensor, tmp_path: Path) -> None:
    """The first format of GPTQ subtracts one from entire words."""
    w = quantize(weight, 4, 32, symmetric=False)
    w.zeros[::3] = 0
    tensors = as_gptq("m", w)
    found = described("gptq", tensors, tmp_path, 32)
    assert torch.equal(through_blocks(found, tensors), w.numbers())


def test_lowest_eight_bit_code(tmp_path: Path) -> None:
    w = quantize(torch.randn(ROWS, COLUMNS), 8, 32)
    w.codes[:, ::5] = 0
    for layout in ("gptq", "packed", "bytes"):
        tensors = stored(layout, w)
        found = described(layout, tensors, tmp_path, 32)
        assert torch.equal(through_blocks(found, tensors), w.numbers())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (ROWS,), (ROWS, 1)])
def test_scales_per_tensor_and_per_row(shape: tuple[int, ...], weight: Tensor, tmp_path: Path) -> None:
    w = quantize(weight, 8, COLUMNS, dtype=torch.bfloat16)
    if shape in ((), (1,), (1, 1)):
        w.scales[:] = w.scales[0, 0]
    tensors = as_bytes("m", w)
    tensors["m.weight_scale"] = w.scales[: 1 if len(w.scales[:1]) == np.prod(shape) else ROWS].reshape(shape)
    found = described("bytes", tensors, tmp_path)
    assert found.storage == "q8_0"
    assert torch.equal(through_blocks(found, tensors), w.numbers())
    assert torch.equal(numbers(found, tensors), w.numbers())


@pytest.mark.parametrize("kind", ["tensor", "row", "40x48", "16x64"])
@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv"])
def test_float8_weights(kind: str, end: str, weight: Tensor, tmp_path: Path) -> None:
    tensors, want = as_floats("m", weight, kind, end)
    found = described("floats", tensors, tmp_path)
    assert found.storage is None
    assert torch.equal(numbers(found, tensors), want)
    assert torch.equal(want, as_transformers(tensors["m.weight"], tensors[f"m.{end}"]))


def as_transformers(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 numbers that transformers makes of a float8 weight."""
    return Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)


def test_float8_scales_that_are_powers_of_two(weight: Tensor, tmp_path: Path) -> None:
    """Float8 without sign or mantissa, as in `scale_fmt: ue8m0`."""
    tensors, _ = as_floats("m", weight, "40x48", "weight_scale_inv")
    scales = torch.exp2(torch.arange(8).view(2, 4) * 5.0 - 20)
    tensors["m.weight_scale_inv"] = scales.to(torch.float8_e8m0fnu)
    found = described("floats", tensors, tmp_path)
    wide = scales.repeat_interleave(40, 0).repeat_interleave(48, 1)
    assert torch.equal(numbers(found, tensors), tensors["m.weight"].float() * wide)
    assert torch.equal(numbers(found, tensors), as_transformers(tensors["m.weight"], tensors["m.weight_scale_inv"]))


def test_float8_with_partial_last_blocks(weight: Tensor, tmp_path: Path) -> None:
    """Only config.json gives the block size then."""
    tensors, want = as_floats("m", weight, "48x128")
    save_file(tensors, tmp_path / "model.safetensors")
    found = describe_compressed(wanted(tmp_path), QuantizationConfig("FP8", block=(48, 128)))
    assert found is not None
    assert torch.equal(numbers(found, tensors), want)
    with pytest.raises(LoadError, match=r"shape \[2, 2\], which are not the scales of a weight \[80, 192\]"):
        describe_compressed(wanted(tmp_path), QuantizationConfig("FP8", block=(64, 64)))


HALVES = {
    torch.bfloat16: (
        [0.0, -0.0, 2.0**-17, -1.9921875 * 2.0**-17, 2.0**-24, 1.5, 65280.0],
        [2.0**-25, 1.5 * 2.0**-24, 65536.0],
    ),
    torch.float32: ([0.0, 2.0**-24, 1.0009765625, -65504.0], [1.00048828125, 0.1, 65536.0, float("nan")]),
}


@pytest.mark.parametrize("dtype", HALVES)
def test_float16_numbers_are_detected(dtype: torch.dtype, tmp_path: Path) -> None:
    yes, no = HALVES[dtype]

    def fits(values: list[float]) -> bool:
        tensor = torch.tensor(values, dtype=dtype)
        assert torch.equal(tensor.double(), torch.tensor(values).double()) or values[-1] != values[-1]
        save_file({"scales": tensor}, tmp_path / "model.safetensors")
        return fits_float16(read_headers(tmp_path)["scales"])

    assert fits(yes) and all(fits([value]) for value in yes)
    for value in no:
        assert not fits([*yes, value]), value


def test_all_float16_numbers_in_bfloat16_and_float32(tmp_path: Path) -> None:
    """All bit patterns of bfloat16; no others are accepted."""
    patterns = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    exact = patterns.half().to(torch.bfloat16) == patterns
    save_file({"yes": patterns[exact], "no": patterns[~exact][:1]}, tmp_path / "model.safetensors")
    located = read_headers(tmp_path)
    assert fits_float16(located["yes"]) and not fits_float16(located["no"])
    for pattern in patterns[~exact & patterns.isfinite()][::97]:
        save_file({"no": pattern.reshape(1)}, tmp_path / "model.safetensors")
        assert not fits_float16(read_headers(tmp_path)["no"])


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    save_file({"scales": torch.zeros(64, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    located = read_headers(tmp_path)["scales"]
    located.file.write_bytes(located.file.read_bytes()[:-8])
    with pytest.raises(LoadError, match="ends inside tensor 'scales'"):
        fits_float16(located)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_padded_words_are_detected_by_their_number(bits: int, weight: Tensor, tmp_path: Path) -> None:
    w = quantize(weight, bits, 64)
    tensors = as_packed("m", w, padded=True)
    found = described("padded", tensors, tmp_path)
    assert (found.bits, found.packing) == (bits, "padded")
    assert torch.equal(numbers(found, tensors), w.numbers())


def test_codes_of_another_width_are_refused(weight: Tensor, tmp_path: Path) -> None:
    tensors = as_packed("m", quantize(weight, 8, 64))
    assert described("packed", tensors, tmp_path, bits=(4, 8)).bits == 8
    with pytest.raises(LoadError, match=r"192 numbers of 4 bits do not fit"):
        described("packed", tensors, tmp_path, bits=(4,))
