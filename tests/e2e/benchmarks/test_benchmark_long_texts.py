"""benchmarks/real_model.py on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import byte_level

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer
from windlass.server.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TRAINED = 32


@pytest.fixture
def real_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("real_model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level()
    make_model(
        "llama",
        directory,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=TRAINED,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, step in (("a", 11), ("b", 7)):
        lines = "\n\n".join(f"{name} {i} costs {i * step % 89} pence;" for i in range(200))
        (folder / f"{name}.txt").write_text(lines, encoding="utf-8")
    return folder


def test_questions_name_the_positions_of_the_hidden_numbers(real_model: ModuleType, model: Path, texts: Path) -> None:
    module = real_model.passkeys
    tokenizer = Tokenizer.from_directory(model)
    ids, questions = module.hide(tokenizer, (texts / "a.txt").read_text(), 4000, seed=1, every=40)
    assert len(ids) == 4001 and len(questions) > 5
    for question in questions:
        digits = list(question.answer)
        asked, noted = question.position, question.position - question.distance
        assert ids[asked : asked + len(digits)] == digits == ids[noted : noted + len(digits)]
        words = tokenizer.decode(ids[asked - 60 : asked + len(digits)])
        name = words.rsplit("number of ", 1)[1].split(" ")[0]
        assert f"number of {name} is" in tokenizer.decode(ids[noted - 60 : noted])
    assert len({question.answer for question in questions}) == len(questions)


def test_a_number_is_found_if_every_digit_is_the_likeliest(real_model: ModuleType, model: Path, texts: Path) -> None:
    """Random weights find nothing, so the expected answers are the argmaxes of the logits."""
    module = real_model.passkeys
    scorer = Scorer.load(model, device="cpu")
    ids = Tokenizer.from_directory(model).encode((texts / "a.txt").read_text())[:65]
    scaling = {"rope_type": "linear", "factor": 2.0}
    best = scorer.logits(ids, scorer.plan(64, RopeScaling.from_dict(scaling))).argmax(-1).tolist()
    right = module.Question(20, 5, tuple(best[19:22]))
    wrong = module.Question(40, 5, (best[39], best[40], (best[41] + 1) % 100))
    assert module.ask(scorer, ids, [right, wrong], scaling) == [True, False]


@pytest.mark.slow  # starts five programs that import torch
def test_all_measurements_of_a_model(
    real_model: ModuleType, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(model), "--texts", str(texts), *_folders(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))
    real_model.main()
    page = (tmp_path / "docs" / "real-model.md").read_text()
    report = json.loads((tmp_path / "docs" / "real_model_sweep.json").read_text())
    assert [curve["name"] for curve in report["curves"]][:3] == ["no scaling", "yarn 2", "dynamic 2, frozen"]
    assert page.count("\n## ") == 5 and "| yarn 2 | " in page and "| transformers, cached | " in page
    assert "int8, %" in page and "asked at 48–64" in page
    (tmp_path / "docs" / "real-model.md").unlink()
    monkeypatch.setattr(sys, "argv", ["x", "--page-only", *_folders(tmp_path)])
    real_model.main()
    assert (tmp_path / "docs" / "real-model.md").read_text() == page


def test_a_page_of_another_author_is_not_overwritten(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    sources = (BENCHMARKS.parent / "docs" / "real-model.md", BENCHMARKS / "results" / "real_model_sweep.json")
    before = {path.name: (docs / path.name).write_bytes(path.read_bytes()) for path in sources}
    for words in (["--page-only"], [str(tmp_path / "model")]):
        monkeypatch.setattr(sys, "argv", ["x", *words, *_folders(tmp_path)])
        with pytest.raises(SystemExit):
            real_model.main()
        assert "real-model.md was not written by this program" in capsys.readouterr().err
    assert {path.name: path.stat().st_size for path in docs.iterdir()} == before
    monkeypatch.chdir(tmp_path)  # the default output folder is not docs/
    monkeypatch.setattr(sys, "argv", ["x", "--page-only"])
    with pytest.raises(SystemExit, match="no numbers in work/real/docs"):
        real_model.main()


def _folders(tmp_path: Path) -> list[str]:
    return ["--work", str(tmp_path / "work"), "--docs", str(tmp_path / "docs")]
