"""benchmarks/position_encodings.py: it trains what it says, the server reads its checkpoint, the guide has its numbers."""

from __future__ import annotations

import dataclasses
import json
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


def test_the_guide_has_the_tables_of_the_numbers_beside_it(study: ModuleType) -> None:
    page = (ROOT / "docs" / "guide" / "trained.md").read_text(encoding="utf-8")
    report = json.loads((ROOT / "docs" / "guide" / "trained.json").read_text(encoding="utf-8"))
    assert study.table(report) in page
    assert report["date"] in page and f"{report['steps']} steps" in page
    assert {(run["kind"], run["positions"]) for run in report["runs"]} == {
        (kind, positions) for kind in study.KINDS for positions in study.POSITIONS
    }


def test_without_positions_a_classifier_cannot_see_order_and_with_them_it_can(study: ModuleType) -> None:
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (2, 32))
    for positions in study.POSITIONS:
        model = study.Reader(positions)
        with torch.no_grad():
            change = (model(rows) - model(rows.flip(1))).abs().max()
        assert (change < 1e-5) == (positions == "none"), positions


def test_texts_are_whole_topics_and_half_of_the_labelled_ones_stand_backwards(study: ModuleType) -> None:
    texts = study.read_texts()
    assert len(texts.train) > 3 * len(texts.held_out) > 100_000
    generator = torch.Generator().manual_seed(1)
    rows, labels = study.labelled(texts.train, 32, 8, generator)
    plain = study.windows(texts.train, 32, 8, torch.Generator().manual_seed(1))
    assert labels.tolist() == [0, 1] * 4
    assert torch.equal(rows[labels == 1], plain[labels == 1])
    assert torch.equal(rows[labels == 0][:, 1:], plain[labels == 0][:, 1:].flip(1))
    assert (rows[:, 0] == 256).all()


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


def test_what_is_kept_is_whole_and_of_this_text(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, trained, write = study.read_texts(), [], Path.write_text
    other = dataclasses.replace(texts, digest="0" * 64)

    def train(*given: object) -> dict[str, object]:
        trained.append(given)
        return {"curve": [1.5]}

    def killed(path: Path, data: str, **how: str) -> int:
        write(path, data[:5], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "train", train)
    wanted = ("classifier", "rotary", 0, 500)
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(Path, "write_text", killed)
        study.trained_once(*wanted, texts, tmp_path)
    for _ in range(2):
        assert study.trained_once(*wanted, texts, tmp_path) == {"curve": [1.5]} and len(trained) == 2
    study.trained_once(*wanted, other, tmp_path)
    assert len(trained) == 3 and not list(tmp_path.glob("*.part"))


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
