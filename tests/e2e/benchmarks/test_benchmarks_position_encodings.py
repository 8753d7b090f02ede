"""benchmarks/position_encodings.py: it trains what it says, the server reads its checkpoint, the guide has its numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.doc_examples import ROOT
from transformers import LlamaForCausalLM

from windlass import LLM

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import position_encodings

        yield position_encodings
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def network(study: ModuleType) -> ModuleType:
    from harness import small_transformer

    return small_transformer


def test_training_lowers_the_loss_of_every_kind(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "TOKENS", 256)
    monkeypatch.setattr(study, "EVERY", 8)
    monkeypatch.setattr(study, "held_out", lambda model, texts, scaling: {})
    texts = study.read_texts()
    for positions in study.POSITIONS:
        found = study.train("language model", positions, 1, 16, texts, tmp_path)
        assert found["curve"][1] < found["curve"][0] - 0.1, positions


def make_model(network: ModuleType) -> torch.nn.Module:
    torch.manual_seed(4)
    model = network.SmallTransformer("rotary", 128, 512, causal=True)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms of ones would hide one that is lost
            parameter.data.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def test_its_checkpoint_is_the_same_model_in_transformers_and_here(network: ModuleType, tmp_path: Path) -> None:
    model = make_model(network)
    network.save_checkpoint(model, tmp_path / "rotary")
    text = "The quick brown fox, naïve; über 100 €"
    ids = [network.BEGINNING, *text.encode()]
    mine = -model.losses(torch.tensor([ids]))[0]
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "rotary", attn_implementation="eager")(
        torch.tensor([ids])
    ).logits
    expected = theirs[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(mine, expected, atol=2e-4, rtol=0)
    with LLM(str(tmp_path / "rotary"), kv_cache_memory="16MiB") as llm:
        assert llm.client.tokenize(text, add_special_tokens=False).tokens == tuple(text.encode())
        (answer,) = llm.generate([ids], max_tokens=1, prompt_logprobs=0)
    found = [next(iter(place.values()))["logprob"] for place in answer.choices[0].prompt_logprobs[1:]]
    torch.testing.assert_close(torch.tensor(found), mine, atol=2e-4, rtol=0)
