"""Nemotron H, whose layers have one part each: config.json, refused values, and quantized and adapted weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.rewritten_weights import PROMPT, logits
from helpers.adapters import merged, save_adapter
from helpers.configs import engine_config
from helpers.engines import make_core
from helpers.tiny_unrotated import logits_of, make_unrotated
from safetensors.torch import load_file, save_file

from windlass.engine.cache.kv_cache_spec import KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.attention_maps import attention_weights
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.feed_forward.mlp import PlainMLPNames, PlainMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.state_space import StateSpaceSpec
from windlass.lab.scoring import Scorer

PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
# In the shape of nvidia/NVIDIA-Nemotron-Nano-9B-v2, whose file has kinds of layers as letters.
PUBLISHED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 12,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 4480,
    "hybrid_override_pattern": PATTERN,
    "initializer_range": 0.02,
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unrotated("nemotron_h", tmp_path_factory.mktemp("nemotron_h"))


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unrotated("nemotron_h_experts", tmp_path_factory.mktemp("nemotron_h_experts"))


def test_a_published_file() -> None:
    spec = read_spec(PUBLISHED)
    attending = tuple(index for index, letter in enumerate(PATTERN) if letter == "*")
    carrying = tuple(index for index, letter in enumerate(PATTERN) if letter == "M")
    assert not spec.notices and spec.trained_len == 131_072 and spec.norm_eps == 1e-5 and spec.eos_token_ids == (12,)
    assert spec.kv_groups == (KVGroupSpec(attending, 8, 128, None),)
    assert spec.state_group == StateGroupSpec(carrying, 128 * 80 + 2 * 8 * 128, 4, 128, 128, 80)
    assert spec.rotary_groups[0].base.unrotated is not None
    for letter, layer in zip(PATTERN, spec.layers, strict=True):
        kinds = type(layer.mixer), type(layer.feed_forward)
        none = type(None)
        assert kinds == {"M": (StateSpaceSpec, none), "*": (AttentionSpec, none), "-": (none, PlainMLPSpec)}[letter]
    assert spec.layers[1].feed_forward == PlainMLPSpec(
        15_680, "relu2", names=PlainMLPNames("mixer.up_proj", "mixer.down_proj")
    )
    stored = {tensor.name for weight in spec.weights() for tensor in weight.stored}
    assert {name for name in stored if ".1." in name} == {
        f"backbone.layers.1.{name}.weight" for name in ("norm", "mixer.up_proj", "mixer.down_proj")
    }
    assert stored - {name for name in stored if ".layers." in name} == {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
    }


def test_a_published_file_of_experts() -> None:
    """In the shape of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, whose layers are experts where others are feed-forwards."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    sizes = {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    widths = {"intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
    weights = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_hidden_layers": 52}
    spec = read_spec({**PUBLISHED, **sizes, **widths, **weights, "hybrid_override_pattern": pattern})
    assert not spec.notices
    for letter, layer in zip(pattern, spec.layers, strict=True):
        assert isinstance(layer.feed_forward, MoESpec) == (letter == "E") == (layer.mixer is None)
    experts = spec.layers[1].feed_forward
    assert isinstance(experts, MoESpec) and not experts.gated
    assert (experts.experts, experts.intermediate_size, experts.shared_size) == (128, 1856, 3712)
    assert (experts.router.top_k, experts.router.scale, experts.router.scores) == (6, 2.5, "sigmoid")
    stored = {stored.name for weight in experts.weights(2688) for stored in weight.stored}
    parts = ("experts.0.up_proj", "experts.0.down_proj", "shared_experts.up_proj", "shared_experts.down_proj", "gate")
    assert {f"mixer.{part}.weight" for part in parts} <= stored and len(stored) == 2 * 128 + 4


