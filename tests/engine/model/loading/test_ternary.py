"""Published BitNet: ternary weights in two bits become blocks of four bits with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.quantized_checkpoints import Layout, make_quantized
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.bitnet import AutoBitLinear, BitLinear

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.preflight import check_start
from windlass.kernels import FORMS, BlockWeight

IDS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
MULTIPLIED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DIVIDED = {"quant_method": "bitnet", "modules_to_not_convert": None}  # the older kind of layer is the default
KINDS = {"multiplied": MULTIPLIED, "divided": DIVIDED}
DOWN = "model.layers.1.mlp.down_proj"


def packed(ternary: Tensor) -> Tensor:
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
        return {f"{module}.weight": packed(ternary), f"{module}.weight_scale": scale}, ternary * factor

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


Damage = Callable[[dict[str, Tensor]], Any]
DAMAGED: dict[str, tuple[Damage, str]] = {
    "no scale": (lambda t: t.pop(f"{DOWN}.weight_scale"), r"down_proj.weight_scale' is missing.*download it again"),
    "a scale of nothing": (lambda t: t[f"{DOWN}.weight_scale"].zero_(), r"down_proj.weight_scale' is zero"),
    "no number": (lambda t: t[f"{DOWN}.weight_scale"].fill_(torch.nan), "NaN or infinite"),
    "too short": (
        lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"][1:].clone()}),
        r"shape \[15, 96\] where config.json asks for \[16, 96\]",
    ),
    "many scales": (lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(64)}), r"shape \[64\] where .*\[1\]"),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("models", ["multiplied"], indirect=True)
def test_damaged_files_are_refused(case: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    damage, says = DAMAGED[case]
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
