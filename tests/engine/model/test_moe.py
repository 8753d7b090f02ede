"""Mixtures of experts: tensors that change logits, other backends, recorded steps, refused files, and Llama 4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.rewritten_weights import difference, reconfigured
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model
from safetensors.torch import load_file, save_file

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.model_spec import ModelSpec
from windlass.kernels import backend_selector
from windlass.kernels.backend import BackendOptions
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

PROMPT = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(0)).tolist()
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sigmoid scores, a bias, groups, a scale, a shared expert, and a dense layer."""
    return make_model("glm4_moe", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2_moe", tmp_path_factory.mktemp("qwen"))


def logits(core: EngineCore, max_tokens: int = 1) -> torch.Tensor:
    return torch.stack(run(core, [greedy("a", PROMPT, max_tokens)])["a", 0].logits)


@pytest.mark.slow
def test_every_tensor_of_a_layer_changes_logits(qwen: Path, tmp_path: Path) -> None:
    """Zeros in the router, an expert, the shared expert or its gate give other logits."""
    tensors, expected = load_file(qwen / "model.safetensors"), logits(make_core(qwen))
    names = [name for name in tensors if ".layers.2.mlp." in name and ("experts" not in name or ".experts.0." in name)]
    assert len(names) == 8
    for name in names:
        other = reconfigured(qwen, tmp_path / name)
        save_file({**tensors, name: torch.zeros_like(tensors[name])}, other / "model.safetensors")
        assert difference(logits(make_core(other)), expected) > 10 * TOLERANCE, name


def test_permuted_experts_give_equal_logits(qwen: Path, tmp_path: Path) -> None:
    """If their router rows are permuted alike; otherwise logits differ."""
    tensors, expected = load_file(qwen / "model.safetensors"), logits(make_core(qwen))
    swapped = dict(tensors)
    for name in tensors:
        for a, b in (("experts.0.", "experts.3."), ("experts.3.", "experts.0.")):
            if a in name:
                swapped[name] = tensors[name.replace(a, b)]
    alone = reconfigured(qwen, tmp_path / "alone")
    save_file(swapped, alone / "model.safetensors")
    assert difference(logits(make_core(alone)), expected) > 10 * TOLERANCE
    order = torch.tensor([3, 1, 2, 0, 4, 5])
    both = {name: one[order] if name.endswith("mlp.gate.weight") else one for name, one in swapped.items()}
    together = reconfigured(qwen, tmp_path / "together")
    save_file({name: one.contiguous() for name, one in both.items()}, together / "model.safetensors")
    assert difference(logits(make_core(together)), expected) < TOLERANCE


@pytest.mark.parametrize("kind", [TorchBackend, RowIndependentBackend])
@pytest.mark.parametrize("model", ["glm", "qwen"])
def test_plain_torch_gives_equal_logits(
    model: str, kind: type[TorchBackend], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = request.getfixturevalue(model)
    expected = logits(make_core(directory), 4)
    monkeypatch.setattr(backend_selector, "_NATIVE_BACKENDS", {})
    deterministic = kind is RowIndependentBackend
    core = make_core(directory, deterministic=deterministic)
    assert type(core.runner.decoder.backend) is kind
    assert difference(logits(core, 4), expected) < TOLERANCE


def test_deterministic_rows_are_independent(glm: Path) -> None:
    alone = run(make_core(glm, deterministic=True), [greedy("a", PROMPT, 6)])["a", 0]
    requests = [greedy("a", PROMPT, 6), *(greedy(str(i), PROMPT[i:], 6) for i in range(1, 5))]
    core = make_core(glm, deterministic=True, max_num_batched_tokens=16)
    batched = run(core, requests)["a", 0]
    assert torch.equal(torch.stack(batched.logits), torch.stack(alone.logits))


@ON_A_CPU
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_recorded_decode_steps_give_the_same_bits(glm: Path, quantization: str) -> None:
    core = make_core(glm, quantization=quantization)
    repeated = run(core, [greedy("a", PROMPT, 12)])["a", 0]
    assert core.runner.replay.obstacle is None and core.runner.replay.num_replayed > 4
    core = make_core(glm, quantization=quantization)
    core.runner.replay.max_rows = 0
    ordinary = run(core, [greedy("a", PROMPT, 12)])["a", 0]
    assert repeated.token_ids == ordinary.token_ids
    assert torch.equal(torch.stack(repeated.logits), torch.stack(ordinary.logits))


def test_long_and_short_chunks_give_equal_logits(glm: Path) -> None:
    """A prompt with more rows than the small kernels compute at once, against chunks of 13."""
    prompt = torch.randint(3, 128, (250,), generator=torch.Generator().manual_seed(1)).tolist()
    found = [
        run(make_core(glm, max_num_batched_tokens=budget), [greedy("a", prompt, 1)])["a", 0].logits[0]
        for budget in (256, 13)
    ]
    assert difference(found[0], found[1]) < TOLERANCE


REFUSED = {
    "more experts chosen than there are": (
        {"num_experts_per_tok": 9},
        "goes to 9 experts, but there are 4 to choose from",
    ),
    "groups that do not divide": ({"n_group": 3, "topk_group": 1}, "8 experts do not make 3 groups"),
    "no experts": ({"n_routed_experts": 0}, "n_routed_experts must be a positive integer"),
    "dense layers": ({"first_k_dense_replace": -1}, "first_k_dense_replace must be"),
    "more in config.json than in the files": ({"n_routed_experts": 12}, "tensors are missing|config.json asks for"),
    "fewer in config.json than in the files": ({"n_routed_experts": 4, "n_group": 2}, "unexpected tensor|asks for"),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_inconsistent_config_is_refused(glm: Path, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as refused:
        make_core(reconfigured(glm, tmp_path / "x", **keys))
    assert "\n" not in str(refused.value)


def test_mtp_layers_are_omitted(glm: Path, tmp_path: Path) -> None:
    expected = logits(make_core(glm))
    other = reconfigured(glm, tmp_path / "x", num_nextn_predict_layers=1)
    tensors = load_file(glm / "model.safetensors")
    more = {name.replace(".3.", ".4.", 1): one for name, one in tensors.items() if ".layers.3." in name}
    save_file({**tensors, **{name: one.clone() for name, one in more.items()}}, other / "model.safetensors")
    assert torch.equal(logits(make_core(other)), expected)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(LoadError, match=r"unexpected tensors? 'model\.layers\.4"):
        make_core(other)


def test_both_names_of_the_number_of_experts() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
    }
    for key in ("num_experts", "num_local_experts"):
        layer = read_spec({**config, key: 6}).layers[1].feed_forward
        assert isinstance(layer, MoESpec) and layer.experts == 6


def test_float32_router_in_a_bfloat16_checkpoint(glm: Path, tmp_path: Path) -> None:
    """The other weights stay bfloat16."""
    tensors = load_file(glm / "model.safetensors")
    other = reconfigured(glm, tmp_path / "x", dtype="bfloat16")
    narrow = {name: one if "mlp.gate." in name else one.bfloat16() for name, one in tensors.items()}
    save_file(narrow, other / "model.safetensors")
    core = make_core(other, dtype="auto")
    assert core.runner.decoder.weight_dtype == torch.bfloat16
    assert core.runner.decoder.weights()["layers.1.router"].dtype == torch.float32
    options = replace(BackendOptions(torch.device("cpu")), weight_dtype=torch.bfloat16)
    assert options.weight_dtype == core.runner.decoder.backend.options.weight_dtype


# -- Llama 4 -----------------------------------------------------------------------------------------------------------

LLAMA4_PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
CONFIG: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    **{
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{"head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 96, "attention_chunk_size": 32},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama4", tmp_path_factory.mktemp("llama4"))


def mixers(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


def test_every_fourth_layer_has_no_window_and_no_rotation() -> None:
    spec = read_spec(CONFIG)
    assert [(one.window, one.chunked, one.rotary_group, one.qk_norm) for one in mixers(spec)] == [
        *[(32, True, 0, "after")] * 3,
        (None, False, None, None),
    ]
    assert spec.unrotated_temperature == (0.1, 8192) and spec.temperature is None
    assert [group.window for group in spec.kv_groups] == [32, None]
    assert not spec.notices


@pytest.mark.parametrize("keys", [{"no_rope_layers": []}, {"no_rope_layers": [1, 1, 1, 0]}])
def test_layer_types_and_no_rope_layers_give_the_same_layers(keys: dict[str, Any]) -> None:
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    assert read_spec({**CONFIG, **keys, "layer_types": kinds}).layers == read_spec(CONFIG).layers


def test_optional_parts_may_be_disabled() -> None:
    spec = read_spec({**CONFIG, "attention_chunk_size": None, "use_qk_norm": False, "attn_temperature_tuning": False})
    assert all(one.window is None and not one.chunked and one.qk_norm is None for one in mixers(spec))
    assert spec.unrotated_temperature is None and not spec.has_chunked_attention
    older = read_spec({**CONFIG, "attn_temperature_tuning": 4, "attn_scale": 0.2, "floor_scale": 16})
    assert older.unrotated_temperature == (0.2, 16)


@pytest.mark.parametrize(
    ("keys", "dense"), [({}, []), ({"interleave_moe_layer_step": 2}, [0, 2]), ({"moe_layers": [3]}, [0, 1, 2])]
)
def test_layers_with_experts(keys: dict[str, Any], dense: list[int]) -> None:
    layers = [layer.feed_forward for layer in read_spec({**CONFIG, **keys}).layers]
    assert [i for i, one in enumerate(layers) if not isinstance(one, MoESpec)] == dense
    for one in layers:
        wide = 48 if isinstance(one, MoESpec) else 96
        assert one.intermediate_size == wide
        assert not isinstance(one, MoESpec) or (one.shared_size, one.scaled_inputs) == (48, True)


def test_invalid_list_of_layers_is_refused() -> None:
    with pytest.raises(LoadError, match="moe_layers must be a list of the numbers of layers"):
        read_spec({**CONFIG, "moe_layers": ["3"]})


@pytest.mark.parametrize(
    "asked",
    [
        {"context": ContextRule(overflow="shift")},
        {"context": ContextRule(attention_window=32)},
        {"reuse": NonPrefixReuseParams(at_least=32, scope="s")},
    ],
    ids=["shift", "window", "passages"],
)
def test_context_changes_are_refused(asked: dict[str, Any], model: Path) -> None:
    core = make_core(model)
    with pytest.raises(RequestError, match="see chunks that begin at fixed positions"):
        core.add(greedy("a", LLAMA4_PROMPT, **asked))


def test_int8_cache_and_freed_blocks_of_past_chunks(model: Path) -> None:
    """Compiled attention over int8 keys sees the same chunks, and blocks of past chunks are freed."""
    found = []
    for dtype in ("float32", "int8"):
        core = make_core(model, kv_cache_dtype=dtype)
        entry = run(core, [greedy("a", LLAMA4_PROMPT * 3, 8)])["a", 0]
        found.append(torch.stack(entry.logits[:1]))
    assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()
