"""`--log-format json`: a busy server with many failures writes only objects, without prompts or keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.eventually import eventually, exit_code
from helpers.real_server import serve
from helpers.refused import inside, reason

pytestmark = pytest.mark.timeout(240)
CANARY, KEY, WRONG = "xylophone-canary", "key-4711-canary", "wrong-key-canary"


def objects(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert {"time", "level", "process", "message"} <= set(each), each
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each["time"])
        assert each["level"] in ("debug", "info", "warning", "error", "critical")
    return found


@pytest.mark.slow
def test_all_lines_are_objects_without_prompts_and_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\nkey = "{KEY}"\nadmin = true\n')
    more = ("--kv-cache-memory", "64MiB", "--api-key-file", str(keys), "--access-log")
    variables = {"WINDLASS_STATS_INTERVAL": "0.2", "WINDLASS_CRASH_DIR": str(tmp_path / "c")}
    with serve("--log-format", "json", "--log-level", "debug", *more, **variables) as server:
        with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:

            def post(path: str, body: Any, **headers: str) -> int:
                return http.post(path, json=body, headers=headers).status_code

            text = f"Say {CANARY}"
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
            for index in range(10):
                assert (
                    post("/v1/completions", {"prompt": text, "max_tokens": 5}, **{"x-request-id": f"fine-{index}"})
                    == 200
                )
                assert post("/v1/chat/completions", chat) == 200
            assert post("/v1/completions", {"prompt": text, CANARY: 1}) == 400
            assert post("/v1/completions", {"prompt": text, "structured_outputs": {"regex": f"[{CANARY}"}}) == 400
            assert post("/v1/completions", {"prompt": text, "timeout": 1e-9}, **{"x-request-id": "late-one"}) == 504
            assert post("/v1/completions", {"prompt": text}, authorization=f"Bearer {WRONG}") == 401
            assert http.get(f"/nowhere?key={KEY}&q={CANARY}").status_code == 404
            body = {
                "prompt": text,
                "max_tokens": 100_000,
                "ignore_eos": True,
                "stream": True,
                "context_overflow": "shift",
            }
            with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "left"}) as stream:
                for number, _ in enumerate(stream.iter_lines()):
                    if number % 20 == 0 and "running 1, waiting 0" in server.log.read_text():
                        break
            eventually(lambda: "the client disconnected" in server.log.read_text(), 10)
            with contextlib.suppress(httpx.HTTPError), http.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(server.engine_pid(), signal.SIGKILL)
                list(lines)
            server.wait_ready()
            assert post("/v1/completions", {"prompt": text, "max_tokens": 5}) == 200
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server.process) == 0
        log = server.log.read_text()
    assert CANARY not in log and KEY not in log and WRONG not in log
    found = objects(log)
    assert {each["process"] for each in found} >= {"server"} and len(found) > 40
    about = {each["request_id"]: each for each in found if "request_id" in each}
    assert {f"fine-{index}" for index in range(10)} <= set(about)
    assert about["late-one"]["caller"] == about["fine-3"]["caller"] == about["left"]["caller"] == "alice"
    messages = " ".join(each["message"] for each in found)
    for said in ("listening on", "serves demo", "running 1, waiting 0", "killed by SIGKILL", "crash report", "stopped"):
        assert said in messages, said
    (death,) = [each for each in found if "crash report" in each["message"]]
    assert death["level"] == "error" and death["logger"] == "windlass.engine.client"


def test_output_of_libraries_and_tracebacks_becomes_objects(tmp_path: Path) -> None:
    code = """if True:
        import logging, os, sys, threading, warnings
        from windlass.engine.process_setup import log_as_json
        log_as_json("engine", "info")
        print("half", end="", file=sys.stderr); print(" a line", file=sys.stderr)
        os.write(2, b"from below\\nand \\xff more\\n")
        logging.getLogger("x").warning("said %s", "two\\nlines", extra={"request_id": "r1"})
        warnings.warn("careful")
        def fail():
            raise ValueError("in a thread")
        thread = threading.Thread(target=fail); thread.start(); thread.join()
        try:
            raise KeyError("logged")
        except KeyError:
            logging.getLogger("x").exception("it failed")
        import time; time.sleep(0.5)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found = objects(done.stderr)
    messages = [each["message"] for each in found]
    assert {"half a line", "from below", "and \ufffd more", "said two\nlines", "ValueError: in a thread"} <= set(
        messages
    )
    assert any("careful" in message for message in messages)
    by_message = {each["message"]: each for each in found}
    assert by_message["said two\nlines"]["request_id"] == "r1" and by_message["said two\nlines"]["level"] == "warning"
    assert by_message["it failed"]["error"].endswith("KeyError: 'logged'")
    assert all(each["process"] == "engine" for each in found)


@pytest.mark.slow
def test_a_failed_start_is_an_object() -> None:
    command = [sys.executable, "-m", "windlass.server.cli.main", "serve", "/no/such", "--log-format", "json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 2
    assert objects(done.stderr)[-1]["level"] == "error" and "/no/such" in objects(done.stderr)[-1]["message"]
    said = reason(inside("serve", "/no/such", "--log-format", "xml"))
    assert said.startswith("--log-format must be text or json, got 'xml'")
