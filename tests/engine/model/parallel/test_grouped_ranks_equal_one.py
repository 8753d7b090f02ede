"""Ranks connected by torch.distributed give the logits of one process, as ranks with shared memory do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_helpers.thread_ranks import ranked
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.kernels import backend_selector
from windlass.kernels.torch.torch_backend import TorchBackend

pytestmark = ON_A_CPU


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the CPU as a device without its own kernels."""
    monkeypatch.setattr(
        backend_selector,
        "_NATIVE_BACKENDS",
        {"cpu": backend_selector._NativeBackend(lambda options: "played", TorchBackend, False)},
    )


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama_bias", {}), ("gpt_oss", {}), ("llama_bias", {"deterministic": True, "max_num_batched_tokens": 16})],
    ids=["dense", "experts and windows", "deterministic"],
)
def test_logits_equal_one_process(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = make_model(family, tmp_path / "model")
    asked = [greedy("a", range(5, 45), 10, prompt_logprobs=1), greedy("b", range(20, 33), 6), greedy("c", [7, 9], 6)]
    expected = run(make_core(model, threads=1, **options), asked)
    with ranked(model, 2, **options) as core:
        found = run(core, asked)
        assert core.runner.graphs is None
    for key, one in expected.items():
        assert found[key].token_ids == one.token_ids
        for ours, theirs in zip(found[key].logits, one.logits, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
