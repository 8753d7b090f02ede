"""Published gpt-oss: the MXFP4 experts become 5-bit codes with exactly the same numbers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError
from windlass.engine.model.loading.dequantize import codes_of_fp4, scales_of_fp4
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.preflight import check_start
from windlass.kernels import FORMS, BlockWeight

IDS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
EXPERTS, HIDDEN, WIDTH = 6, 64, 96
STACK = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return publish(make_model("gpt_oss", folder / "source", num_hidden_layers=2), folder)


def assert_same_logits(core: EngineCore, plain: Path, tolerance: float) -> None:
    request = greedy("a", IDS, 4)
    result = run(core, [request])["a", 0]
    reference = Reference(plain, specs_of(core, request), ["full_attention"]).logits(IDS + result.token_ids)
    want, got = reference[len(IDS) - 1 : -1], torch.stack(result.logits)
    assert (got - want).norm() < tolerance * want.norm()


def test_mxfp4_gives_the_logits_of_its_numbers(models: tuple[Path, Path]) -> None:
    published, plain = models
    core = make_core(published, dtype="float32", activations="float32")
    assert core.info.quantization == "MXFP4 (q5_0)"
    assert_same_logits(core, plain, 1e-5)
    assert_same_logits(make_core(published), plain, 0.05)


def test_every_weight_equals_transformers(models: tuple[Path, Path]) -> None:
    published, _ = models
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


def test_mxfp4_is_dequantized_if_blocks_do_not_fit(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are transposed and sorted in another way then."""
    published, plain = models
    from windlass.engine.model.loading import preflight

    monkeypatch.setattr(
        preflight,
        "storage_plan",
        lambda config, model, stored, device: preflight.plan_storage(model.spec, stored),
    )
    core = make_core(published, dtype="float32")
    assert not any(isinstance(weight, BlockWeight) for weight in core.runner.decoder.weights().values())
    assert_same_logits(core, plain, 1e-5)


def test_published_model_is_loaded_without_notices(models: tuple[Path, Path]) -> None:
    model = check_start(engine_config(models[0]))
    assert model.quantized is not None and model.is_quantized and not model.spec.notices
    with pytest.raises(LoadError, match=r"is quantized already \(MXFP4\): leave `compute.quantization=int4` out"):
        check_start(engine_config(models[0], quantization="int4"))


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


Damage = Callable[[dict[str, Tensor]], Any]
DAMAGED: dict[str, tuple[Damage, str]] = {
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
    "no number": (lambda t: t[f"{STACK}.gate_up_proj_scales"][3, 5].fill_(255), r"gate_up_proj\[3\]' holds numbers"),
    "a huge number": (
        lambda t: t[f"{STACK}.gate_up_proj_scales"][3, 5].fill_(200),
        r"gate_up_proj\[3\]' holds numbers",
    ),
    "one beside": (lambda t: t.update({f"{STACK}.surprise": torch.zeros(2)}), "unexpected tensor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    damage, says = DAMAGED[case]
    tensors = load_file(models[0] / "model.safetensors")
    damage(tensors)
    (tmp_path / "config.json").write_text((models[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=says) as error:
        load_model(engine_config(tmp_path, device="cpu"))
    assert "\n" not in str(error.value)


def test_config_without_a_method_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((models[0] / "model.safetensors").read_bytes())
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
