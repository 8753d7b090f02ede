"""Weights of recurrent models: shapes, dtypes, quantization, weight cache, random weights, adapters, and refused splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers.quantized_checkpoints import GPTQ, as_gptq, make_quantized, quantize
from engine_helpers.rewritten_weights import PROMPT, difference, logits, rewritten
from helpers import tiny_unrotated
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
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# By family: groups of matrices that an adapter changes.
ADAPTED: dict[str, list[list[str]]] = {
    "falcon_h1": [ATTENTION, ["in_proj", "out_proj"], ["gate_proj", "up_proj", "down_proj"]],
    "granite4_h": [[*ATTENTION, "in_proj", "out_proj", "input_linear", "output_linear"], ["in_proj"], ["out_proj"]],
    "lfm2": [
        ["q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"],
        ["in_proj"],
        ["out_proj"],
    ],
    "nemotron_h": [[*ATTENTION, "in_proj", "out_proj"], ["up_proj", "down_proj"]],
    "qwen3_5": [[*ALL, "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]],
    "qwen3_next": [[*ALL[:4], "in_proj_ba", "in_proj_qkvz", "out_proj"]],  # experts are not changed
}
FAMILIES = sorted(ADAPTED)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models by family, each made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            make = tiny_unrotated.make_unrotated if family in tiny_unrotated.FAMILIES else make_model
            made[family] = make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


ModelOf = Callable[[str], Path]


# -- tensors of checkpoints --------------------------------------------------------------------------------------------

_DELTA_SHAPES = [
    ("linear_attn.conv1d.weight", (88, 4)),
    ("linear_attn.conv1d.weight", (88, 1, 3)),
    ("linear_attn.A_log", (3,)),
    ("linear_attn.dt_bias", (4, 1)),
    ("linear_attn.norm.weight", (12,)),
    ("linear_attn.out_proj.weight", (64, 48)),
]
SHAPES: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "granite4_h": [
        ("mamba.conv1d.weight", (224, 4)),
        ("mamba.conv1d.weight", (224, 1, 3)),
        ("mamba.conv1d.bias", (224, 1)),
        ("mamba.in_proj.weight", (352, 64)),
        ("mamba.in_proj.bias", (224,)),
        ("mamba.A_log", (8, 1)),
        ("mamba.D", (4,)),
        ("mamba.dt_bias", (16,)),
        ("mamba.norm.weight", (4, 32)),
        ("mamba.out_proj.weight", (128, 64)),
    ],
    "lfm2": [
        ("conv.conv.weight", (64, 3)),
        ("conv.conv.weight", (64, 1, 4)),
        ("conv.conv.bias", (64, 1)),
        ("conv.in_proj.weight", (128, 64)),
        ("conv.in_proj.bias", (64,)),
        ("conv.out_proj.weight", (64, 192)),
    ],
    "qwen3_5": _DELTA_SHAPES,
    "qwen3_next": _DELTA_SHAPES,
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("family", "tensor", "shape"), [(family, *row) for family, rows in SHAPES.items() for row in rows]
)
def test_tensor_of_another_shape_is_refused(
    family: str, tensor: str, shape: tuple[int, ...], model_of: ModelOf, tmp_path: Path
) -> None:
    weights = load_file(model_of(family) / "model.safetensors") | {f"model.layers.3.{tensor}": torch.zeros(shape)}
    with pytest.raises(LoadError, match=rf"layers\.3\.{tensor}' has shape"):
        describe_model(engine_config(rewritten(model_of(family), tmp_path / "other", weights)))


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("granite4_h", "1.mamba.A_log"),
        ("granite4_h", "1.mamba.conv1d.bias"),
        ("granite4_h", "2.self_attn.q_proj.weight"),
        ("lfm2", "1.conv.conv.bias"),
        ("lfm2", "1.conv.conv.weight"),
        ("lfm2", "2.self_attn.q_layernorm.weight"),
        ("qwen3_5", "1.linear_attn.A_log"),
        ("qwen3_5", "1.linear_attn.conv1d.weight"),
        ("qwen3_5", "2.self_attn.q_proj.weight"),
        ("qwen3_next", "1.linear_attn.A_log"),
        ("qwen3_next", "1.linear_attn.conv1d.weight"),
        ("qwen3_next", "2.self_attn.q_proj.weight"),
    ],
)
def test_missing_tensor_is_named(family: str, missing: str, model_of: ModelOf, tmp_path: Path) -> None:
    weights = load_file(model_of(family) / "model.safetensors")
    del weights[f"model.layers.{missing}"]
    with pytest.raises(LoadError, match=f"{missing}' is missing"):
        describe_model(engine_config(rewritten(model_of(family), tmp_path / "other", weights)))


# By family: part of a layer's names, and weights of the decoder as functions of the layer's tensors.
FLOAT32: dict[str, tuple[str, dict[str, Callable[[dict[str, Tensor]], Tensor]]]] = {
    "granite4_h": (
        "mamba.",
        {
            "convolution": lambda own: own["conv1d.weight"][:, 0],
            "convolution_bias": lambda own: own["conv1d.bias"],
            "rate": lambda own: own["A_log"].exp(),
            "step_bias": lambda own: own["dt_bias"],
            "skip": lambda own: own["D"],
            "norm": lambda own: own["norm.weight"],
        },
    ),
    "lfm2": (
        "conv.conv.",
        {"convolution": lambda own: own["weight"][:, 0], "convolution_bias": lambda own: own["bias"]},
    ),
    "qwen3_5": (
        "linear_attn.",
        {
            "rate": lambda own: own["A_log"].exp(),
            "convolution": lambda own: own["conv1d.weight"][:, 0],
            "norm": lambda own: own["norm.weight"],
        },
    ),
}
FLOAT32["qwen3_next"] = FLOAT32["qwen3_5"]


@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    [
        ("granite4_h", torch.bfloat16, "bfloat16"),
        ("lfm2", torch.bfloat16, "bfloat16"),
        *[(name, dtype, "float32") for name in ("qwen3_5", "qwen3_next") for dtype in (torch.bfloat16, torch.float16)],
    ],
)
def test_state_parameters_are_float32(
    family: str, stored: torch.dtype, dtype: str, model_of: ModelOf, tmp_path: Path
) -> None:
    """For any dtype of the file and of the matrices."""
    weights = {name: one.to(stored) for name, one in load_file(model_of(family) / "model.safetensors").items()}
    narrow = rewritten(model_of(family), tmp_path / "narrow", weights)
    decoder = load_model(engine_config(narrow, device="cpu", dtype=dtype)).decoder
    found, (part, expected) = decoder.weights(), FLOAT32[family]
    recurrent = set(range(len(decoder.spec.layers))) - set(decoder.spec.attention)
    assert recurrent
    for layer in recurrent:
        prefix = f"model.layers.{layer}.{part}"
        own = {name.removeprefix(prefix): one.float() for name, one in weights.items()}
        for name, wanted in expected.items():
            one = found[f"layers.{layer}.{name}"]
            assert isinstance(one, Tensor) and one.dtype == torch.float32, name
            assert torch.equal(one, wanted(own)), name


def test_stacked_experts_give_the_same_bits(tmp_path: Path) -> None:
    experts = make_model("qwen3_5_moe", tmp_path / "model")
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


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_mtp_tensors_are_omitted(family: str, model_of: ModelOf, tmp_path: Path) -> None:
    weights = load_file(model_of(family) / "model.safetensors")
    further = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.input_layernorm.weight": torch.zeros(64)}
    other = rewritten(model_of(family), tmp_path / "other", weights | further)
    assert torch.equal(logits(other), logits(model_of(family)))


# -- quantization, random weights, adapters, ranks ---------------------------------------------------------------------


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weight_cache_gives_the_same_bits(quantization: str, family: str, model_of: ModelOf, tmp_path: Path) -> None:
    model, options = model_of(family), {"quantization": quantization, "weight_cache": str(tmp_path)}
    first = logits(model, **options)
    assert any("quantized weights read from" in notice for notice in make_core(model, **options).info.notices)
    assert torch.equal(logits(model, **options), first)
    if family == "nemotron_h":  # test_family_logits compares the others
        near = torch.nn.functional.cosine_similarity(first.flatten(), logits(model).flatten(), dim=0)
        assert near > (0.99 if quantization == "int8" else 0.7), near


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_strengths_and_decays_have_more_bits(family: str, model_of: ModelOf) -> None:
    decoder = load_model(engine_config(model_of(family), device="cpu", quantization="int4")).decoder
    weight = decoder.weights()["layers.0.projections"]
    assert isinstance(weight, StackedWeight)
    parts = [(part.rows, part.form.bits) for part in weight.parts if isinstance(part, BlockWeight)]
    assert parts[-1] == (8, 8) and sum(rows for rows, _ in parts) == 136 and parts[0][1] < 8


def test_checkpoint_with_gptq_matrices(tmp_path: Path) -> None:
    """Convolutions, strengths and decays are not quantized, as in published files."""
    source = make_model("qwen3_5", tmp_path / "model")

    def layout(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        w = quantize(weight, 4, 32)
        return as_gptq(module, w), w.numbers()

    modules = [name.removesuffix(".weight") for name in load_file(source / "model.safetensors")]
    # The input of out_proj, 40 numbers, is not a multiple of a group.
    leave = [name for name in modules if name.endswith(("conv1d", "in_proj_a", "in_proj_b", "out_proj", "lm_head"))]
    quantized, plain = make_quantized(source, tmp_path, GPTQ, layout, leave=leave)
    core = make_core(quantized, dtype="float32", activations="float32")
    result = run(core, [greedy("a", PROMPT, 4)])["a", 0]
    reference = Reference(plain, specs_of(core, greedy("a", PROMPT, 4)), ["full_attention"])
    wanted = reference.logits(PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    assert difference(torch.stack(result.logits), wanted) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_give_logits(family: str, model_of: ModelOf) -> None:
    found = logits(model_of(family), load_format="dummy")
    assert found.isfinite().all() and float(found.std()) > 0.1


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("family", "targets"), [(family, targets) for family, groups in ADAPTED.items() for targets in groups]
)
def test_adapter_gives_the_logits_of_merged_weights(
    family: str, targets: list[str], model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of(family)
    adapter = save_adapter(tmp_path / "adapter", model, targets)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert difference(logits(model, adapter), wanted) < TOLERANCE
    assert difference(logits(model), wanted) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallelism_is_refused(family: str, model_of: ModelOf) -> None:
    part = "of one part alone" if family == "nemotron_h" else "that carries a state"
    with pytest.raises(LoadError, match=f"a layer {part} is not split: leave it out") as caught:
        prepare_model(engine_config(model_of(family), tensor_parallel=2), DeviceCapabilities("cpu", True))
    assert "\n" not in str(caught.value)
