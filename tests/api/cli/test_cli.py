"""The command line: options to configuration, environment variables, one-line errors, and `generate` and `bench`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from helpers.configs import engine_config
from helpers.served import Served
from helpers.toy_tokenizers import byte_level
from typer.main import get_command

from windlass import __version__
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import (
    AdapterConfig,
    CacheConfig,
    ComputeConfig,
    ContextConfig,
    EngineConfig,
    LoadingConfig,
    RotaryConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.auto_scaling import AUTO, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.cli import entry
from windlass.server.cli import main as cli
from windlass.server.cli.parameters import COMMON_OPTIONS
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import REMOVED
from windlass.server.config.option import options_of
from windlass.server.config.option_names import to_flat, with_option_names
from windlass.server.config.server_options import OPTIONS, ConnectionOptions, ServerOptions
from windlass.server.http.connection_limits import ConnectionSettings
from windlass.server.startup import engines, launch

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
YARN = '{"rope_type": "yarn", "factor": 4}'


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WINDLASS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def launched(monkeypatch):
    """Arguments of each call of `launch.serve`."""
    calls = []
    monkeypatch.setattr(launch, "serve", lambda *arguments: calls.append(arguments) or 0)
    return calls


@pytest.fixture
def model(tmp_path):
    """A directory with a configuration and a tokenizer, without weights."""
    directory = tmp_path / "toy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv(engines.CORE_VARIABLE, "helpers.scripted_core:ScriptedCore")


def error_of(capsys, *arguments: str) -> str:
    """The error line of a command without its prefix "error: "."""
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured
    return captured.err.removeprefix("error: ").rstrip("\n")


ENGINE_ARGUMENTS = {
    "--device": "cpu",
    "--dtype": "bf16",
    "--kv-cache-dtype": "float16",
    "--max-model-len": "4096",
    "--max-num-batched-tokens": "512",
    "--max-num-seqs": "9",
    "--max-waiting": "33",
    "--kv-cache-memory": "1.5GiB",
    "--quantization": "int4",
    "--weight-cache": "/var/cache/windlass",
    "--kv-persist": "/var/cache/windlass/kv",
    "--kv-host-memory": "12GiB",
    "--rope-scaling": "auto,8k=none,32768=long",
    "--rope-profile": f"long={YARN}",
    "--rope-update": "rotate",
    "--speculative-ngram": "5",
    "--speculative-model": "/models/small",
    "--speculative-tokens": "7",
    "--lora": "poet=/",
    "--max-loras": "3",
    "--threads": "3",
    "--tensor-parallel": "2",
    "--target-step-ms": "100",
}
ENGINE_VARIABLES = {  # without an option on the command line
    "WINDLASS_ACTIVATIONS": "float32",
    "WINDLASS_BLOCK_SIZE": "32",
    "WINDLASS_BURST_MS": "30",
    "WINDLASS_CUDA_GRAPHS": "false",
    "WINDLASS_KV_PERSIST_SIZE": "6GiB",
    "WINDLASS_LOAD_FORMAT": "dummy",
    "WINDLASS_MAX_LORA_RANK": "16",
    "WINDLASS_MAX_TOTAL_TOKENS": "9000",
    "WINDLASS_PIN_CORES": "true",
    "WINDLASS_SHIFT_CONTEXT": "64",
    "WINDLASS_SPECULATIVE_ADAPTIVE": "false",
    "WINDLASS_SPECULATIVE_MODEL_QUANTIZATION": "int8",
}
ENGINE_CONFIG = EngineConfig(
    model="/models/x",
    max_model_len=4096,
    context=ContextConfig(shift_context=64, max_total_tokens=9000),
    adapters=AdapterConfig(sources=(AdapterSource(1, "poet", "/"),), max_loaded=3, max_rank=16),
    compute=ComputeConfig(
        device="cpu",
        dtype="bfloat16",
        quantization="int4",
        activations="float32",
        deterministic=True,
        cuda_graphs=False,
        threads=3,
        cores=(0, 1),
        tensor_parallel=2,
    ),
    loading=LoadingConfig(format="dummy", weight_cache="/var/cache/windlass"),
    cache=CacheConfig(
        dtype="float16",
        memory=3 * 2**29,
        block_size=32,
        prefix_caching=False,
        persist="/var/cache/windlass/kv",
        persist_size=6 << 30,
        host_memory=12 << 30,
    ),
    scheduling=SchedulerConfig(
        max_num_batched_tokens=512,
        max_num_seqs=9,
        max_waiting=33,
        target_step_seconds=0.1,
        burst_seconds=0.03,
        speculation=SpeculationConfig(
            num_tokens=5,
            model="/models/small",
            quantization="int8",
            draft_tokens=7,
            adaptive=False,
        ),
    ),
    rotary=RotaryConfig(
        scaling=AUTO,
        update="rotate",
        ladder=(
            ScalingThreshold(8192),
            ScalingThreshold(32768, RopeScaling.from_dict({"rope_type": "yarn", "factor": 4}), "long"),
        ),
    ),
)


@pytest.mark.parametrize("by", ["arguments", "environment"])
def test_engine_options(by, launched, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    arguments = ["serve"]
    for name, value in ENGINE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    if by == "arguments":
        arguments += [
            *sum(ENGINE_ARGUMENTS.items(), ()),
            "--no-prefix-caching",
            "--deterministic",
            "the-model",
            "--log-level",
            "debug",
        ]
    else:
        for name, value in ENGINE_ARGUMENTS.items():
            monkeypatch.setenv("WINDLASS_" + name[2:].replace("-", "_").upper(), value)
        monkeypatch.setenv("WINDLASS_PREFIX_CACHING", "false")
        monkeypatch.setenv("WINDLASS_DETERMINISTIC", "true")
        monkeypatch.setenv("WINDLASS_MODEL", "the-model")
        monkeypatch.setenv("WINDLASS_LOG_LEVEL", "debug")
    assert cli.run(arguments) == 0
    ((model, engine, _, _, level, _),) = launched
    assert (model, level) == ("the-model", "debug")
    assert engine.to_config(Path("/models/x")) == ENGINE_CONFIG
    assert engine.profiles() == {"long": RopeScaling.from_dict(json.loads(YARN))}
    # A new option belongs in these tables. A share of a GPU cannot be combined with a size, nor the MTP layer with a draft model.
    assert len(ENGINE_ARGUMENTS) + len(ENGINE_VARIABLES) + 4 == len(dataclasses.fields(EngineOptions))


def test_the_memory_share_of_a_gpu(launched):
    assert cli.run(["serve", "--gpu-memory-utilization", "0.5"]) == 0
    ((_, engine, *_),) = launched
    assert engine.to_config(Path("m")) == engine_config("m", gpu_memory_utilization=0.5)
    assert engine.to_config(Path("m")).cache.device_share == 0.5


def test_the_mtp_layer(launched, monkeypatch):
    monkeypatch.setenv("WINDLASS_SPECULATIVE_MODEL_QUANTIZATION", "int8")
    assert cli.run(["serve", "--speculative-mtp"]) == 0
    ((_, engine, *_),) = launched
    assert engine.to_config(Path("m")).scheduling.speculation == SpeculationConfig(mtp=True, quantization="int8")


def test_defaults_of_options_equal_those_of_the_configuration(launched):
    assert cli.run(["serve"]) == 0
    ((model, engine, server, connections, _, _),) = launched
    assert model is None
    assert engine.to_config(Path("m")) == engine_config("m")
    settings = server.to_settings("name")
    assert (settings.served_model_name, settings.api_keys, settings.cors_origins) == ("name", (), ())
    assert server.host == "127.0.0.1"
    assert ConnectionSettings.from_options(connections) == ConnectionSettings()


def test_server_options(launched, monkeypatch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# comment\n  third \n\nfirst\n")
    monkeypatch.setenv("WINDLASS_API_KEY", "first, second")
    monkeypatch.setenv("WINDLASS_PORT", "8123")
    arguments = [
        "--api-key-file",
        str(keys),
        "--served-model-name",
        "toy,b",
        "--served-model-name",
        "c",
        "--default-max-tokens",
        "77",
    ]
    arguments += ["--reasoning-parser", "granite", "--tool-call-parser", "hermes"]
    arguments += ["--no-ui"]
    arguments += ["--grace-period", "2.5", "--request-timeout", "60", "--host", "::1"]
    arguments += ["--cors-origin", "https://a.example", "--cors-origin", "https://b.example,https://c.example"]
    assert cli.run(["serve", *arguments]) == 0
    ((_, _, server, _, _, _),) = launched
    settings = server.to_settings("ignored")
    assert (server.host, server.port) == ("::1", 8123)
    assert settings.api_keys == ("first", "second", "third")
    assert not settings.ui
    assert settings.model_names == ("toy", "b", "c") and settings.default_max_tokens == 77
    assert (settings.grace_seconds, settings.default_timeout) == (2.5, 60.0)
    assert (settings.reasoning_parser, settings.tool_call_parser) == ("granite", "hermes")
    assert settings.cors_origins == ("https://a.example", "https://b.example", "https://c.example")
    assert (settings.rope_policy, settings.rope_exact, settings.rope_profiles) == ("allow", False, {})

    rotary = ["--rope-policy", "profiles,exact", "--rope-profile", f"long={YARN}", "--rope-update", "rotate"]
    assert cli.run(["serve", *rotary, "--rope-scaling", "long"]) == 0
    _, engine, server, _, _, _ = launched[-1]
    settings = server.to_settings("m", engine)
    assert (settings.rope_policy, settings.rope_exact, settings.rope_update) == ("profiles", True, "rotate")
    yarn = RopeScaling.from_dict(json.loads(YARN))
    assert settings.rope_profiles == {"long": yarn} and engine.to_config(Path("m")).rotary.scaling == yarn

    assert cli.run(["serve", "--api-key", "x", "--api-key", "y"]) == 0  # arguments replace the variable
    assert launched[-1][2].to_settings("m").api_keys == ("x", "y")


def test_connection_options(launched, monkeypatch):
    monkeypatch.setenv("WINDLASS_WRITE_TIMEOUT", "1.5")
    monkeypatch.setenv("WINDLASS_HEADER_TIMEOUT", "2")
    monkeypatch.setenv("WINDLASS_KEEP_ALIVE_TIMEOUT", "7.5")
    arguments = ["--max-connections", "300", "--max-connections-per-address", "20"]
    arguments += ["--forwarded-allow-ips", "10.0.0.0/8, ::1"]
    assert cli.run(["serve", *arguments]) == 0
    settings = ConnectionSettings.from_options(launched[-1][3])
    assert (settings.max_connections, settings.max_per_address) == (300, 20)
    assert (settings.header_seconds, settings.idle_seconds, settings.write_seconds) == (2.0, 7.5, 1.5)
    trusted = ("10.1.2.3", "::1", "::ffff:10.1.2.3", "127.0.0.1", "::2")
    assert [settings.trusts(address) for address in trusted] == [True, True, True, False, False]
    # The limit of open files is the upper bound.
    assert (settings.capped_by_files(228).max_connections, settings.capped_by_files(228).max_per_address) == (100, 20)
    assert (settings.capped_by_files(138).max_connections, settings.capped_by_files(138).max_per_address) == (10, 10)

    assert cli.run(["serve", "--forwarded-allow-ips", "*"]) == 0
    assert all(map(ConnectionSettings.from_options(launched[-1][3]).trusts, trusted))


def test_infinite_times() -> None:
    settings = ServerOptions(grace_period=math.inf, request_timeout=math.inf).to_settings("m")
    assert (settings.grace_seconds, settings.default_timeout) == (1e9, None)  # the range of clocks


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "seven"], "--port"),
        (["--port", "70000"], "--port must be a whole number between 0 and 65535"),
        (["--nope"], "--nope"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--max-waiting", "-3"], "--max-waiting must be at least 1"),
        (["--dtype", "int4"], "--dtype names an unknown dtype 'int4'"),
        (
            ["--kv-cache-memory", "lots"],
            "--kv-cache-memory must be a size such as 4GiB, 500MB or a number of bytes, got 'lots'",
        ),
        (["--target-step-ms", "-1"], "--target-step-ms must be finite and not negative"),
        (["--target-step-ms", "inf"], "--target-step-ms must be finite and not negative"),
        (["--rope-scaling", "{"], "--rope-scaling is not valid JSON"),
        (["--rope-scaling", "[4]"], "--rope-scaling must be an object such as"),
        (["--rope-scaling", '{"rope_type": "yarn", "factor": 0}'], "--rope-scaling.factor"),
        (["--rope-scaling", '{"rope_type": "spiral"}'], "spiral"),
        (["--rope-scaling", "long"], "--rope-scaling long: no --rope-profile has this name"),
        (["--rope-profile", 'long={"rope_type": "yarn", "factor": 0}'], "--rope-profile long.factor"),
        (["--rope-profile", "auto={}"], "--rope-profile auto: the name means the smallest scaling"),
        (
            ["--rope-scaling", "auto,8192"],
            "--rope-scaling must be a scaling with TOKENS=PROFILE, such as auto,8192=none",
        ),
        (["--rope-scaling", "auto,8192=lang"], "--rope-scaling 8192=lang: no --rope-profile has this name"),
        (["--rope-update", "sometimes"], "--rope-update must be frozen, recompute or rotate, got 'sometimes'"),
        (
            ["--rope-policy", "maybe"],
            "--rope-policy must be allow, profiles, off or exact, or two with a comma such as",
        ),
        (
            ["--generation-config", "nonne"],
            "--generation-config must be auto, none, or an existing generation_config.json or its folder, got 'nonne' "
            "(did you mean 'none'?)",
        ),
        (
            ["--generation-config", "x" * 999],
            "--generation-config must be auto, none, or an existing generation_config.json",
        ),
        (["--generation-config", "/"], "--generation-config /: this folder has no generation_config.json"),
        (["--override-generation-config", "{"], "--override-generation-config is not valid JSON"),
        (["--override-generation-config", "[]"], "--override-generation-config must be a JSON object: write it like"),
        (
            ["--override-generation-config", '{"temperature": 101}'],
            "temperature must be a number from 0 to 100, got 101: write it",
        ),
        (["--override-generation-config", '{"top_p": NaN}'], "is not valid JSON (JSON has no NaN)"),
        (
            ["--override-generation-config", '{"temprature": 1}'],
            "an unknown field 'temprature' (did you mean 'temperature'?)",
        ),
        (
            ["--override-generation-config", '{"max_new_tokens": 9}'],
            "use --default-max-tokens instead of max_new_tokens",
        ),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs must be a JSON object"),
        (
            ["--default-chat-template-kwargs", '{"tools": 1}'],
            "--default-chat-template-kwargs: tools comes from each request",
        ),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "/no/such/file"], "--ssl-certfile /no/such/file is not a file"),
        (["--root-path", "llm"], "--root-path must be a path such as /llm"),
        (["--root-path", "/a//b"], "--root-path must be a path such as /llm"),
        (["--chat-template", "/no/such/file"], "cannot read --chat-template"),
        (["--tool-call-parser", "qwen"], "--tool-call-parser must be auto, none, hermes"),
        (
            ["--reasoning-parser", "qwen"],
            "--reasoning-parser must be auto, deepseek_r1, qwen3, granite, gemma4, ",
        ),
        (["--grace-period", "-1"], "--grace-period must be 0 or more seconds"),
        (["--grace-period", "nan"], "--grace-period must be 0 or more seconds, at most 1e+09 or inf, got 'nan'"),
        (
            ["--request-timeout", "nan"],
            "--request-timeout must be more than 0 seconds, at most 1e+09 or inf, got 'nan'",
        ),
        (["--threads", "2147483648"], "--threads must be at most 1024"),
        (["--max-num-seqs", "9" * 20], "--max-num-seqs must be at most 65536"),
        (["--kv-cache-memory", "9" * 400], "--kv-cache-memory must be a size such as 4GiB"),
        (["--request-timeout", "0"], "--request-timeout must be more than 0"),
        (["--context-overflow", "roll"], "--context-overflow must be error, stop, shift or drop_turns"),
        (["--default-max-tokens", "0"], "--default-max-tokens must be at least 1"),
        (["--max-connections", "0"], "--max-connections must be a whole number of at least 1"),
        (["--max-connections-per-address", "-1"], "--max-connections-per-address must be a whole number of at least 1"),
        (["--forwarded-allow-ips", "proxy.local"], "--forwarded-allow-ips proxy.local is not an address"),
        (["--log-level", "loud"], "--log-level must be debug, info, warning or error"),
        (["--api-key", " , "], "--api-key is empty"),
        (["--api-key-file", "/no/such/file"], "cannot read --api-key-file"),
        (["--weight-cache", ""], "--weight-cache is empty: give a folder"),
        (["--weight-cache", __file__], "is a file: give a folder, or model for one in the model's directory"),
        (["--weight-cache", "~nobody-of-that-name/x"], "give a folder, or model"),
        (["--kv-persist", ""], "--kv-persist is empty: give a folder"),
        (["--kv-persist", __file__], "is a file: give a folder"),
        (["--kv-persist", "~nobody-of-that-name/x"], "give a folder"),
        (["--kv-host-memory", "much"], "--kv-host-memory must be a size such as 4GiB"),
        (["--kv-cache-memory", "4"], "--kv-cache-memory is 4 bytes: write 4GiB"),
        (["--kv-host-memory", "1048575"], "--kv-host-memory is 1048575 bytes: write 1048575MiB"),
        (["--max-model-len", "8q"], "--max-model-len must be auto or a whole number of tokens such as 8192 or 8k"),
        (["--max-model-len", "25.6k"], "got '25.6k'"),
        (["--max-model-len", "8192.0"], "got '8192.0'"),
        (["--max-num-batched-tokens", "auto"], "got 'auto'"),
        (["--speculative-ngram", "-1"], "--speculative-ngram must lie between 0 and 64"),
        (["--speculative-tokens", "17"], "--speculative-tokens must lie between 1 and 16, got 17"),
        (["--speculative-mtp", "--speculative-model", "demo"], "leave one of them out"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_errors_of_options_are_one_line(arguments, expected, capsys):
    assert expected in error_of(capsys, "serve", *arguments)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (
            "WINDLASS_ACTIVATIONS",
            "int4",
            "WINDLASS_ACTIVATIONS must be int8 or float32, got 'int4' (did you mean 'int8'?)",
        ),
        ("WINDLASS_BLOCK_SIZE", "24", "configuration key block-size must be a multiple of 16"),
        ("WINDLASS_HEADER_TIMEOUT", "0", "WINDLASS_HEADER_TIMEOUT must be more than 0 seconds"),
        ("WINDLASS_KEEP_ALIVE_TIMEOUT", "inf", "must be more than 0 seconds, at most 1e+09, got 'inf'"),
        ("WINDLASS_KV_PERSIST_SIZE", "1GiB", "name one with --kv-persist, or leave it out"),
        ("WINDLASS_KV_PERSIST_SIZE", "much", "configuration key kv-persist-size must be a size"),
        ("WINDLASS_LOAD_FORMAT", "pickle", "WINDLASS_LOAD_FORMAT must be safetensors or dummy"),
        ("WINDLASS_SPECULATIVE_MODEL_QUANTIZATION", "int5", "must be none, int8 or int4"),
        (
            "WINDLASS_SPECULATIVE_MODEL_QUANTIZATION",
            "int8",
            "name one with --speculative-model, ask for --speculative-mtp",
        ),
        ("WINDLASS_STATS_INTERVAL", "-1", "WINDLASS_STATS_INTERVAL must be 0 or more seconds"),
        ("WINDLASS_STATS_INTERVAL", "inf", "WINDLASS_STATS_INTERVAL must be"),
        (
            "WINDLASS_WRITE_TIMEOUT",
            "nan",
            "WINDLASS_WRITE_TIMEOUT must be more than 0 seconds, at most 1e+09, got 'nan'",
        ),
        ("WINDLASS_API_KEYS", "keys.toml", "the variable WINDLASS_API_KEYS was removed: use --api-key-file"),
    ],
)
def test_errors_of_variables_are_one_line(variable, value, expected, monkeypatch, capsys):
    monkeypatch.setenv(variable, value)
    assert expected in error_of(capsys, "serve", "/no/such/model")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_errors_of_removed_options_contain_their_replacement(command, capsys):
    for name, hint in REMOVED.items():
        error = error_of(capsys, command, f"--{name.replace('_', '-')}", "1")
        assert with_option_names(hint) in error and f"No such option: --{name.replace('_', '-')}: " in error
    for option in OPTIONS.values():
        if option.scope != "flag" and (command == "serve" or option.sets):
            error = error_of(capsys, command, option.flag, "1")
            assert option.variable in error
            assert ("--config FILE" in error) == (command == "serve" and option.scope == "key")


@pytest.mark.parametrize("name", ["", " , "])
def test_an_empty_model_name_is_refused(name):
    with pytest.raises(LoadError, match="`served_model_name` is empty: give a name, or leave it out"):
        ServerOptions(served_model_name=[name]).to_settings("toy")


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("WINDLASS_MAX_MODEL_LNE", "WINDLASS_MAX_MODEL_LEN"),
        ("WINDLASS_CHACHE", "WINDLASS_CACHE"),
        ("WINDLASS_PROT", "WINDLASS_PORT"),
        ("WINDLASS_SYSTEMM", None),  # an option without a variable
        ("WINDLASS_SERVICE_HOST", None),  # Kubernetes sets these for a service with this name
        ("WINDLASS_PORT_8000_TCP_ADDR", None),
        ("WINDLASS_MAX_MODEL_LEN", None),
        ("WINDLASS_API_KEY", None),
        ("MAX_MODEL_LNE", None),
    ],
)
def test_a_misspelled_variable_has_a_warning(name, near, monkeypatch, capsys):
    for variable in [variable for variable in os.environ if variable.startswith("WINDLASS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(name, "64")
    assert cli.run(["version"]) == 0
    warning = f"warning: the environment variable {name} has no effect: did you mean {near}?\n" if near else ""
    assert capsys.readouterr().err == warning


def test_ctrl_c_during_the_imports(monkeypatch):
    class Interrupted:
        def find_spec(self, name, path, target=None):
            if name == "windlass.server.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "windlass.server.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130


def test_the_entry_point_imports_no_large_libraries():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"windlass": f"{entry.__name__}:main"}
    code = f"import {entry.__name__}, sys; print([name for name in ('typer', 'rich', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        ("8192", 8192),
        ("8k", 8192),
        ("8K", 8192),
        ("1.5k", 1536),
        (" 1m ", 1 << 20),
        ("1M", 1 << 20),
        ("2g", 2 << 30),
        ("2G", 2 << 30),
        ("auto", None),
        ("Auto", None),
    ],
)
def test_token_counts_with_a_unit(written, tokens, monkeypatch):
    found = []
    monkeypatch.setattr(
        "windlass.server.startup.launch.serve", lambda model, engine, *others: found.append(engine) or 0
    )
    assert cli.run(["serve", "--max-model-len", written]) == 0
    monkeypatch.setenv("WINDLASS_MAX_MODEL_LEN", written)
    assert cli.run(["serve", "--max-num-batched-tokens", "2K"]) == 0
    assert [engine.max_model_len for engine in found] == [tokens, tokens]
    assert found[1].max_num_batched_tokens == 2048 and found[1].to_config(Path()).max_model_len == tokens


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["sevre"], "'serve'"),
        (["bench", "srve"], "'serve'"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--rope-polcy", "off"], "--rope-policy"),
        (["generate", "--tempratur", "1", "x"], "--temperature"),
        (["serve", "--quantization", "int9"], "'int8'"),
        (["serve", "--quantization", "INT4"], "'int4'"),
        (["serve", "--dtype", "bfloat"], "'bfloat16'"),
        (["serve", "--rope-update", "frzen"], "'frozen'"),
        (["serve", "--rope-policy", "profile"], "'profiles'"),
        (["serve", "--rope-scaling", '{"rope_type": "yarm", "factor": 4}'], "'yarn'"),
        (["serve", "--rope-scaling", '{"rope_type": "yarn", "facto": 4}'], "'factor'"),
    ],
)
def test_misspelled_words_have_suggestions(arguments, meant, capsys):
    assert f"did you mean {meant}?" in error_of(capsys, *arguments).lower().replace("?)", "?")


@pytest.mark.parametrize("name", ["--" + "x" * 100_000, "--prot\x1b[31m\n", "--'", "--"])
def test_errors_of_odd_option_names_are_one_line(name, capsys):
    assert "\n" not in error_of(capsys, "serve", name, "/no/such/model")


@pytest.mark.parametrize(
    ("given", "kept"), [("beside", "beside"), ("model", "beside"), ("x", str(Path("x").absolute()))]
)
def test_the_weight_cache_is_an_absolute_path(given, kept, launched):
    assert cli.run(["serve", "--weight-cache", given]) == 0
    assert launched[-1][1].to_config(Path("m")).loading.weight_cache == kept


def test_a_key_file_without_keys_does_not_open_the_server(capsys, tmp_path):
    (tmp_path / "keys").write_text("# none yet\n")
    assert "has no key" in error_of(capsys, "serve", "--api-key-file", str(tmp_path / "keys"))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("command", [["serve"], ["generate"], ["chat"], ["bench", "engine"]])
def test_the_short_help_refers_to_the_complete_one(command, capsys):
    assert cli.run([*command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert cli.run([*command, "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 0.55 * len(whole.splitlines())
    assert "--rope-scaling" in short and "--quantization" in short and "--help-all" in short
    assert "--kv-persist" in whole and "--kv-persist" not in short
    assert "WINDLASS_KV_PERSIST" in whole and "WINDLASS_BLOCK_SIZE" in whole and "env var" not in short
    # Printing the short help does not change the hidden options.
    assert cli.run([*command, "--help-all"]) == 0
    assert capsys.readouterr().out == whole


def test_common_options_exist():
    names = {parameter.name for parameter in get_command(cli.app).commands["serve"].params}
    assert not set(COMMON_OPTIONS) - names and 15 < len(COMMON_OPTIONS) < len(names) / 2


def test_the_complete_help_has_every_option_and_variable(capsys):
    assert cli.run(["serve", "--help-all"]) == 0
    text = capsys.readouterr().out
    for options in (EngineOptions, ServerOptions, ConnectionOptions):
        for option in options_of(options).values():
            assert (f"{option.flag} " in text) == (option.scope == "flag")
            assert option.variable in text
    for command in ("generate", "version", "bench"):
        assert cli.run([command, "--help"]) == 0
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == __version__
    for spelling in ("--version", "-V"):
        assert cli.run([spelling]) == 0
        assert capsys.readouterr().out == f"windlass {__version__}\n"
    assert cli.run([]) == 2
    assert "Usage: windlass" in "".join(capsys.readouterr())
    assert "frobnicate" in error_of(capsys, "frobnicate")


def test_bench_engine(scripted, monkeypatch, capsys, model):
    calls = []

    def run_engine_benchmark(config, *, batch_size, input_len, output_len, progress):
        progress("reading weights", 1, 2)
        calls.append((config, batch_size, input_len, output_len))
        return {
            "decode_tokens_per_second": 123.456 if batch_size > 1 else 45.6,
            "prefill_tokens_per_second": 7890.1,
            "settings": {"batch_size": batch_size, "input_len": input_len or 480},
        }

    module = types.ModuleType("windlass.engine.engine_benchmark")
    module.run_engine_benchmark = run_engine_benchmark
    monkeypatch.setitem(sys.modules, "windlass.engine.engine_benchmark", module)
    arguments = ["bench", "engine", str(model), "--batch-size", "4", "--input-len", "64", "--output-len", "8"]
    assert cli.run([*arguments, "--json", "--threads", "1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "decode_tokens_per_second": 123.456,
        "prefill_tokens_per_second": 7890.1,
        "settings": {
            **json.loads(json.dumps(to_flat(engine_config(model, threads=1)))),
            "batch_size": 4,
            "input_len": 64,
        },
    }
    assert captured.err == "reading weights ...\n"
    assert calls == [(engine_config(model, threads=1), 4, 64, 8)]
    assert cli.run(arguments) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(model.name) and title.endswith(("thread", "threads"))
    assert [row.split() for row in rows] == [
        ["decode,", "1", "stream", "45.6", "tokens/s"],
        ["decode,", "4", "streams", "123.5", "tokens/s"],
        ["prompts", "of", "64", "tokens", "7,890.1", "tokens/s"],
    ]
    assert [call[1:] for call in calls[1:]] == [(4, 64, 8), (1, 64, 8)]
    assert cli.run([*arguments, "--verbose"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("\n".join([title, *rows])) and "decode tokens per second" in table and "batch size" in table
    assert cli.run(["bench", "engine", str(model)]) == 0  # the engine chooses the length
    assert calls[-1][2] is None and "prompts of 480 tokens" in capsys.readouterr().out
    assert "--batch-size" in error_of(capsys, "bench", "engine", "--batch-size", "0")


def test_generate_streams_the_decoded_tokens(scripted, capsys, model):
    assert cli.run(["generate", "hello", "--model", str(model), "--max-tokens", "12", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == byte_level().decode(list(range(100, 112)))
    assert "12 tokens" in captured.err and "length]" in captured.err

    stop = captured.out[5]
    assert cli.run(["generate", "hello", "--model", str(model), "--max-tokens", "12", "--stop", stop]) == 0
    assert capsys.readouterr().out == captured.out.split(stop)[0]


@pytest.mark.slow
def test_generate_uses_the_sampling_parameters_of_the_model(scripted, capsys, model, monkeypatch):
    drawn, generate = [], engines.ProcessClient.generate

    def remember(self, request):
        drawn.append(request.sampling)
        return generate(self, request)

    monkeypatch.setattr(engines.ProcessClient, "generate", remember)
    ask = ["generate", "hello", "--max-tokens", "2", "--model", str(model)]
    assert cli.run(ask) == 0
    assert (drawn[-1].temperature, drawn[-1].top_p, drawn[-1].min_p, drawn[-1].max_tokens) == (1, 1, 0, 2)
    text = '{"temperature": 0.6, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}'
    (model / "generation_config.json").write_text(text)
    for given, expected in (
        ([], (0.6, 0.9, 0.1, 1.2, None)),
        (["--temperature", "0", "--seed", "7"], (0, 0.9, 0.1, 1.2, 7)),
        (["--temperature", "99", "--top-p", "1"], (99, 1, 0.1, 1.2, None)),
    ):
        assert cli.run([*ask, *given]) == 0
        one = drawn[-1]
        assert (one.temperature, one.top_p, one.min_p, one.repetition_penalty, one.seed) == expected
    other = model.parent / "other.json"
    other.write_text('{"top_k": 7}')
    for given, expected in (
        (["--generation-config", "none"], (1, 1, 0, 1, 0)),
        (["--generation-config", str(other)], (1, 1, 0, 1, 7)),
        (["--override-generation-config", '{"temperature": 0.3}'], (0.3, 0.9, 0.1, 1.2, 0)),
        (["--override-generation-config", '{"temperature": 0.3}', "--temperature", "2"], (2, 0.9, 0.1, 1.2, 0)),
    ):
        assert cli.run([*ask, *given]) == 0
        one = drawn[-1]
        assert (one.temperature, one.top_p, one.min_p, one.repetition_penalty, one.top_k) == expected
    (model / "generation_config.json").write_text('{"temperature": -1}')
    advice = "start with --generation-config none"
    capsys.readouterr()
    assert error_of(capsys, *ask).endswith(advice)
    assert cli.run([*ask, *advice.split()[2:]]) == 0 and drawn[-1].temperature == 1
    (model / "generation_config.json").write_text('{"do_sample": false}')
    assert cli.run(ask) == 0 and drawn[-1].temperature == 0
    monkeypatch.setattr("windlass.server.cli.generate.choose_model", lambda given: ("smollm2", model))
    (model / "generation_config.json").unlink()
    assert cli.run(ask[:-2]) == 0 and (drawn[-1].temperature, drawn[-1].top_p) == (0.2, 0.9)
    capsys.readouterr()


@pytest.mark.parametrize("command", ["generate", "chat", "replay"])
def test_sampling_options_are_checked_first(command, capsys):
    given = [] if command == "chat" else ["no file"]
    for option, value in (("--generation-config", "/there/is/none"), ("--override-generation-config", '{"temp": 1}')):
        assert error_of(capsys, command, *given, option, value).startswith(option)


def test_generate_errors_are_one_line(scripted, capsys, model, monkeypatch):
    assert "chat template" in error_of(capsys, "generate", "hi", "--model", str(model), "--chat")
    for option, value, reason in (
        ("--temperature", "101", "should be less than or equal to 100"),
        ("--temperature", "nan", "must be a finite number"),
        ("--top-p", "0", "should be greater than 0"),
        ("--seed", str(2**63), "should be less than or equal to"),
        ("--stop", "", "[0] should have at least 1 character"),
    ):
        error = error_of(capsys, "generate", "hi", "--model", str(model), option, value)
        assert error.startswith(option) and reason in error
        assert option[2:].replace("-", "_") not in error.removeprefix(option)
    monkeypatch.setenv("SCRIPT_LOAD_ERROR", "no weights in this directory")
    assert error_of(capsys, "generate", "hi", "--model", str(model)) == "no weights in this directory"


@pytest.mark.slow
def test_generate_on_a_running_server(capsys, model, unused_port):
    with Served(model, "--api-key", "secret", SCRIPT_STEP_SECONDS="0") as served:
        url = served.wait_ready()
        arguments = ["generate", "hello", "--max-tokens", "12", "--url"]
        for address in (url, f"{url}/v1/"):
            assert cli.run([*arguments, address, "--api-key", "secret"]) == 0
            assert capsys.readouterr().out == byte_level().decode(list(range(100, 112)))
        refused = error_of(capsys, *arguments, url, "--api-key", "wrong")
        assert "answered 401" in refused and refused.endswith(": give one with --api-key")
        scaling = ["--api-key", "secret", "--rope-scaling", '{"rope_type": "linear", "factor": 2}']
        assert cli.run([*arguments, url, *scaling, "--rope-update", "frozen"]) == 0
        capsys.readouterr()
        unknown = ["--api-key", "secret", "--rope-scaling", "long"]  # an unknown profile
        assert "'long' is neither a kind of scaling nor a profile of this server" in error_of(
            capsys, *arguments, url, *unknown
        )
        assert "no chat template" in error_of(capsys, *arguments, url, "--api-key", "secret", "--chat")
        assert "does not exist here" in error_of(capsys, *arguments, url, "--api-key", "secret", "--model", "other")
    unused = f"http://127.0.0.1:{unused_port}"
    error = error_of(capsys, *arguments, unused)
    assert error.count("reach") == 1 and "is the server running" in error


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("module", ["cli.main", "startup.launch", "cli.generate", "application"])
def test_the_api_process_never_imports_torch(module):
    code = f"import sys, windlass.server.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_start_imports_no_web_framework():
    """The engine process is spawned before fastapi and the tokenizer are imported."""
    code = "import sys, windlass.server.cli.main, windlass.server.startup.launch; sys.exit('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
