"""Adapters give the logits of a model into which they were merged, for every kind of module, dtype and mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.adapters import ALL, merged, save_adapter
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.model_info import AdapterSource

PROMPT = [3, 17, 42, 8, 99, 23, 54, 11, 76, 5, 31, 90]
SETTINGS = [
    ({"targets": ("q_proj",)}, {}),
    ({"targets": ("k_proj", "v_proj")}, {}),
    ({"targets": ("o_proj",)}, {}),
    ({"targets": ("gate_proj",)}, {}),
    ({"targets": ("up_proj", "down_proj")}, {}),
    ({"targets": ALL}, {}),
    ({"targets": ALL, "rank": 1, "use_rslora": True}, {}),
    ({"targets": ALL, "ranks": {"v_proj": 7, "down_proj": 2}, "alpha_pattern": {"q_proj": 11.0}}, {}),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama") / "model")


def with_adapters(model: Path, *adapters: Path, **options: object) -> EngineCore:
    sources = tuple(AdapterSource(i, f"a{i}", str(path)) for i, path in enumerate(adapters, start=1))
    return make_core(model, lora=sources, **options)


NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


def only(finished: dict[tuple[str, int], Finished], name: str = "r") -> Finished:
    return finished[name, 0]


def distance(found: Finished, wanted: Finished) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    assert found.token_ids == wanted.token_ids
    a, b = torch.stack(found.logits), torch.stack(wanted.logits)
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("settings", [s for s, _ in SETTINGS], ids=[str(i) for i in range(len(SETTINGS))])
def test_adapter_equals_merged_weights(llama: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    adapter = save_adapter(tmp_path / "adapter", llama, **settings)  # type: ignore[arg-type]
    plain = only(run(make_core(llama), [greedy("r", PROMPT)]))
    wanted = only(run(make_core(merged(llama, adapter, tmp_path / "merged")), [greedy("r", PROMPT)]))
    core = with_adapters(llama, adapter)
    assert distance(only(run(core, [greedy("r", PROMPT, adapter=1)])), wanted) < 1e-5
    assert distance(only(run(core, [greedy("r", PROMPT)])), plain) == 0  # and the same engine without
    assert plain.logits[0].sub(wanted.logits[0]).abs().max() > 1e-2 * plain.logits[0].abs().max()


def test_other_layer_names_and_separate_heads(tmp_path: Path) -> None:
    model = make_model("gpt_neox", tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model, NEOX)
    plain = only(run(make_core(model), [greedy("r", PROMPT)]))
    wanted = only(run(make_core(merged(model, adapter, tmp_path / "merged")), [greedy("r", PROMPT)]))
    assert distance(only(run(with_adapters(model, adapter), [greedy("r", PROMPT, adapter=1)])), wanted) < 1e-5
    assert plain.logits[0].sub(wanted.logits[0]).abs().max() > 1e-2 * plain.logits[0].abs().max()
