"""`windlass serve` as a real process with real signals; the engine behind it is scripted and needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from helpers.crashes import FOLDER
from helpers.eventually import LISTENING, alive, children, eventually, exit_code, in_time, ports
from helpers.refused import inside, reason
from helpers.served import Served
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import byte_level

from windlass.engine.errors import LoadError
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.server_options import ServerOptions
from windlass.server.config.settings import SamplingDefaults
from windlass.server.startup import launch
from windlass.server.startup.engines import CORE_VARIABLE
from windlass.server.startup.launch import check_model

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "toy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


class Stream:
    """A streamed completion, read in a thread from the moment its first chunk is there."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[str] = []
        self.started = threading.Event()
        self.error: Exception | None = None
        body = {"model": "toy", "prompt": "hello", "max_tokens": max_tokens, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()
        assert self.started.wait(30.0), self.error

    def _read(self, url: str, body: dict[str, object]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.started.set()
        except httpx.HTTPError as error:
            self.error = error

    def finish(self) -> list[str]:
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        return self.events


def complete(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "hi", "max_tokens": 3}, timeout=30.0)


def test_it_listens_while_it_loads_and_drains_on_sigterm(model, tmp_path):
    gate, brake = tmp_path / "gate", tmp_path / "brake"
    gates = {"SCRIPT_LOAD_GATE": str(gate), "SCRIPT_STEP_BRAKE": str(brake)}
    with Served(model, "--max-model-len", "300", "--deterministic", **gates) as served:
        url = served.url
        assert httpx.get(f"{url}/health", timeout=30.0).status_code == 503
        assert complete(url).status_code == 503
        gate.touch()
        served.wait_ready()
        assert httpx.get(f"{url}/health", timeout=30.0).status_code == 200
        assert "reading weights ..." in served.lines
        for expected in (
            "5.4M parameters",
            "300 tokens",
            "1,024 tokens: enough for",
            "full_attention",
            "  options   --deterministic\n",
        ):
            assert expected in served.errors
        assert "note: this model" in served.errors
        # Independent of Python's view: no torch library is mapped into the API process.
        assert "libtorch" not in Path(f"/proc/{served.process.pid}/maps").read_text()
        assert complete(url).status_code == 200

        (forks,) = children(served.process.pid, b"workers.fork_server")
        for pid in (served.process.pid, served.engine_pid, forks):
            assert resource.prlimit(pid, resource.RLIMIT_CORE) == (1, 1)  # neither a file nor a program, see core(5)
            assert int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16) == 0
        engine = served.engine_pid
        stream = Stream(url, max_tokens=80)
        brake.touch()  # it must not end before another request is refused
        served.signal(signal.SIGTERM)
        served.wait_line("draining: 1 request")
        refused = complete(url)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        brake.unlink()
        events = stream.finish()
        assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert served.wait() == 0
        assert "Traceback" not in served.errors
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_after_the_grace_period_streams_end_with_an_error(model):
    with Served(model, "--grace-period", "0.3") as served:
        stream = Stream(served.wait_ready(), max_tokens=400)
        assert "options" not in served.errors  # all are the defaults
        start = time.monotonic()
        served.signal(signal.SIGINT)
        events = stream.finish()
        assert time.monotonic() - start < 5.0
        assert stream.error is None
        assert events[-1] == "[DONE]" and "shutting down" in json.loads(events[-2])["error"]["message"]
        assert served.wait() == 0