def test_kinds_of_layers_by_names_and_by_letters(model: Path) -> None:
    written = json.loads((model / "config.json").read_text())
    spec = read_spec(written)
    assert not spec.notices
    names = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp"}
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    kinds = written.pop("layers_block_type")
    assert read_spec({**written, "layers_block_type": [names[kind] for kind in kinds]}) == spec
    assert read_spec({**written, "hybrid_override_pattern": "".join(letters[kind] for kind in kinds)}) == spec
    older = {"mamba_n_groups": written.pop("n_groups"), "mamba_d_conv": written.pop("conv_kernel")}
    assert read_spec({**written, **older, "layers_block_type": kinds}) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-"}, "num_hidden_layers is 56, and 2 layers have a kind: keep one"),
        ({"hybrid_override_pattern": None}, "layers_block_type must be a list with one name per layer"),
        ({"hybrid_override_pattern": ""}, "layers_block_type must be a list"),
        ({"hybrid_override_pattern": ["M"]}, "layers_block_type must be a list"),
        ({"layers_block_type": "mamba"}, "layers_block_type must be a list"),
        ({"hybrid_override_pattern": "M?" * 28}, "layer_types has '?'"),
        (
            {"hybrid_override_pattern": "ME*-" * 14, "moe_latent_size": 1024},
            "moe_latent_size is 1024: experts that see",
        ),
        (
            {"hybrid_override_pattern": "ME*-" * 14, "num_experts_per_tok": 9},
            "do not go together: a token goes to 9 experts",
        ),
        ({"hybrid_override_pattern": "ME*-" * 14, "n_group": 3}, "8 experts do not make 3 groups"),
        ({"hybrid_override_pattern": "M-" * 28}, "no layer is full_attention"),
        ({"hybrid_override_pattern": "*" * 10**6, "num_hidden_layers": None}, "num_hidden_layers must be a positive"),
        ({"mamba_num_heads": 0}, "mamba_num_heads must be a positive integer up to 65536"),
        ({"mamba_num_heads": 1 << 40}, "mamba_num_heads must be a positive integer up to 65536"),
        ({"mamba_head_dim": 1 << 20}, "mamba_head_dim must be a positive integer up to 65536"),
        ({"n_groups": 7}, "mamba_num_heads 128 is not a multiple of n_groups 7"),
        ({"ssm_state_size": -1}, "ssm_state_size must be a positive integer"),
        ({"conv_kernel": 9}, "conv_kernel 9 is not supported: it may be 2 to 8"),
        ({"use_bias": 1}, "use_bias must be true or false"),
        ({"use_conv_bias": "no"}, "use_conv_bias must be true or false"),
        ({"time_step_limit": [1, 0]}, "time_step_limit must be two numbers"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu', which changes the model"),
        ({"mlp_hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({"attention_bias": True}, "attention_bias=true, which changes the model"),
        ({"sliding_window": 8}, "sliding_window=8, which changes the model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read_spec({**PUBLISHED, **changes})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_from_the_cache_are_the_same(quantization: str, model: Path, tmp_path: Path) -> None:
    options = {"quantization": quantization, "weight_cache": str(tmp_path)}
    first = logits(model, **options)
    assert any("quantized weights read from" in notice for notice in make_core(model, **options).info.notices)
    assert torch.equal(logits(model, **options), first)
    near = torch.nn.functional.cosine_similarity(first.flatten(), logits(model).flatten(), dim=0)
    assert near > (0.99 if quantization == "int8" else 0.7), near


@pytest.mark.parametrize(
    "targets", [["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"], ["up_proj", "down_proj"]]
)
def test_an_adapter_changes_every_part(targets: list[str], model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model, targets)
    wanted = logits(merged(model, adapter, tmp_path / "merged"))
    assert (logits(model, adapter) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (logits(model) - wanted).abs().max() > 1e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 2},
        {"topk_group": 4},
        {"mlp_hidden_act": "silu"},
    ],
    ids=str,
)
def test_what_is_said_of_experts_counts(changes: dict[str, Any], of_experts: Path, tmp_path: Path) -> None:
    other = shutil.copytree(of_experts, tmp_path / "other")
    config = json.loads((of_experts / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    wanted = logits(of_experts)
    assert (logits(other) - wanted)[0].abs().max() > 1e-3 * wanted.abs().max()


def test_dense_layers_and_biases_beside_experts(tmp_path: Path) -> None:
    """An adapter for all matrices except those of experts."""
    kinds = ["mlp", "moe", "full_attention", "linear_attention", "mlp"]
    model = make_unrotated("nemotron_h_experts", tmp_path, layers_block_type=kinds, mlp_bias=True, use_bias=True)
    wanted = logits_of(model, PROMPT)[-1]
    assert (logits(model)[0] - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_steps_are_limited_by_the_limit_alone() -> None:
    """time_step_min belongs to the initialization and limits no steps, although transformers 5.24 applies it."""

    def limits(**changes: Any) -> set[tuple[float, float]]:
        layers = read_spec({**PUBLISHED, **changes}).layers
        return {layer.mixer.limits for layer in layers if isinstance(layer.mixer, StateSpaceSpec)}

    assert limits(time_step_min=0.5) == limits(time_step_min=0.5, time_step_limit=None) == {(0.0, math.inf)}
    assert limits(time_step_limit=[0.1, 2.0]) == limits(mamba_dt_limit=[0.1, 2.0]) == {(0.1, 2.0)}


def test_experts_in_blocks_and_adapters_of_what_all_tokens_meet(of_experts: Path, tmp_path: Path) -> None:
    plain = logits(of_experts)[0]
    assert torch.cosine_similarity(logits(of_experts, quantization="int8")[0], plain, dim=0) > 0.99
    with pytest.raises(LoadError, match=r"experts\.0\.up_proj' that an adapter can change"):
        logits(of_experts, save_adapter(tmp_path / "all", of_experts, ["up_proj"]))
    adapter = only_shared(save_adapter(tmp_path / "adapter", of_experts, ["up_proj", "down_proj"]))
    wanted = logits(merged(of_experts, adapter, tmp_path / "merged"))
    assert (logits(of_experts, adapter) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (plain - wanted[0]).abs().max() > 1e-3 * wanted.abs().max()


def only_shared(adapter: Path) -> Path:
    """Without its changes of experts."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if ".experts." not in name}, adapter / "adapter_model.safetensors"
    )
    return adapter


def test_attention_is_shown_of_layers_that_have_it(model: Path) -> None:
    scorer = Scorer(make_core(model).runner.decoder, torch.float32)
    weights = attention_weights(scorer, [5, 6, 7, 8], 2)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]))
    with pytest.raises(
        RequestError, match="layer 1 attends to nothing, as it is a feed-forward alone: ask for one of 2"
    ):
        attention_weights(scorer, [5, 6, 7, 8], 1)


def test_ranks_are_refused(model: Path) -> None:
    with pytest.raises(LoadError, match="a layer of one part alone is not split: leave it out"):
        prepare_model(engine_config(model, tensor_parallel=2), DeviceCapabilities("cpu", True))
