"""`windlass models` and `windlass pull`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.gguf_conversion import byte_vocabulary, convert
from helpers.tiny_models import make_model
from helpers.wheel_index import CONTENT, make_wheel, toy_model

from windlass.server.cli import main as cli
from windlass.server.startup import model_catalog
from windlass.server.startup.model_catalog import KNOWN
from windlass.server.startup.model_files import resolve_model

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    """A model named toy that can be pulled. Its cache and that of Hugging Face are empty."""
    (tmp_path / "links").mkdir()
    model = toy_model(make_wheel(tmp_path / "links"))
    monkeypatch.setitem(KNOWN, "toy", model)
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_", "WINDLASS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return model


def listed(capsys) -> dict[str, dict]:
    assert cli.run(["models", "--json"]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}


@pytest.mark.slow
def test_pull_and_models(toy, capsys):
    before = listed(capsys)
    assert set(before) == set(KNOWN) >= {"smollm2", "demo", "toy"}
    assert [name for name, model in before.items() if model["default"]] == ["qwen2.5-coder-1.5b"]
    assert not before["toy"]["here"] and before["toy"]["where"] is None
    assert before["toy"]["size"] == toy.file.size and before["toy"]["licence"] == "MIT"
    assert before["demo"]["here"] and before["demo"]["where"] == str(DEMO)

    assert cli.run(["pull", "toy"]) == 0
    file = model_catalog.model_file(toy)
    assert file.read_bytes() == CONTENT
    assert str(file) in capsys.readouterr().err
    after = listed(capsys)
    assert after["toy"] | {"here": True, "where": str(file), "size": len(CONTENT)} == after["toy"]

    assert cli.run(["pull", "toy"]) == 0
    assert "already downloaded and complete" in capsys.readouterr().err
    file.write_bytes(bytes(len(CONTENT)))
    assert cli.run(["pull", "toy"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "pull again" in error


def test_models_as_text(capsys):
    assert cli.run(["models"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split()[:2] == ["name", "on"] and lines[1].split()[:4] == ["qwen2.5-coder-1.5b", "no", "1.1", "GB"]
    assert [line.split()[0] for line in lines if line.endswith("(the default)")] == ["qwen2.5-coder-1.5b"]
    assert any(line.split()[:2] == ["demo", "yes"] for line in lines) and str(DEMO) in captured.out
    assert "windlass pull qwen2.5-coder-1.5b" in captured.err


def test_unknown_names(capsys):
    assert cli.run(["pull", "smolm2"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'smollm2'?" in error and error.count("\n") == 1
    assert cli.run(["pull", "demo"]) == 0
    assert str(DEMO) in capsys.readouterr().err


def test_supported_models_of_the_hugging_face_cache_are_listed(tmp_path, capsys):
    good = tmp_path / "hub" / "models--org--good" / "snapshots" / "main"
    shutil.copytree(DEMO, good)
    bad = tmp_path / "hub" / "models--org--bert" / "snapshots" / "main"
    shutil.copytree(DEMO, bad)
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"}))
    (tmp_path / "hub" / "models--org--half" / "snapshots" / "main").mkdir(parents=True)
    found = listed(capsys)
    assert set(found) == {*KNOWN, "org/good"}
    assert found["org/good"]["where"] == str(good) and "LlamaForCausalLM" in found["org/good"]["about"]
    assert found["org/good"]["size"] == found["demo"]["size"]


def test_gguf_files_of_the_hugging_face_cache_are_listed(tmp_path, capsys):
    snapshot = tmp_path / "hub" / "models--org--tiny-GGUF" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    source = make_model("llama", tmp_path / "hf", vocab_size=261, num_hidden_layers=1)
    for kind in ("Q8_0", "Q4_0"):
        convert(source, snapshot / f"tiny-{kind}.gguf", kind=kind, tokenizer=byte_vocabulary())
    (snapshot / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    (snapshot / "other-Q5_K.gguf").write_bytes(b"GGUF, and cut off")
    (snapshot / "split-F16-00001-of-00002.gguf").write_bytes(b"GGUF")  # the second part is missing
    found = listed(capsys)
    assert set(found) == {*KNOWN, "org/tiny-GGUF:Q4_0", "org/tiny-GGUF:Q8_0"}
    small = found["org/tiny-GGUF:Q4_0"]
    assert small["where"] == str(snapshot / "tiny-Q4_0.gguf") and small["size"] == Path(small["where"]).stat().st_size
    assert small["about"].startswith("LlamaForCausalLM, trained for ") and small["here"]
    assert resolve_model("org/tiny-GGUF:Q4_0") == resolve_model(small["where"])
