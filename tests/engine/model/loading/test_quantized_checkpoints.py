"""Quantized checkpoints, BitNet and MXFP4: weights equal their numbers, logits equal a model of these numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_helpers.quantized_checkpoints import (
    AWQ,
    FP8,
    GPTQ,
    Layout,
    as_awq,
    as_bytes,
    as_floats,
    as_gptq,
    as_packed,
    compressed,
    make_quantized,
    quantize,
)
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.bitnet import AutoBitLinear, BitLinear

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.model.loading import quantized_checkpoint
from windlass.engine.model.loading.dequantize import codes_of_fp4, scales_of_fp4
from windlass.engine.model.loading.loader import LoadedModel, load_model
from windlass.engine.model.loading.preflight import check_start
from windlass.engine.model.weight_storage import block_formats
from windlass.kernels import FORMS, BlockWeight, PanelWeight, StackedWeight, Weight

TOLERANCE = 1e-5  # of the largest reference logit, without rounding
ROUNDED = 0.05  # of their norm, for rows rounded to 8 bits: these models amplify differences
EXACT: dict[str, Any] = {"dtype": "float32", "activations": "float32"}
IDS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
HALF, BRAIN = torch.float16, torch.bfloat16


def gptq(bits: int = 4, size: int = 32, *, symmetric: bool = True, v2: bool = False, act_order: bool = False) -> Layout:
    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        order = np.random.default_rng(5).permutation(np.arange(weight.shape[1]) // size).tolist() if act_order else None
        w = quantize(weight, bits, size, symmetric=symmetric, order=order)
        return as_gptq(module, w, less_one=not v2), w.numbers()

    return layout


def awq(size: int = 32, *, symmetric: bool = False, dtype: torch.dtype = HALF) -> Layout:
    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        w = quantize(weight, 4, size, symmetric=symmetric, dtype=dtype)
        return as_awq(module, w), w.numbers()

    return layout


def packed(bits: int, size: int, *, symmetric: bool = True, dtype: torch.dtype = BRAIN, padded: bool = False) -> Layout:
    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        w = quantize(weight, bits, size, symmetric=symmetric, dtype=dtype)
        return as_packed(module, w, symmetric=symmetric, padded=padded), w.numbers()

    return layout


def int8_recipe(size: int = 1 << 20, *, symmetric: bool = True, dtype: torch.dtype = BRAIN) -> Layout:
    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        w = quantize(weight, 8, size, symmetric=symmetric, dtype=dtype)
        return as_bytes(module, w, symmetric=symmetric), w.numbers()

    return layout


def floats(kind: str, end: str = "weight_scale") -> Layout:
    return lambda module, weight: as_floats(module, weight, kind, end)


KEPT: dict[str, tuple[dict[str, Any], Layout, list[str]]] = {
    "gptq": (GPTQ, gptq(), ["q4_0"]),
    "gptq v2 with zero points": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(symmetric=False, v2=True), ["q4_k"]),
    "gptq with zero points": ({**GPTQ, "sym": False}, gptq(symmetric=False), ["q4_k"]),
    "gptq per channel": ({**GPTQ, "group_size": -1}, gptq(size=1 << 20), ["q4_0"]),
    "gptq groups cut off": ({**GPTQ, "group_size": 64}, gptq(size=64), ["q4_0"]),
    "gptq 3 bits": ({**GPTQ, "bits": 3}, gptq(3), ["q4_k"]),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, gptq(8), ["q8_0"]),
    "awq": (AWQ, awq(), ["q4_k"]),
    "packed": (compressed("pack-quantized"), packed(4, 32), ["q4_0"]),
    "packed with zero points": (
        compressed("pack-quantized", symmetric=False),
        packed(4, 32, symmetric=False),
        ["q4_k"],
    ),
    "padded 7 bits": (compressed("pack-quantized", num_bits=7), packed(7, 32, padded=True), ["q8_0"]),
    "packed 6 bits": (compressed("pack-quantized", num_bits=6), packed(6, 32), ["q6_k"]),
    "int8": (compressed("int-quantized", num_bits=8), int8_recipe(), ["q8_0"]),
}
DEQUANTIZED: dict[str, tuple[dict[str, Any], Layout, str]] = {
    "act order": ({**GPTQ, "desc_act": True}, gptq(act_order=True), quantized_checkpoint.ACT_ORDER),
    "gptq 8 bits with zero points": (
        {**GPTQ, "bits": 8, "sym": False},
        gptq(8, symmetric=False),
        quantized_checkpoint.WIDE_ZEROS,
    ),
    "groups of 16": ({**AWQ, "group_size": 16}, awq(16), quantized_checkpoint.ODD_GROUPS),
    "wide scales": (AWQ, awq(dtype=torch.float32), quantized_checkpoint.WIDE_SCALES),
    "int8 with zero points": (
        compressed("int-quantized", num_bits=8),
        int8_recipe(symmetric=False),
        quantized_checkpoint.WIDE_ZEROS,
    ),
    "fp8": (FP8, floats("tensor"), quantized_checkpoint.FLOATS),
    "fp8 in blocks": (
        {**FP8, "weight_block_size": [48, 40]},
        floats("48x40", "weight_scale_inv"),
        quantized_checkpoint.FLOATS,
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, floats("row"), quantized_checkpoint.FLOATS),
    "float-quantized": (
        compressed("float-quantized", num_bits=8, type="float"),
        floats("row"),
        quantized_checkpoint.FLOATS,
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


def assert_same_logits(model: Path, plain: Path, *, exact: bool) -> None:
    core = make_core(model, **(EXACT if exact else {}))
    request = greedy("a", IDS, 4)
    result = run(core, [request])["a", 0]
    reference = Reference(plain, specs_of(core, request), ["full_attention"]).logits(IDS + result.token_ids)
    want, got = reference[len(IDS) - 1 : -1], torch.stack(result.logits)
    if exact:
        assert (got - want).abs().max() < TOLERANCE * want.abs().max()
    else:
        assert 0 < (got - want).norm() < ROUNDED * want.norm()


def numbers_of(weight: Weight) -> Tensor:
    if isinstance(weight, StackedWeight):
        return torch.cat([numbers_of(part) for part in weight.parts])
    if isinstance(weight, BlockWeight):
        return weight.dequantize()
    return (weight.unpack() if isinstance(weight, PanelWeight) else weight).float()


def load(model: Path, **options: Any) -> LoadedModel:
    return load_model(engine_config(model, device="cpu", **options))


def assert_same_numbers(model: Path, plain: Path, rounded: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    """Assert equal bits of every weight. Those that are not in blocks are `rounded` to a dtype."""
    loaded, other = load(model, **options), load(plain, dtype="float32")
    for (name, mine), theirs in zip(loaded.decoder.weights().items(), other.decoder.tensors(), strict=True):
        want = numbers_of(theirs)
        if not isinstance(mine, (BlockWeight, StackedWeight)):
            want = want.to(rounded).float()
        assert torch.equal(numbers_of(mine), want), name
    return loaded


def forms(loaded: LoadedModel) -> list[str]:
    return block_formats(loaded.decoder.spec, loaded.decoder.plan)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("case", KEPT)
def test_suitable_weights_are_stored_as_blocks(case: str, llama: Path, tmp_path: Path) -> None:
    quantization, layout, stored = KEPT[case]
    model, plain = make_quantized(llama, tmp_path, quantization, layout)
    loaded = assert_same_numbers(model, plain)
    assert forms(loaded) == stored
    assert not loaded.notices
    method = {"gptq": "GPTQ", "awq": "AWQ"}.get(quantization["quant_method"], "compressed-tensors")
    assert loaded.quantization == f"{method} ({stored[0]})"
    assert_same_logits(model, plain, exact=True)
    assert_same_logits(model, plain, exact=False)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("case", DEQUANTIZED)
def test_unsuitable_weights_are_dequantized_with_a_notice(case: str, llama: Path, tmp_path: Path) -> None:
    quantization, layout, reason = DEQUANTIZED[case]
    model, plain = make_quantized(llama, tmp_path, quantization, layout)
    loaded = assert_same_numbers(model, plain)
    assert forms(loaded) == [] and loaded.quantization is None
    (notice,) = loaded.notices
    assert re.match(rf"14 of 14 quantized weights \(.*\) are stored as float32, .*: {re.escape(reason)}$", notice)
    assert_same_logits(model, plain, exact=True)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_dequantized_numbers_have_the_dtype_of_the_other_weights(
    dtype: torch.dtype, llama: Path, tmp_path: Path
) -> None:
    model, plain = make_quantized(llama, tmp_path, FP8, floats("row"), dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    assert f" are stored as {name}, " in assert_same_numbers(model, plain, dtype).notices[0]
    assert " are stored as float32, " in assert_same_numbers(model, plain, dtype="float32").notices[0]


def test_mixed_storage_of_a_weight(llama: Path, tmp_path: Path) -> None:
    """A weight of the decoder may be stored in two ways. The notice has counts by reason."""

    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        kind = awq(16) if "v_proj" in module else awq(dtype=torch.float32) if "down" in module else awq()
        return kind(module, weight)

    model, plain = make_quantized(llama, tmp_path, AWQ, layout)
    loaded = assert_same_numbers(model, plain)
    assert isinstance(loaded.decoder.layers[0].mixer.weights.qkv, StackedWeight)
    (notice,) = loaded.notices
    assert notice.startswith("4 of 14 quantized weights (AWQ)")
    assert f"{quantized_checkpoint.ODD_GROUPS} (2)" in notice and f"{quantized_checkpoint.WIDE_SCALES} (2)" in notice
    assert_same_logits(model, plain, exact=True)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "glm4"])
def test_other_families_have_the_numbers_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Fused tensors, and rows in another order."""
    source = make_model(family, tmp_path / "source", num_hidden_layers=2)
    for name, quantization, layout in (("kept", GPTQ, gptq()), ("act", GPTQ, gptq(act_order=True))):
        model, plain = make_quantized(source, tmp_path / name, quantization, layout)
        assert bool(forms(assert_same_numbers(model, plain))) == (name == "kept")


