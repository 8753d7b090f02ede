"""Files of recurrent models: in all published layouts, quantized, from the weight cache, with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers.quantized_checkpoints import GPTQ, as_gptq, make_quantized, quantize
from engine_helpers.rewritten_weights import PROMPT, logits, rewritten
from helpers.adapters import ALL, merged, save_adapter
from helpers.configs import engine_config
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from safetensors.torch import load_file
from torch import Tensor

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.model_description import describe_model
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.kernels import BlockWeight, StackedWeight

TOLERANCE = 1e-5  # of the largest logit


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3_5_moe", tmp_path_factory.mktemp("qwen3_5_moe"))


def far(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_experts_in_one_tensor_or_each_in_its_own(experts: Path, tmp_path: Path) -> None:
    weights = load_file(experts / "model.safetensors")
    each = [name for name in weights if ".experts." in name]
    assert len(each) == 5 * 6 * 3
    stacked = {name: one for name, one in weights.items() if name not in each}
    for layer in range(5):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([weights[f"{prefix}.{index}.{part}_proj.weight"] for index in range(6)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    assert torch.equal(logits(rewritten(experts, tmp_path / "stacked", stacked)), logits(experts))


def test_tensors_that_predict_further_tokens_are_left_out(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    further = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.input_layernorm.weight": torch.zeros(64)}
    assert torch.equal(logits(rewritten(model, tmp_path / "other", weights | further)), logits(model))


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("linear_attn.conv1d.weight", (88, 4)),
        ("linear_attn.conv1d.weight", (88, 1, 3)),
        ("linear_attn.A_log", (3,)),
        ("linear_attn.dt_bias", (4, 1)),
        ("linear_attn.norm.weight", (12,)),
        ("linear_attn.out_proj.weight", (64, 48)),
    ],
)
def test_tensors_of_another_shape_are_refused(tensor: str, shape: tuple[int, ...], model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    other = rewritten(model, tmp_path / "other", {**weights, f"model.layers.3.{tensor}": torch.zeros(shape)})
    with pytest.raises(LoadError, match=rf"layers\.3\.{tensor}' has shape"):
        describe_model(engine_config(other))


@pytest.mark.parametrize("missing", ["linear_attn.A_log", "linear_attn.conv1d.weight", "self_attn.q_proj.weight"])
def test_tensors_that_are_missing_are_named(missing: str, model: Path, tmp_path: Path) -> None:
    weights = {n: w for n, w in load_file(model / "model.safetensors").items() if n != f"model.layers.2.{missing}"}
    weights = {n: w for n, w in weights.items() if n != f"model.layers.1.{missing}"}
    with pytest.raises(LoadError, match=f"{missing}' is missing"):
        describe_model(engine_config(rewritten(model, tmp_path / "other", weights)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rates_are_made_of_what_the_file_holds(dtype: torch.dtype, model: Path, tmp_path: Path) -> None:
    """Float32 whatever the file's dtype; matrices have the file's dtype."""
    weights = {name: one.to(dtype) for name, one in load_file(model / "model.safetensors").items()}
    loaded = load_model(engine_config(rewritten(model, tmp_path / "narrow", weights), device="cpu", dtype="float32"))
    found = loaded.decoder.weights()
    for index, layer in enumerate(loaded.decoder.spec.layers):
        if index in loaded.decoder.spec.attention:
            continue
        stored = f"model.layers.{index}.linear_attn."
        rate = found[f"layers.{index}.rate"]
        assert isinstance(rate, Tensor) and rate.dtype == torch.float32, layer
        assert torch.equal(rate, weights[f"{stored}A_log"].float().exp())
        taps = found[f"layers.{index}.convolution"]
        assert isinstance(taps, Tensor) and torch.equal(taps, weights[f"{stored}conv1d.weight"].float()[:, 0])
        norm = found[f"layers.{index}.norm"]
        assert isinstance(norm, Tensor) and torch.equal(norm, weights[f"{stored}norm.weight"].float())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_from_the_cache_are_the_same(quantization: str, model: Path, tmp_path: Path) -> None:
    options = {"quantization": quantization, "weight_cache": str(tmp_path)}
    first = logits(model, **options)
    core = make_core(model, **options)
    assert any("quantized weights read from" in notice for notice in core.info.notices)
    assert torch.equal(logits(model, **options), first)


def test_strengths_and_decays_keep_more_bits(model: Path) -> None:
    decoder = load_model(engine_config(model, device="cpu", quantization="int4")).decoder
    weight = decoder.weights()["layers.0.projections"]
    assert isinstance(weight, StackedWeight)
    parts = [(part.rows, part.form.bits) for part in weight.parts if isinstance(part, BlockWeight)]
    assert parts[-1] == (8, 8) and sum(rows for rows, _ in parts) == 136 and parts[0][1] < 8


def test_random_weights_give_logits(model: Path) -> None:
    found = logits(model, load_format="dummy")
    assert found.isfinite().all() and float(found.std()) > 0.1


def test_an_adapter_changes_every_matrix(model: Path, tmp_path: Path) -> None:
    names = {name.split(".")[-2] for name in load_file(model / "model.safetensors") if "linear_attn" in name}
    own = sorted(name for name in names if name.startswith("in_proj") or name == "out_proj")
    assert own and own[-1] == "out_proj"
    targets = [*ALL[:4], *own] if "in_proj_ba" in own else [*ALL, *own]  # experts are not changed
    adapter = save_adapter(tmp_path / "adapter", model, targets)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert far(logits(model, adapter), wanted) < TOLERANCE
    assert far(logits(model), wanted) > 100 * TOLERANCE


def test_a_checkpoint_with_quantized_matrices(tmp_path: Path) -> None:
    """As writers leave them: convolutions, strengths and decays as they are."""
    source = make_model("qwen3_5", tmp_path / "model")

    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        w = quantize(weight, 4, 32)
        return as_gptq(module, w), w.numbers()

    modules = [name.removesuffix(".weight") for name in load_file(source / "model.safetensors")]
    # What heads read of, 40 numbers, is no multiple of a group.
    leave = [name for name in modules if name.endswith(("conv1d", "in_proj_a", "in_proj_b", "out_proj", "lm_head"))]
    quantized, plain = make_quantized(source, tmp_path, GPTQ, layout, leave=leave)
    core = make_core(quantized, dtype="float32", activations="float32")
    result = run(core, [greedy("a", PROMPT, 4)])["a", 0]
    reference = Reference(plain, specs_of(core, greedy("a", PROMPT, 4)), ["full_attention"])
    wanted = reference.logits(PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    assert far(torch.stack(result.logits), wanted) < TOLERANCE


def test_ranks_are_refused(model: Path) -> None:
    with pytest.raises(LoadError, match="a layer that carries a state is not split: leave it out") as caught:
        prepare_model(engine_config(model, tensor_parallel=2), DeviceCapabilities("cpu", True))
    assert "\n" not in str(caught.value)
