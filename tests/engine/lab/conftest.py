"""Fixtures of the `windlass rope` commands: a tiny model, runs of `sweep`, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import byte_level

from windlass.server.cli import main as cli


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model with a byte-level tokenizer, whose trained length is TRAINED of the test module."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer, trained = byte_level(), request.module.TRAINED
    size = tokenizer.get_vocab_size()
    make_model("llama", directory, vocab_size=size, max_position_embeddings=trained, num_hidden_layers=2)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def run_sweep() -> Callable[..., int]:
    """Run `rope sweep` on the CPU, with report.html, report.json and report.md in a folder."""

    def run(model: Path, out: Path, *options: object) -> int:
        files = ["--out", out / "report.html", "--json", out / "report.json", "--markdown", out / "report.md"]
        return cli.run(["rope", "sweep", str(model), "--device", "cpu", *map(str, files), *map(str, options)])

    return run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The only line of output of a `rope` command that fails with exit code 2."""

    def run(*arguments: str) -> str:
        assert cli.run(["rope", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured
        return captured.err

    return run