@pytest.mark.slow
def test_a_second_signal_exits_at_once(model):
    def seconds_to_end() -> float:
        with Served(model) as served:
            stream = Stream(served.wait_ready(), max_tokens=400)
            engine = served.engine_pid
            served.signal(signal.SIGTERM)
            served.wait_line("draining")
            start = time.monotonic()
            served.signal(signal.SIGTERM)
            assert served.wait() == 128 + signal.SIGTERM
            took = time.monotonic() - start
            assert "[DONE]" not in stream.finish()
            assert not Path(f"/proc/{engine}").exists()
        return took

    in_time(seconds_to_end, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_exits_cleanly(model, number):
    with Served(model, SCRIPT_LOAD_SECONDS="100") as served:
        url = served.url
        eventually(lambda: httpx.get(f"{url}/health", timeout=30.0).status_code == 503)
        served.signal(number)
        assert served.wait() == 0
        assert "Traceback" not in served.errors


def test_a_load_failure_is_one_line_and_exit_code_2(model):
    with Served(model, SCRIPT_LOAD_ERROR="no weights in this directory: give another") as served:
        assert served.wait() == 2
        assert served.lines[-1] == "error: no weights in this directory: give another"
        assert "Traceback" not in served.errors


LISTS = '{"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2]}'


@pytest.mark.slow
def test_a_profile_that_the_engine_refuses_is_one_line_and_exit_code_2(model):
    good = 'long={"rope_type": "yarn", "factor": 4}'
    with Served(model, "--rope-profile", good, "--rope-profile", f"phi={LISTS}") as served:
        assert served.wait() == 2
        expected = (
            "error: --rope-profile phi.short_factor must hold 16 numbers, one per rotated pair of this model, got 2"
        )
        assert served.lines[-1] == expected
        assert "Traceback" not in served.errors and "serves" not in served.errors


@pytest.mark.slow
def test_profiles_and_policies_reach_the_server(model):
    profiles = '{"long": {"rope_type": "yarn", "factor": 4}, "grow": {"rope_type": "dynamic", "factor": 2}}'
    options = ["--rope-policy", "profiles,exact", "--rope-scaling", "grow", "--rope-update", "rotate"]
    with Served(model, *options, WINDLASS_ROPE_PROFILE=profiles) as served:
        url = served.wait_ready()
        assert "  profiles  long, grow" in served.lines
        assert "  options   --rope-update rotate, --rope-policy profiles,exact" in served.lines
        assert any(
            line.startswith("  rotary    full_attention: dynamic, theta 10000, 32 of 32") for line in served.lines
        )
        answer = httpx.get(f"{url}/v1/rotary").json()
        assert answer["profiles"] == json.loads(profiles)
        assert (answer["policy"], answer["rope_update"], answer["rope_exact"]) == ("profiles", "rotate", True)
        assert answer["model"]["rope_type"] == "default" and answer["default"]["rope_type"] == "dynamic"
        body = {"prompt": "hi", "max_tokens": 2, "rope_scaling": "long"}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        body["rope_scaling"] = {"rope_type": "linear", "factor": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 400


@pytest.mark.slow
def test_sampling_and_template_variables_of_the_operator_reach_the_server(model):
    options = ["--override-generation-config", '{"top_k": 9}', "--default-chat-template-kwargs", '{"a": false}']
    with Served(model, *options, WINDLASS_GENERATION_CONFIG="none") as served:
        url = served.wait_ready()
        assert "  sampling  top_k 9 (--override-generation-config), unless a request sets its own" in served.lines
        shown = '  options   --generation-config none, --default-chat-template-kwargs {"a": false}'
        assert shown in served.lines
        (told,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert (told["sampling_defaults"]["top_k"], told["recommended_sampling"]) == (9, None)


def test_recommended_sampling_applies_unless_overridden(model, monkeypatch):
    monkeypatch.setenv(CORE_VARIABLE, "helpers.scripted_core:ScriptedCore")
    monkeypatch.setattr(launch, "choose_model", lambda given: ("smollm2", model))
    both = {"temperature": 0.2, "top_p": 0.9}
    for options, sampling, recommended in (
        ({}, SamplingDefaults(**both), both),
        ({"generation_config": "none"}, SamplingDefaults(), {}),
        ({"override_generation_config": '{"top_p": 0.9}'}, SamplingDefaults(**both), {"temperature": 0.2}),
    ):
        _, _, settings = launch.prepare(None, EngineOptions(), ServerOptions(**options))
        assert (settings.sampling, settings.recommended_sampling) == (sampling, recommended)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"context_overflow": "shift"}, "`context_overflow=shift`"),
        ({"attention_window": 64}, "`attention_window`"),
        ({"cache_reuse": 64}, "`cache_reuse`"),
    ],
)
def test_options_that_would_refuse_every_request_end_the_start(options, named, tmp_path):
    engine, model = EngineOptions(rope_scaling='{"rope_type": "rerope"}'), make_model("llama", tmp_path)
    check_model(engine, model, ServerOptions())
    check_model(EngineOptions(), model, ServerOptions(**options))
    with pytest.raises(LoadError, match=f"{named} and rope_type 'rerope' both define positions of keys"):
        check_model(engine, model, ServerOptions(**options))


@pytest.mark.slow
def test_a_missing_tokenizer_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with Served(tmp_path, SCRIPT_LOAD_SECONDS="100") as served:
        assert served.wait() == 2
        assert served.lines[-1].startswith("error: ") and "tokenizer" in served.lines[-1]
        assert "Traceback" not in served.errors


