"""The measurements on long texts: each on a tiny model, against what it says it measures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.rotary_oracles import CachedInOnePass, cached_by_transformers, dynamic_frequencies
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import byte_level

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer
from windlass.server.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TRAINED, LENGTH = 32, 96


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


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


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: object) -> dict:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--out", str(out)])
    module.main()
    return json.loads(out.read_text())


def test_one_pass_gives_what_transformers_cache_gives(tmp_path: Path) -> None:
    """Random weights forgive nothing: a key at any other frequencies would show in the first digits."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    directory = make_model(
        "llama", tmp_path, num_hidden_layers=3, max_position_embeddings=TRAINED, rope_parameters=dynamic
    )
    ids = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    frequencies = dynamic_frequencies(10_000.0, 16, 2.0, TRAINED, grid=False)
    for prompt in (1, 48):
        expected = cached_by_transformers(directory, ids, prompt)
        one_pass = CachedInOnePass(directory)
        with torch.no_grad():
            found = one_pass.model.lm_head(one_pass.hidden(ids, frequencies, prompt))
        assert (found - expected).abs().max() / expected.abs().max() < 1e-5


def test_hidden_numbers_stand_where_the_questions_say(model: Path, texts: Path) -> None:
    module = load("passkeys")
    tokenizer = Tokenizer.from_directory(model)
    ids, questions = module.hide(tokenizer, (texts / "a.txt").read_text(), 4000, seed=1, every=40)
    assert len(ids) == 4001 and len(questions) > 5
    for question in questions:
        digits = list(question.answer)
        asked, told = question.position, question.position - question.distance
        assert ids[asked : asked + len(digits)] == digits == ids[told : told + len(digits)]
        words = tokenizer.decode(ids[asked - 60 : asked + len(digits)])
        name = words.rsplit("number of ", 1)[1].split(" ")[0]
        assert f"number of {name} is" in tokenizer.decode(ids[told - 60 : told])
    assert len({question.answer for question in questions}) == len(questions)


def test_a_number_is_found_when_every_digit_is(model: Path, texts: Path) -> None:
    """Against argmaxes of logits: random weights find nothing, so the answers are set to what they say, then spoilt."""
    module = load("passkeys")
    scorer = Scorer.load(model, device="cpu")
    ids = Tokenizer.from_directory(model).encode((texts / "a.txt").read_text())[:65]
    scaling = {"rope_type": "linear", "factor": 2.0}
    best = scorer.logits(ids, scorer.plan(64, RopeScaling.from_dict(scaling))).argmax(-1).tolist()
    right = module.Question(20, 5, tuple(best[19:22]))
    spoilt = module.Question(40, 5, (best[39], best[40], (best[41] + 1) % 100))
    assert module.ask(scorer, ids, [right, spoilt], scaling) == [True, False]


@pytest.mark.slow  # five programs, each of which imports torch
def test_all_of_it_for_one_model(model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step runs as a person would run it, and the page shows every table."""
    module = load("real_model")
    monkeypatch.setattr(sys, "argv", ["x", str(model), "--texts", str(texts), *_folders(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))
    module.main()
    page = (tmp_path / "docs" / "real-model.md").read_text()
    report = json.loads((tmp_path / "docs" / "real_model_sweep.json").read_text())
    assert [curve["name"] for curve in report["curves"]][:3] == ["no scaling", "yarn 2", "dynamic 2, frozen"]
    assert page.count("\n## ") == 5 and "| yarn 2 | " in page and "| transformers, cached | " in page
    assert "int8, %" in page and "asked at 48–64" in page
    (tmp_path / "docs" / "real-model.md").unlink()
    monkeypatch.setattr(sys, "argv", ["x", "--page-only", *_folders(tmp_path)])
    module.main()
    assert (tmp_path / "docs" / "real-model.md").read_text() == page


def test_a_page_that_somebody_wrote_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, docs = load("real_model"), tmp_path / "docs"
    docs.mkdir()
    before = {
        name: (docs / name).write_bytes((BENCHMARKS.parent / "docs" / name).read_bytes())
        for name in ("real-model.md", "real_model_sweep.json")
    }
    for words in (["--page-only"], [str(tmp_path / "model")]):
        monkeypatch.setattr(sys, "argv", ["x", *words, *_folders(tmp_path)])
        with pytest.raises(SystemExit):
            module.main()
        assert "real-model.md was not made by this program" in capsys.readouterr().err
    assert {path.name: path.stat().st_size for path in docs.iterdir()} == before
    monkeypatch.chdir(tmp_path)  # by default it is not docs/ that is written to
    monkeypatch.setattr(sys, "argv", ["x", "--page-only"])
    with pytest.raises(SystemExit, match="there are no numbers in work/real/docs"):
        module.main()


def _folders(tmp_path: Path) -> list[str]:
    return ["--work", str(tmp_path / "work"), "--docs", str(tmp_path / "docs")]