def test_quantized_head(llama: Path, tmp_path: Path) -> None:
    model, plain = make_quantized(llama, tmp_path, GPTQ, gptq(), leave=())
    assert isinstance(assert_same_numbers(model, plain).decoder.head, BlockWeight)
    assert_same_logits(model, plain, exact=True)


def test_additional_tensors_are_checked(llama: Path, tmp_path: Path) -> None:
    """Scales of activations and cached keys have no effect. Biases that the model does not have must be zero."""
    model, plain = make_quantized(llama, tmp_path, compressed("int-quantized", num_bits=8), int8_recipe())
    path = model / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.0.self_attn"
    beside = {
        f"{layer}.{n}": torch.ones(1) for n in ("q_proj.input_scale", "k_scale", "v_scale", "k_proj.output_scale")
    }
    save_file({**tensors, **beside, f"{layer}.q_proj.bias": torch.zeros(64)}, path)
    assert_same_numbers(model, plain)
    save_file({**tensors, f"{layer}.q_proj.bias": torch.ones(64)}, path)
    with pytest.raises(LoadError, match=r"unexpected tensor 'model.layers.0.self_attn.q_proj.bias'"):
        load(model)
    save_file({**tensors, f"{layer}.q_proj.surprise": torch.zeros(64)}, path)
    with pytest.raises(LoadError, match="unexpected tensor"):
        load(model)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_too_large_scales_are_named(dtype: str, llama: Path, tmp_path: Path) -> None:
    """All scales and codes are finite, but not their products."""
    model, _ = make_quantized(llama, tmp_path, FP8, floats("row"))
    tensors = load_file(model / "model.safetensors")
    tensors[f"{Q}.weight_scale"][5] = 1e38
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(LoadError, match=rf"'{Q}\.weight' contains numbers that are NaN or infinite"):
        load(model, dtype=dtype)