@pytest.mark.slow
def test_a_port_in_use_is_one_line_and_exit_code_2(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Served(model, "--port", port) as served:
            assert served.wait() == 2
            assert served.lines == [
                f"error: cannot listen on 127.0.0.1 port {port} (Address already in use): choose another with --port"
            ]
    done = inside("serve", "demo", "--port", "0", "--host", "203.0.113.7")
    assert reason(done).startswith("cannot listen on 203.0.113.7 port ") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("(Cannot assign requested address): --host has to be an address of this machine\n")


@pytest.mark.slow
def test_the_server_outlives_its_engine(model):
    with Served(model) as served:
        url = served.wait_ready()
        stream = Stream(url, max_tokens=400)
        first = served.engine_pid
        os.kill(first, signal.SIGKILL)
        events = stream.finish()
        assert events[-1] == "[DONE]" and "error" in json.loads(events[-2])
        eventually(lambda: httpx.get(f"{url}/health", timeout=30.0).status_code == 200)
        assert served.engine_pid != first
        assert complete(url).status_code == 200
        assert f"crash report: {FOLDER}/" in served.errors  # not in the user's own cache
        served.signal()
        assert served.wait() == 0


def test_crash_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    assert launch.crash_folder(ServerOptions()) == tmp_path / "crashes"
    monkeypatch.delenv("WINDLASS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert launch.crash_folder(ServerOptions()) == Path.home() / ".cache/windlass/crashes"
    assert launch.crash_folder(ServerOptions(crash_dir="here")) == Path.cwd() / "here"
    assert launch.crash_folder(ServerOptions(crash_dir="none")) is None


@pytest.mark.slow
def test_an_engine_that_keeps_dying_ends_the_server(model):
    with Served(model) as served:
        served.wait_ready()
        killed: set[int] = set()
        end = time.monotonic() + 20
        while served.process.poll() is None and time.monotonic() < end:
            for engine in {*children(served.process.pid, b"windlass.engine")} - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
                    killed.add(engine)
            time.sleep(0.02)
        assert served.wait() == 1
        said = re.search(r"error: the engine died (\d+) times", served.lines[-1])
        assert said and 3 <= int(said[1]) <= 5
        assert int(said[1]) <= len(killed) <= 2 * int(said[1])  # each time with its standby process


@pytest.mark.slow
def test_the_engine_ends_with_a_killed_server(model):
    with Served(model) as served:
        served.wait_ready()
        engine = served.engine_pid
        served.process.kill()
        served.process.wait()
        eventually(lambda: not alive(engine), 6.0)


@pytest.mark.slow
def test_named_keys_are_read_again_on_sighup(model, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "first"\n[root]\nkey = "admin"\nadmin = true\n')
    with Served(model, "--api-key-file", str(keys)) as server:
        url = server.wait_ready()

        def status(key: str, path: str = "/v1/models") -> int:
            return httpx.get(url + path, headers={"authorization": f"Bearer {key}"}, timeout=10.0).status_code

        assert (status("first"), status("second"), status("first", "/metrics"), status("admin", "/metrics")) == (
            200,
            401,
            403,
            200,
        )
        keys.write_text('[alice]\nkey = "sec')  # half written
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("is not valid TOML.*the previous keys remain valid")
        assert (status("first"), status("second")) == (200, 401)
        keys.write_text('[alice]\nkey = "second"\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("was read again: 1 keys")
        assert (status("first"), status("second"), status("admin")) == (401, 200, 401)
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server.process) == 0
        for secret in ("first", "second", "admin"):
            assert f'"{secret}' not in server.errors


def test_a_bad_key_file_is_one_line(model, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text("[alice]\n")
    said = reason(inside("serve", model, "--port", "0", "--api-key-file", keys))
    assert "alice needs one of key and key_sha256" in said


@pytest.mark.slow
def test_a_server_with_closed_standard_error(model):
    given = [*Served.command(model), "--port", "0"]
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *given], stdout=subprocess.DEVNULL, env=Served.environment()
    ) as process:
        try:
            eventually(lambda: ports(process.pid, LISTENING), 60.0)  # there are no lines to wait for
            url = f"http://127.0.0.1:{ports(process.pid, LISTENING)[0]}"
            eventually(lambda: answers(f"{url}/ready"), 60.0)
            assert complete(url).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert exit_code(process) == 0
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30.0).status_code == 200
    except httpx.TransportError:
        return False
