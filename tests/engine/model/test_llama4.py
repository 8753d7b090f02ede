"""Llama 4: variants of config.json, contents of its cache, and refused context changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.feed_forward.moe import MoESpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.model_spec import ModelSpec

PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
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
        core.add(greedy("a", PROMPT, **asked))


def test_int8_cache_and_freed_blocks_of_past_chunks(model: Path) -> None:
    """Compiled attention over int8 keys sees the same chunks, and blocks of past chunks are freed."""
    found = []
    for dtype in ("float32", "int8"):
        core = make_core(model, kv_cache_dtype=dtype)
        entry = run(core, [greedy("a", PROMPT * 3, 8)])["a", 0]
        found.append(torch.stack(entry.logits[:1]))
    assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()