def test_sharded_quantized_checkpoint(llama: Path, tmp_path: Path) -> None:
    """The tensors of one weight may be in two files."""
    model, plain = make_quantized(llama, tmp_path, GPTQ, gptq())
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = ["model-1.safetensors", "model-2.safetensors"]
    index = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if index[n] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same_numbers(model, plain)


def test_quantized_checkpoint_is_not_quantized_again(llama: Path, tmp_path: Path) -> None:
    model, _ = make_quantized(llama, tmp_path / "integers", GPTQ, gptq())
    with pytest.raises(LoadError, match=r"is quantized already \(GPTQ\): leave `compute.quantization=int8` out"):
        check_start(engine_config(model, quantization="int8"))
    model, plain = make_quantized(llama, tmp_path / "floats", FP8, floats("row"))
    loaded = load(model, quantization="int8")  # of which nothing is stored unchanged
    assert (forms(loaded), loaded.notices) == (["q8_0"], ())
    other = load(plain, quantization="int8")
    for mine, theirs in zip(loaded.decoder.tensors(), other.decoder.tensors(), strict=True):
        assert torch.equal(numbers_of(mine), numbers_of(theirs))


Damage = Callable[[dict[str, Tensor]], object]


def remove(name: str) -> Damage:
    return lambda tensors: tensors.pop(name)


