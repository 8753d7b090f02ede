"""Default sampling: from generation_config.json, known models and the operator, and refused values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.gguf_description import _sampling
from windlass.server.config.settings import SamplingDefaults
from windlass.server.startup.model_defaults import ModelSampling, find_sampling
from windlass.server.startup.model_files import known_sampling

NOTHING: dict[str, float] = {}
SMALL = {"temperature": 0.2, "top_p": 0.9}  # as of a known model


def found_in(
    directory: Path,
    text: str,
    recommended: dict[str, float] = NOTHING,
    given: str = "auto",
    override: str | None = None,
) -> ModelSampling:
    (directory / "generation_config.json").write_text(text)
    return find_sampling(directory, recommended, given, override)


def defaults_of(directory: Path, text: str) -> SamplingDefaults:
    return found_in(directory, text).sampling


def told(found: ModelSampling) -> str:
    return found.sampling.describe(found.sources)


def test_without_a_file_everything_is_neutral(tmp_path):
    assert find_sampling(tmp_path, {}) == ModelSampling(SamplingDefaults())
    assert defaults_of(tmp_path, '{"eos_token_id": [1, 2], "max_new_tokens": 3}') == SamplingDefaults()
    assert SamplingDefaults().describe({}) == ""


def test_all_fields_are_read(tmp_path):
    given: dict[str, Any] = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.05,
    }
    found = found_in(tmp_path, json.dumps({**given, "do_sample": True, "pad_token_id": 0}), SMALL)
    assert found.sampling == SamplingDefaults(**given)
    assert told(found) == (
        "temperature 0.6, top_k 20, top_p 0.95, min_p 0.01, typical_p 0.9, repetition_penalty 1.05 "
        "(generation_config.json)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"temperature": null, "top_k": null, "do_sample": null}', SamplingDefaults()),
        ('{"temperature": 1, "top_k": 0}', SamplingDefaults()),
        ('{"top_k": -1}', SamplingDefaults()),
        ('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}', SamplingDefaults(temperature=0.0, top_p=0.9)),
        ('{"temperature": 0}', SamplingDefaults(temperature=0.0)),
    ],
)
def test_edges(tmp_path, text, expected):
    assert defaults_of(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", '"hot"'),
        ("temperature", "NaN"),
        ("temperature", "-1"),
        ("temperature", "Infinity"),
        ("temperature", "1e999"),
        ("temperature", "true"),
        ("temperature", "[0.6]"),
        ("temperature", "1" * 4000),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("min_p", "-0.1"),
        ("typical_p", "0"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "{}"),
        ("top_k", "1.5"),
        ("top_k", "-2"),
        ("top_k", "99999999999"),
        ("top_k", '"' + "x" * 9999 + '"'),
        ("do_sample", "1"),
    ],
)
def test_invalid_values_are_one_line(tmp_path, name, value):
    with pytest.raises(LoadError, match=rf"{name} must be .*`generation_config=none`") as caught:
        defaults_of(tmp_path, f'{{"{name}": {value}}}')
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", "7", '{"temperature": 0.5'])
def test_a_broken_file_is_refused(tmp_path, text):
    with pytest.raises(LoadError, match="generation_config"):
        defaults_of(tmp_path, text)


BY_AUTHORS, BY_FILE, BY_OPERATOR = (
    "(recommended by its authors)",
    "(generation_config.json)",
    "(--override-generation-config)",
)


@pytest.mark.parametrize(
    ("text", "given", "override", "expected"),
    [
        ("{}", "auto", None, f"temperature 0.2, top_p 0.9 {BY_AUTHORS}"),
        ('{"temperature": null, "top_k": 5}', "auto", None, f"temperature 0.2, top_p 0.9 {BY_AUTHORS}, top_k 5 {BY_FILE}"),
        ('{"top_p": 0.5}', "auto", None, f"temperature 0.2 {BY_AUTHORS}, top_p 0.5 {BY_FILE}"),
        ('{"do_sample": false}', "auto", None, f"temperature 0 {BY_FILE}, top_p 0.9 {BY_AUTHORS}"),
        ('{"top_p": 0.5}', "none", None, ""),
        ('{"top_p": 0.5}', "vllm", None, ""),
        ('{"top_p": 0.5}', "none", '{"top_k": 7}', f"top_k 7 {BY_OPERATOR}"),
        ('{"top_k": 5}', "auto", '{"top_p": 0.7, "top_k": null}', f"temperature 0.2 {BY_AUTHORS}, top_p 0.7 {BY_OPERATOR}"),
        ("{}", "auto", '{"temperature": 1, "top_p": null}', ""),
        ('{"do_sample": false}', "auto", '{"temperature": 0.7, "top_p": 1}', f"temperature 0.7 {BY_OPERATOR}"),
        ('{"do_sample": false, "top_p": 1, "temperature": 0.6}', "auto", '{"do_sample": true}', f"temperature 0.6 {BY_FILE}"),
        ("{}", "auto", '{"do_sample": false}', f"temperature 0 {BY_OPERATOR}, top_p 0.9 {BY_AUTHORS}"),
    ],
)  # fmt: skip
def test_values_and_sources(tmp_path, text, given, override, expected):
    assert told(found_in(tmp_path, text, SMALL, given, override)) == expected


def test_another_file_or_folder_replaces_the_model_s_own(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.4}')
    (other / "mine.json").write_text('{"min_p": 0.1}')
    for path, expected in (
        (other, f"temperature 0.4 ({other}/generation_config.json)"),
        (other / "mine.json", f"min_p 0.1 ({other}/mine.json)"),
    ):
        assert told(found_in(tmp_path, '{"top_k": 5}', SMALL, str(path))) == expected
    (other / "mine.json").write_text('{"min_p": 3}')
    with pytest.raises(LoadError, match=rf"{other}/mine.json: min_p must be a number from 0 to 1, got 3"):
        find_sampling(tmp_path, {}, str(other / "mine.json"))


def test_a_folder_with_a_known_name_is_not_the_known_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert known_sampling("smollm2", "smollm2", tmp_path) == known_sampling(None, "smollm2", tmp_path) == SMALL
    assert known_sampling("demo", "demo", tmp_path) == known_sampling("org/name", "org/name", tmp_path) == {}
    (tmp_path / "smollm2").mkdir()
    assert known_sampling("smollm2", "smollm2", tmp_path) == {}


def test_a_gguf_file_recommends_sampling():
    metadata = {
        "general.sampling.temp": 0.699999988079071,  # as float32 has 0.7
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.100000023841858,
        "general.sampling.mirostat": 2,
    }
    assert _sampling(metadata) == {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}
