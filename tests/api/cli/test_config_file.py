"""`windlass serve --config FILE`: values, precedence, and errors with their lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from windlass.engine.errors import RequestError
from windlass.server.cli import main as cli
from windlass.server.cli import parameters
from windlass.server.startup import launch


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WINDLASS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def launched(monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "serve", lambda *arguments: calls.append(arguments) or 0)
    return calls


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> str:
        path = tmp_path / "windlass.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


WHOLE = """
# a comment
model: smollm2
port: 8123
max_model_len: 4096        # underscores too
kv-cache-memory: 1.5GiB
target-step-ms: 1e2
prefix-caching: off
access-log: true
api-key: [one, "two"]
cors-origin: https://a.example
rope-policy: off
rope-scaling: {rope_type: yarn, factor: 4}
rope-profile:
  long: {rope_type: yarn, factor: 8}
  longer: '{"rope_type": "linear", "factor": 2}'
keep-tokens: 1k
log-level: debug
request-timeout:
host: ~
"""


def test_a_file_sets_every_kind_of_option(launched, write):
    assert cli.run(["serve", "--config", write(WHOLE)]) == 0
    ((model, engine, server, _, level, _),) = launched
    assert (model, level, server.port, server.keep_tokens) == ("smollm2", "debug", 8123, 1024)
    assert (server.host, server.request_timeout) == ("127.0.0.1", None)  # empty values mean the defaults
    assert (server.access_log, server.rope_policy) == (True, "off")
    assert (engine.max_model_len, engine.prefix_caching, engine.target_step_ms) == (4096, False, 100.0)
    config = engine.to_config(Path("m"))
    assert config.cache.memory == 3 * 2**29 and config.rotary.scaling.to_dict()["factor"] == 4
    settings = server.to_settings("m", engine)
    assert settings.api_keys == ("one", "two") and settings.cors_origins == ("https://a.example",)
    factors = {name: scaling.to_dict()["factor"] for name, scaling in settings.rope_profiles.items()}
    assert factors == {"long": 8, "longer": 2}


def test_precedence(launched, write, monkeypatch):
    path = write("model: a\nport: 1\nhost: h1\nblock-size: 32\napi-key: [x, y]\nprefix-caching: false")
    monkeypatch.setenv("WINDLASS_CONFIG", path)
    monkeypatch.setenv("WINDLASS_PORT", "2")
    monkeypatch.setenv("WINDLASS_HOST", "h2")
    monkeypatch.setenv("WINDLASS_BLOCK_SIZE", "")  # a compose file passes unset variables as empty
    assert cli.run(["serve", "--port", "3", "--api-key", "z", "--prefix-caching", "b"]) == 0
    ((model, engine, server, _, _, _),) = launched
    assert (model, server.port, server.host, engine.block_size) == ("b", 3, "h2", 32)
    assert server.api_key == ["z"] and engine.prefix_caching is True


@pytest.mark.parametrize("number", ["1e6", "1E+6", "1.e6", "10.0e5", "1.0e+6", "1_000_000.0", "1000000"])
def test_numbers_in_objects(number, launched, write):
    text = f"rope-scaling: {{rope_type: default, rope_theta: {number}}}"
    assert cli.run(["serve", "--config", write(text)]) == 0
    assert launched[0][1].to_config(Path("m")).rotary.scaling.to_dict()["rope_theta"] == 1e6


@pytest.mark.parametrize("word", ["1e", "e6", "'1e6'", "1e6x"])
def test_words_in_objects(word, launched, write):
    assert cli.run(["serve", "--config", write(f"rope-scaling: {{rope_type: yarn, factor: {word}}}")]) == 0
    with pytest.raises(RequestError, match=f"got {word.strip(chr(39))!r}"):
        launched[0][1].to_config(Path("m"))


def test_byte_order_marks_are_ignored(launched, write, tmp_path):
    keys, template = tmp_path / "keys", tmp_path / "template.jinja"
    keys.write_bytes(b"\xef\xbb\xbfsecret\n")
    template.write_bytes(b"\xef\xbb\xbf{{ messages }}")
    path = write(b"\xef\xbb\xbfport: 8123\n")
    arguments = ["--config", path, "--api-key-file", str(keys), "--chat-template", str(template)]
    assert cli.run(["serve", *arguments]) == 0
    (_, engine, server, *_) = launched[0]
    assert server.port == 8123 and server.to_settings("m", engine).api_keys == ("secret",)
    assert server.read_chat_template() == "{{ messages }}"


def test_an_empty_file_sets_nothing(launched, write):
    for text in ("", "# nothing\n", "{}"):
        assert cli.run(["serve", "--config", write(text)]) == 0
    assert all(call[2].port == 8000 for call in launched)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ctx_size: 8", "line 1: 'ctx_size' is not an option of windlass serve: here it is --max-model-len"),
        ("host: h\nprot: 8000", "line 2: 'prot' is not an option of windlass serve (did you mean 'port'?)"),
        ("config: other.yaml", "line 1: 'config' is not an option"),
        ("help: true", "line 1: 'help' is not an option"),
        ("port: eight", "line 1: port must be a whole number between 0 and 65535"),
        ("prefix-caching: perhaps", "line 1: prefix-caching: "),
        ("kv-cache-memory: lots", "line 1: kv-cache-memory must be a size such as 4GiB"),
        (
            "write-timeout: 7",
            "'write-timeout' is not an option of windlass serve: set the environment variable WINDLASS_W",
        ),
        ("api_keys: f", "line 1: 'api_keys' is not an option of windlass serve: it was removed: use --api-key-file"),
        ("port: [1, 2]", "line 1: port takes one value, not a list"),
        ("port: 1\nport: 2", "line 2: port is set twice"),
        ("max-model-len: 1\n\nmax_model_len: 2", "line 3: max_model_len is set twice"),
        ("- port", "must contain options as NAME: VALUE"),
        ("port", "must contain options as NAME: VALUE"),
        ("[a]: 1", "line 1: the name of an option must be a word"),
        ("a: [1\nb: 2", "line 2: this is not valid YAML"),
        ("rope-scaling: {a: !!python/name:os.system x}", "line 1: this cannot be written as JSON"),
        ("rope-scaling: " + "[" * 5000, "nested too deeply"),
        (b"\xff\xfe\x00", "cannot read --config"),
        ("a: \x00", "this is not valid YAML"),
    ],
)
def test_errors_are_one_line_with_their_place(text, expected, launched, write, capsys):
    assert cli.run(["serve", "--config", write(text)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert expected in captured.err and "windlass.yaml" in captured.err
    assert not launched


def test_missing_and_large_files_are_refused(launched, write, capsys, monkeypatch, tmp_path):
    assert cli.run(["serve", "--config", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: cannot read --config {tmp_path / 'none'}: No such file or directory\n"
    monkeypatch.setattr(parameters, "MAX_BYTES", 10)
    assert cli.run(["serve", "--config", write("port: 80000000")]) == 2
    assert "larger than 10 bytes" in capsys.readouterr().err
    assert not launched


def test_a_file_may_be_json(launched, write):
    assert cli.run(["serve", "--config", write(json.dumps({"threads": 2, "deterministic": True, "model": "x"}))]) == 0
    assert (launched[0][0], launched[0][1].threads, launched[0][1].deterministic) == ("x", 2, True)