def change(name: str, how: Callable[[Tensor], Tensor]) -> Damage:
    return lambda tensors: tensors.update({name: how(tensors[name]).contiguous()})


Q = "model.layers.1.self_attn.q_proj"
INT8 = compressed("int-quantized", num_bits=8)
PACKED = compressed("pack-quantized")
DAMAGED: dict[str, tuple[dict[str, Any], Layout, Damage, str]] = {
    "no scales": (GPTQ, gptq(), remove(f"{Q}.scales"), rf"tensor '{Q}.scales' is missing.*download it again"),
    "no zero points": (AWQ, awq(), remove(f"{Q}.qzeros"), rf"tensor '{Q}.qzeros' is missing"),
    "no scale": (FP8, floats("row"), remove(f"{Q}.weight_scale"), rf"tensor '{Q}.weight_scale' is missing"),
    "no scale of bytes": (INT8, int8_recipe(), remove(f"{Q}.weight_scale"), "is missing"),
    "no codes": (GPTQ, gptq(), remove(f"{Q}.qweight"), "unexpected tensor|is missing"),
    "no shape": (PACKED, packed(4, 32), remove(f"{Q}.weight_shape"), "weight_shape' is missing"),
    "other shape": (PACKED, packed(4, 32), change(f"{Q}.weight_shape", lambda t: t + 1), r"states \[65, 65\] where"),
    "codes too short": (GPTQ, gptq(), change(f"{Q}.qweight", lambda t: t[:-1]), "do not fit.*config.json"),
    "codes too narrow": (GPTQ, gptq(), change(f"{Q}.qweight", lambda t: t[:, 1:]), r"shape \[8, 63\] where .*\[8, 64\]"),
    "codes of another rank": (PACKED, packed(4, 32), change(f"{Q}.weight_packed", lambda t: t.flatten()), "do not fit"),
    "zeros too narrow": (AWQ, awq(), change(f"{Q}.qzeros", lambda t: t[:, 1:]), r"shape \[2, 7\] where .*\[2, 8\]"),
    "scales too long": (GPTQ, gptq(), change(f"{Q}.scales", lambda t: t.repeat(4, 1)), r"'.*scales' has .*|shape \[2, 8\]"),
    "groups that do not divide": (AWQ, awq(), change(f"{Q}.scales", lambda t: t.repeat(2, 1)[:3]), "3 groups for 64 columns"),
    "a type": (GPTQ, gptq(), change(f"{Q}.scales", lambda t: t.double()), "F64 where F16 or BF16 or F32"),
    "an order out of range": (
        GPTQ, gptq(act_order=True), change(f"{Q}.g_idx", lambda t: t + 1), rf"'{Q}.g_idx' names groups outside 0 \.\. 1"
    ),
    "an order too short": (GPTQ, gptq(), change(f"{Q}.g_idx", lambda t: t[1:]), r"shape \[63\] where .*\[64\]"),
    "NaN": (GPTQ, gptq(), change(f"{Q}.scales", lambda t: t * torch.nan), rf"'{Q}.scales' contains numbers that are NaN"),
    "infinity": (INT8, int8_recipe(), change(f"{Q}.weight_scale", lambda t: t / 0), "NaN or infinite"),
    "NaN of 8 bits": (
        FP8, floats("row"), change(f"{Q}.weight", lambda t: (t.float() * torch.nan).to(t.dtype)), "NaN or infinite"
    ),
    "blocks": (FP8, floats("16x16"), change(f"{Q}.weight_scale", lambda t: t[1:]), r"shape \[3, 4\], which are not"),
}  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    quantization, layout, damage, says = DAMAGED[case]
    model, _ = make_quantized(llama, tmp_path, quantization, layout)
    tensors = load_file(model / "model.safetensors")
    damage(tensors)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(LoadError) as error:
        load(model)
    assert re.search(says, str(error.value)) and "\n" not in str(error.value)


