"""Last layers that share the keys of earlier ones compute only a prompt's last token, unless more is requested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import save_adapter
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.model.per_layer_embeddings import PerLayerProjection

PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("gemma4_e2b", tmp_path_factory.mktemp("gemma4"))  # three layers of six share the keys of others


def rows_of_layers(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record how many tokens each layer computes in each step."""
    found: list[list[int]] = []
    forward, layers = PerLayerProjection.forward, [layer.per_layer_projection for layer in core.runner.decoder.layers]

    def watched(self: PerLayerProjection, x: Tensor, *others: Any) -> Tensor:
        if self is layers[0]:
            found.append([])
        found[-1].append(x.shape[0])
        return forward(self, x, *others)

    monkeypatch.setattr(PerLayerProjection, "forward", watched)
    return found


def test_the_last_layers_compute_only_last_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model, max_num_batched_tokens=25)
    rows = rows_of_layers(core, monkeypatch)
    run(core, [greedy("a", PROMPT, 1)])
    assert rows == [[25] * 3 + [1] * 3, [15] * 3 + [1] * 3]
    rows.clear()
    run(core, [greedy("b", PROMPT[1:11], 1), greedy("c", PROMPT[2:9], 1)])
    assert rows == [[17] * 3 + [2] * 3]


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 0}, {"context": ContextRule("shift", attention_window=9, attention_sinks=2)}], ids=str
)
def test_the_last_layers_compute_all_requested_tokens(
    model: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(model, max_model_len=128)
    rows = rows_of_layers(core, monkeypatch)
    run(core, [greedy("a", PROMPT, 1, **asked)])
    assert rows == [[40] * 6]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_equal_those_of_all_tokens(
    model: Path, dtype: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts in one step, one of them chunked, next to a stream; bit for bit where the order of sums is fixed."""

    def answers() -> dict[Any, Any]:
        core = make_core(model, max_num_batched_tokens=60, dtype=dtype, deterministic=deterministic)
        requests = [greedy(str(i), PROMPT[i : 8 + 9 * i], 6, temperature=0.7 * (i == 2), seed=3) for i in range(4)]
        return run(core, requests)

    found = answers()
    monkeypatch.setattr("windlass.engine.execution.model_runner.RankRunner._needs_only_last_tokens", lambda *_: False)
    for key, expected in answers().items():
        assert found[key].token_ids == expected.token_ids
        ours, theirs = torch.stack(found[key].logits), torch.stack(expected.logits)
        if deterministic:
            assert torch.equal(ours, theirs)
        else:
            assert (ours - theirs).abs().max() < (1e-5 if dtype == "float32" else 0.03) * theirs.abs().max()


def test_results_with_an_adapter_equal_those_of_all_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = AdapterSource(1, "a", str(save_adapter(tmp_path / "adapter", model)))

    def answers() -> dict[Any, Any]:
        core = make_core(model, lora=(source,))
        return run(core, [greedy("a", PROMPT, 4, adapter=1), greedy("b", PROMPT[5:], 4)])

    found = answers()
    monkeypatch.setattr("windlass.engine.execution.model_runner.RankRunner._needs_only_last_tokens", lambda *_: False)
    for key, expected in answers().items():
        ours, theirs = torch.stack(found[key].logits), torch.stack(expected.logits)
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
