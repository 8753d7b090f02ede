"""generation_config.json: what is read, what is refused, and what requests are answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.metadata import _sampling
from windlass.server.options.settings import SamplingDefaults
from windlass.server.startup.model_defaults import read_defaults


def defaults_of(directory: Path, text: str) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(text)
    return read_defaults(directory)


def test_without_a_file_everything_is_neutral(tmp_path):
    assert read_defaults(tmp_path) == SamplingDefaults()
    assert defaults_of(tmp_path, '{"eos_token_id": [1, 2], "max_new_tokens": 3}') == SamplingDefaults()
    assert SamplingDefaults().described() == ""


def test_all_six_are_read(tmp_path):
    given: dict[str, Any] = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.05,
    }
    found = defaults_of(tmp_path, json.dumps({**given, "do_sample": True, "pad_token_id": 0}))
    assert found == SamplingDefaults(**given)
    assert found.described() == (
        "temperature 0.6, top_k 20, top_p 0.95, min_p 0.01, typical_p 0.9, repetition_penalty 1.05"
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
def test_what_no_request_could_set_is_refused_in_one_line(tmp_path, name, value):
    with pytest.raises(LoadError, match=rf"{name} must be .*--generation-config none") as caught:
        defaults_of(tmp_path, f'{{"{name}": {value}}}')
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", "7", '{"temperature": 0.5'])
def test_a_broken_file_is_refused(tmp_path, text):
    with pytest.raises(LoadError, match="generation_config"):
        defaults_of(tmp_path, text)


def test_a_gguf_file_recommends_sampling():
    metadata = {
        "general.sampling.temp": 0.699999988079071,  # as float32 has 0.7
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.100000023841858,
        "general.sampling.mirostat": 2,
    }
    assert _sampling(metadata) == {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}