def test_description_imports_no_torch(llama: Path, tmp_path: Path) -> None:
    model, _ = make_quantized(llama, tmp_path, AWQ, awq())
    code = (
        "import sys\nfrom windlass.engine.interface.config import EngineConfig\n"
        "from windlass.engine.model.loading.preflight import check_start\n"
        f"print(len(check_start(EngineConfig(model={str(model)!r})).quantized.storages()))\n"
        "print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split("\n")[:2] == ["14", "[]"]


# -- BitNet ------------------------------------------------------------------------------------------------------------

MULTIPLIED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DIVIDED = {"quant_method": "bitnet", "modules_to_not_convert": None}  # the older kind of layer is the default
KINDS = {"multiplied": MULTIPLIED, "divided": DIVIDED}
DOWN = "model.layers.1.mlp.down_proj"


def packed_trits(ternary: Tensor) -> Tensor:
    """Pack rows of -1, 0 and 1 as the checkpoint does, one number at a time."""
    quarter = -(-len(ternary) // 4)
    rows = [[0] * ternary.shape[1] for _ in range(quarter)]
    for i, row in enumerate(ternary.int().tolist()):
        for j, number in enumerate(row):
            rows[i % quarter][j] += (number + 1) << (2 * (i // quarter))
    return torch.tensor(rows, dtype=torch.uint8)


def layout(*, divided: bool) -> Layout:
    def made(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.abs().mean()
        ternary = (weight / size).round().clamp(-1, 1)
        scale = (1 / size if divided else size).to(torch.bfloat16).view(1)
        # The divisor is rounded to float16 if weights are stored as blocks.
        factor = (1 / scale.float()).half().float() if divided else scale.float()
        return {f"{module}.weight": packed_trits(ternary), f"{module}.weight_scale": scale}, ternary * factor

    return made


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_model("bitnet", folder / "source", num_hidden_layers=2, attention_bias=False)
    return make_quantized(source, folder, KINDS[request.param], layout(divided=request.param == "divided"))


def test_ternary_weights_give_the_logits_of_their_numbers(models: tuple[Path, Path]) -> None:
    published, plain = models
    for options, tolerance in (({"dtype": "float32", "activations": "float32"}, 1e-5), ({}, 0.05)):
        core, request = make_core(published, **options), greedy("a", IDS, 4)
        assert core.info.quantization == "BitNet (q4_0)"
        result = run(core, [request])["a", 0]
        want = Reference(plain, specs_of(core, request), ["full_attention"]).logits(IDS + result.token_ids)
        want, got = want[len(IDS) - 1 : -1], torch.stack(result.logits)
        assert (got - want).norm() < tolerance * want.norm()


def test_products_equal_the_layers_of_transformers(models: tuple[Path, Path]) -> None:
    """They round inputs to 8 bits with one scale per row. Here 32 numbers share a scale."""
    loaded = load_model(engine_config(models[0], device="cpu"))
    tensors, config = load_file(models[0] / "model.safetensors"), json.loads((models[0] / "config.json").read_text())
    kind = AutoBitLinear if config["quantization_config"].get("linear_class") == "autobitlinear" else BitLinear
    layer = kind(96, 64, bias=False, dtype=torch.float32)
    layer.weight_scale.copy_(tensors[f"{DOWN}.weight_scale"])
    weight = loaded.decoder.weights()["layers.1.down"]
    assert isinstance(weight, BlockWeight) and weight.form == FORMS["q4_0"]
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        if kind is AutoBitLinear:
            layer.weight.copy_(weight.dequantize() / float(tensors[f"{DOWN}.weight_scale"]))
            assert set(layer.weight.unique().tolist()) <= {-1, 0, 1}
        else:
            layer.weight.copy_(tensors[f"{DOWN}.weight"])
        want = layer(x)
    got = loaded.decoder.backend.linear(x, weight)
    assert (got - want).norm() < 0.02 * want.norm()
    assert (x @ weight.dequantize().t() - want).norm() < 0.02 * want.norm()


def test_method_is_known_without_torch(models: tuple[Path, Path]) -> None:
    model = check_start(engine_config(models[0]))
    assert model.quantized is not None and len(model.quantized.storages()) == 14 and not model.spec.notices
    with pytest.raises(LoadError, match=r"is quantized already \(BitNet\): leave `compute.quantization=int8` out"):
        check_start(engine_config(models[0], quantization="int8"))


TernaryDamage = Callable[[dict[str, Tensor]], Any]
DAMAGED_TERNARY: dict[str, tuple[TernaryDamage, str]] = {
    "no scale": (lambda t: t.pop(f"{DOWN}.weight_scale"), r"down_proj.weight_scale' is missing.*download it again"),
    "a scale of nothing": (lambda t: t[f"{DOWN}.weight_scale"].zero_(), r"down_proj.weight_scale' is zero"),
    "no number": (lambda t: t[f"{DOWN}.weight_scale"].fill_(torch.nan), "NaN or infinite"),
    "too short": (
        lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"][1:].clone()}),
        r"shape \[15, 96\] where config.json asks for \[16, 96\]",
    ),
    "many scales": (lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(64)}), r"shape \[64\] where .*\[1\]"),
}


@pytest.mark.parametrize("case", DAMAGED_TERNARY)
@pytest.mark.parametrize("models", ["multiplied"], indirect=True)
def test_damaged_files_are_refused(case: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    damage, says = DAMAGED_TERNARY[case]
    tensors = load_file(models[0] / "model.safetensors")
    damage(tensors)
    (tmp_path / "config.json").write_text((models[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=says) as error:
        load_model(engine_config(tmp_path, device="cpu"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_mode": "online"}, r"\(BitNet, rounded while it runs \(quantization_mode online\)\)"),
        ({"use_rms_norm": True}, r"\(BitNet, with a norm in front of each product \(use_rms_norm\)\)"),
    ],
)
@pytest.mark.parametrize("models", ["multiplied"], indirect=True)
def test_other_kinds_are_refused(changes: dict[str, Any], says: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    told = {**config, "quantization_config": {**MULTIPLIED, **changes}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "model.safetensors").write_bytes((models[0] / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match=says):
        check_start(engine_config(tmp_path))


# -- MXFP4 -------------------------------------------------------------------------------------------------------------

EXPERTS, HIDDEN, WIDTH = 6, 64, 96
STACK = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def mxfp4_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return publish(make_model("gpt_oss", folder / "source", num_hidden_layers=2), folder)


def assert_logits_near(core: EngineCore, plain: Path, tolerance: float) -> None:
    request = greedy("a", IDS, 4)
    result = run(core, [request])["a", 0]
    reference = Reference(plain, specs_of(core, request), ["full_attention"]).logits(IDS + result.token_ids)
    want, got = reference[len(IDS) - 1 : -1], torch.stack(result.logits)
    assert (got - want).norm() < tolerance * want.norm()


def test_mxfp4_gives_the_logits_of_its_numbers(mxfp4_models: tuple[Path, Path]) -> None:
    published, plain = mxfp4_models
    core = make_core(published, dtype="float32", activations="float32")
    assert core.info.quantization == "MXFP4 (q5_0)"
    assert_logits_near(core, plain, 1e-5)
    assert_logits_near(make_core(published), plain, 0.05)


def test_every_weight_equals_transformers(mxfp4_models: tuple[Path, Path]) -> None:
    published, _ = mxfp4_models
    config = transformers.Mxfp4Config(dequantize=True)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        published, quantization_config=config, dtype=torch.bfloat16
    )
    loaded = load_model(engine_config(published, device="cpu"))
    weights, theirs = loaded.decoder.weights(), other.state_dict()
    for layer in range(2):
        for name in ("gate_up", "down"):
            stack = theirs[f"model.layers.{layer}.mlp.experts.{name}_proj"].float().transpose(1, 2)
            for expert in range(EXPERTS):
                mine, want = weights[f"layers.{layer}.experts.{expert}.{name}"], stack[expert]
                assert isinstance(mine, BlockWeight) and mine.form == FORMS["q5_0"]
                if name == "gate_up":  # rows of gate and up alternate
                    want = torch.cat((want[0::2], want[1::2]))
                assert torch.equal(mine.dequantize(), want)


def test_mxfp4_is_dequantized_if_blocks_do_not_fit(
    mxfp4_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are transposed and sorted in another way then."""
    published, plain = mxfp4_models
    from windlass.engine.model.loading import preflight

    monkeypatch.setattr(
        preflight,
        "storage_plan",
        lambda config, model, stored, device: preflight.plan_storage(model.spec, stored),
    )
    core = make_core(published, dtype="float32")
    assert not any(isinstance(weight, BlockWeight) for weight in core.runner.decoder.weights().values())
    assert_logits_near(core, plain, 1e-5)


def test_published_model_is_loaded_without_notices(mxfp4_models: tuple[Path, Path]) -> None:
    model = check_start(engine_config(mxfp4_models[0]))
    assert model.quantized is not None and model.is_quantized and not model.spec.notices
    with pytest.raises(LoadError, match=r"is quantized already \(MXFP4\): leave `compute.quantization=int4` out"):
        check_start(engine_config(mxfp4_models[0], quantization="int4"))


@pytest.mark.parametrize("exponent", [104, 120, 127, 143])
def test_every_float_has_a_code(exponent: int) -> None:
    floats = torch.arange(32, dtype=torch.uint8)[None] % 16
    exponents = torch.tensor([exponent], dtype=torch.uint8)
    codes, scales = scales_of_fp4(codes_of_fp4(floats), exponents, "w")
    blocks = floats[:, 0::2] | (floats[:, 1::2] << 4)
    assert torch.equal((codes.float() - 16) * scales.float()[:, None], numbers(blocks[:, None], exponents[:, None]))


def test_tiny_blocks_are_rounded_and_zeros_are_exact() -> None:
    floats = torch.arange(32, dtype=torch.uint8)[None].repeat(3, 1) % 16
    floats[2] = 8  # minus zero
    exponents = torch.tensor([103, 98, 250], dtype=torch.uint8)
    codes, scales = scales_of_fp4(codes_of_fp4(floats), exponents, "w")
    found = (codes.double() - 16) * scales.double()[:, None]
    blocks = floats[:, 0::2] | (floats[:, 1::2] << 4)
    want = numbers(blocks[:, None], exponents[:, None]).double()
    assert (found[:2] - want[:2]).abs().max() <= 2.0**-25
    assert not found[2].any() and bool(want[0].any())


MXFP4Damage = Callable[[dict[str, Tensor]], Any]
DAMAGED_MXFP4: dict[str, tuple[MXFP4Damage, str]] = {
    "no scales": (lambda t: t.pop(f"{STACK}.down_proj_scales"), "down_proj_scales' is missing"),
    "no blocks": (lambda t: t.pop(f"{STACK}.down_proj_blocks"), "unexpected tensor|is missing|are missing"),
    "an expert less": (
        lambda t: t.update({f"{STACK}.down_proj_blocks": t[f"{STACK}.down_proj_blocks"][:5].clone()}),
        r"shape \[5, 64, 3, 16\] where config.json asks for \[6, 64, 3, 16\]",
    ),
    "an expert more": (
        lambda t: t.update({f"{STACK}.down_proj_scales": t[f"{STACK}.down_proj_scales"].repeat(2, 1, 1)[:7].clone()}),
        r"shape \[7, 64, 3\] where config.json asks for \[6, 64, 3\]",
    ),
    "a type": (
        lambda t: t.update({f"{STACK}.down_proj_scales": t[f"{STACK}.down_proj_scales"].int()}),
        "is I32 where U8 is expected",
    ),
    "no number": (lambda t: t[f"{STACK}.gate_up_proj_scales"][3, 5].fill_(255), r"gate_up_proj\[3\]' contains numbers"),
    "a huge number": (
        lambda t: t[f"{STACK}.gate_up_proj_scales"][3, 5].fill_(200),
        r"gate_up_proj\[3\]' contains numbers",
    ),
    "one beside": (lambda t: t.update({f"{STACK}.surprise": torch.zeros(2)}), "unexpected tensor"),
}


@pytest.mark.parametrize("case", DAMAGED_MXFP4)
def test_damaged_mxfp4_files_are_refused(case: str, mxfp4_models: tuple[Path, Path], tmp_path: Path) -> None:
    damage, says = DAMAGED_MXFP4[case]
    tensors = load_file(mxfp4_models[0] / "model.safetensors")
    damage(tensors)
    (tmp_path / "config.json").write_text((mxfp4_models[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=says) as error:
        load_model(engine_config(tmp_path, device="cpu"))
    assert "\n" not in str(error.value)


def test_config_without_a_method_is_refused(mxfp4_models: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((mxfp4_models[0] / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((mxfp4_models[0] / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match=r"is quantized \(MXFP4\), but its config.json has no quantization_config"):
        check_start(engine_config(tmp_path))


# -- published checkpoints ---------------------------------------------------------------------------------------------

FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32


def _nearest(value: float) -> int:
    """Return the 4 bits of a number in units of its block, with the sign first."""
    code = min(range(8), key=lambda i: abs(FLOATS[i] - abs(value)))
    return code | (8 if value < 0 else 0)


def as_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows [..., columns] as blocks uint8 [..., columns / 32, 16] and exponents uint8 [..., columns / 32]."""
    groups = weight.double().numpy().reshape(-1, BLOCK)
    blocks, scales = np.zeros((len(groups), 16), np.uint8), np.zeros(len(groups), np.uint8)
    for i, group in enumerate(groups):
        most = float(np.abs(group).max())
        exponent = 127 + (math.floor(math.log2(most)) - 2 if most else -127)
        codes = [_nearest(float(x) * 2.0 ** (127 - exponent)) if most else 0 for x in group]
        scales[i] = exponent
        blocks[i] = [codes[2 * j] | (codes[2 * j + 1] << 4) for j in range(16)]
    shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
    return torch.from_numpy(blocks).view(*shape, 16), torch.from_numpy(scales).view(shape)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks and exponents, float32 [..., columns]."""
    signed = torch.tensor([*FLOATS, *(-x for x in FLOATS)], dtype=torch.float64)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., groups, 32]
    found = signed[pairs.long()] * 2.0 ** (scales.double() - 127)[..., None]
    return found.flatten(-2).float()


def publish(source: Path, folder: Path) -> tuple[Path, Path]:
    """Save the model `source` with MXFP4 experts, and a model of the same plain numbers."""
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = plain[name] = tensor
            continue
        blocks, scales = as_blocks(tensor.transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = numbers(blocks, scales).transpose(1, 2)
    for made_of, directory in ((stored, folder / "published"), (plain, folder / "plain")):
        shutil.copytree(source, directory)
        save_file({n: t.contiguous() for n, t in made_of.items()}, directory / "model.safetensors", {"format": "pt"})
    path = folder / "published" / "config.json"
    told = {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "experts_per_token": 2,
        "initial_context_length": 4096,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    return folder / "published", folder / "plain"
