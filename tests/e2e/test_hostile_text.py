"""Templates and tokenizers that mean harm, and texts of every size, against live servers: a 400 in time, nobody else harmed."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from e2e_helpers.hostile_templates import HANGS_WHEN_COMPILED, HOSTILE, TEMPLATE
from helpers import toy_tokenizers as toys
from helpers.eventually import eventually, in_time, seconds_of_texts
from helpers.live_server import live_server
from helpers.probing import Findings, watched
from helpers.served import Served
from tokenizers import Regex, pre_tokenizers

MIB = 2**20
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
ENGLISH = "The quick brown fox jumps over the lazy dog; 12 foxes ran away, didn't they? "

SHORT = 1.5  # seconds: the stalls were 4 to 118 s; two cores may be busy with other tests
LONG = 0.25  # the bound on an idle machine


def save_model(folder: Path, tokenizer: tokenizers.Tokenizer, template: str | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def resident(pid: int) -> float:
    """MiB that a process and its text processes hold, shared pages counted once; the engine is left out."""
    total = 0.0
    todo = [pid]
    while todo:
        process = todo.pop()
        try:
            if b"windlass.engine" in Path(f"/proc/{process}/cmdline").read_bytes():
                continue
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            todo += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except OSError:
            continue  # it ended meanwhile
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return total


def assert_unharmed(found: Findings, seconds: float) -> None:
    assert not found.bad
    assert found.worst_gap < seconds, found.gaps
    assert found.worst_health < seconds, found.health


def ask_for_all(url: str, seconds: float) -> list[tuple[int, int, float, str]]:
    """(which, status, seconds, message) of each hostile template; four at a time."""

    def ask(which: int) -> tuple[int, int, float, str]:
        begin = time.monotonic()
        body = {"messages": USER, "chat_template_kwargs": {"which": which}, "max_tokens": 1}
        response = httpx.post(url + CHAT, json=body, timeout=60)
        return which, response.status_code, time.monotonic() - begin, response.text[:300]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(len(HOSTILE))))


@pytest.mark.slow
def test_fifty_hostile_templates_end_with_a_400(tmp_path: Path) -> None:
    assert len(HOSTILE) == 50
    with live_server(template=TEMPLATE, template_seconds=0.5, template_memory=192 * MIB) as live:

        def slowest() -> float:
            answers = ask_for_all(live.url, 0.5)
            assert [answer for answer in answers if answer[1] != 400] == []
            assert all(json.loads(text)["error"]["message"] for _, _, _, text in answers if text.endswith("}}"))
            return max(seconds for _, _, seconds, _ in answers)

        in_time(slowest, 5)
        # This one has half a second, too, which a busy machine may take from it.
        live.wait(lambda: live.post(CHAT, {"messages": USER, "max_tokens": 1}).status_code == 200)


@pytest.mark.soak
def test_fifty_hostile_templates_harm_nobody(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", toys.byte_level(), TEMPLATE)
    with Served(model) as served:
        url = served.wait_ready()
        before = resident(served.process.pid)
        with watched(url) as found:
            answers = ask_for_all(url, 5.0)
        assert [answer for answer in answers if answer[1] != 400] == []
        assert max(seconds for _, _, seconds, _ in answers) < 6
        assert_unharmed(found, LONG)
        assert resident(served.process.pid) < before + 100
        served.signal()
        assert served.wait() == 0


@pytest.mark.slow
def test_a_template_that_hangs_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", toys.byte_level(), TEMPLATE)
    which = next(number for number, source in enumerate(HOSTILE) if "tojson" in source)

    def seconds_to_end() -> float:
        with Served(model, "--grace-period", "1") as served, ThreadPoolExecutor(1) as pool:
            url = served.wait_ready()
            body = {"messages": USER, "chat_template_kwargs": {"which": which}}
            asked = pool.submit(httpx.post, url + CHAT, json=body, timeout=60)
            eventually(lambda: seconds_of_texts(served.process.pid) > 0.3, 30)
            begin = time.monotonic()
            served.signal()
            assert served.wait(20.0) == 0
            took = time.monotonic() - begin
            with contextlib.suppress(httpx.TransportError):
                assert asked.result(10).status_code == 503
        return took

    in_time(seconds_to_end, 1 + 2.0)


@pytest.mark.parametrize(
    "template", ["{{ 'x' | no_such_filter }}", pytest.param(HANGS_WHEN_COMPILED, marks=pytest.mark.slow)]
)
def test_a_template_that_does_not_compile_ends_the_start_with_one_line(tmp_path: Path, template: str) -> None:
    with Served(save_model(tmp_path / "model", toys.byte_level(), template)) as served:
        assert served.wait(20) == 2
        errors = [line for line in served.lines if line.startswith("error: ")]
        assert len(errors) == 1 and "chat template" in errors[0]
        assert "Traceback" not in served.errors


def test_a_tokenizer_whose_pattern_backtracks_answers_400(tmp_path: Path) -> None:
    backend = toys.copy_of(toys.byte_level())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"^(a+)+$"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with Served(save_model(tmp_path / "model", backend)) as served:
        url = served.wait_ready()
        for path, body in (
            ("/v1/completions", {"prompt": "a" * 60 + "!"}),
            ("/v1/completions", {"prompt": "x", "bad_words": ["a" * 60 + "!"]}),
            ("/tokenize", {"prompt": "a" * 60 + "!"}),
        ):
            response = httpx.post(url + path, json=body, timeout=30)
            assert response.status_code == 400, response.text
            assert "tokenizer cannot process this text" in response.json()["error"]["message"]
        assert httpx.post(url + "/v1/completions", json={"prompt": "hello", "max_tokens": 2}).status_code == 200


def attacks(size: int) -> dict[str, tuple[str, bytes, int]]:
    """Path, body and expected status by name. size: characters, or half as many token ids."""
    english = (ENGLISH * (size // len(ENGLISH) + 1))[:size]

    def body(**fields: Any) -> bytes:
        return json.dumps(fields).encode()

    return {
        "tokenize": ("/tokenize", body(prompt=english, return_offsets=False), 200),
        "tokenize one word": ("/tokenize", body(prompt="x" * size, return_offsets=False), 200),
        "detokenize": ("/detokenize", body(tokens=[40 + number % 300 for number in range(size // 2)]), 200),
        "truncate": ("/v1/completions", body(prompt=english, truncate_prompt_tokens=5, max_tokens=1), 200),
        "truncate too much": ("/v1/completions", body(prompt="x" * 31 * MIB, truncate_prompt_tokens=5), 400),
        "too many ids": ("/v1/completions", b'{"prompt": [' + b"1," * (15 * MIB) + b"1]}", 400),
        "too many ids to truncate": (
            "/v1/completions",
            b'{"truncate_prompt_tokens": 5, "prompt": [' + b"1," * (15 * MIB) + b"1]}",
            400,
        ),
        "brackets in a text": ("/v1/completions", b'{"prompt": "' + b'a, [:{\\"' * (31 * MIB // 8) + b'"}', 400),
    }


def attack(url: str, size: int, *names: str) -> dict[str, tuple[int, Findings]]:
    """All the attacks, or those of these names."""
    found = {}
    with httpx.Client(base_url=url, timeout=300, headers={"content-type": "application/json"}) as client:
        for name, (path, body, expected) in attacks(size).items():
            if names and name not in names:
                continue
            with watched(url) as findings:
                response = client.post(path, content=body)
            assert response.status_code == expected, (name, response.text[:300])
            found[name] = (response.status_code, findings)
    return found


def longest_wait(url: str, name: str) -> float:
    """Seconds that anybody else waits for a token or for /health during an attack of this name."""
    ((_, findings),) = attack(url, MIB // 4, name).values()
    assert not findings.bad, name
    return max(findings.worst_gap, findings.worst_health)


@pytest.mark.slow
def test_large_texts_harm_nobody(tmp_path: Path) -> None:
    with Served(save_model(tmp_path / "model", toys.byte_level())) as served:
        names = ("tokenize one word", "detokenize", "truncate too much", "too many ids to truncate")
        url = served.wait_ready()
        for name in names:
            in_time(partial(longest_wait, url, name), SHORT)


@pytest.mark.soak
def test_the_largest_texts_harm_nobody_and_their_memory_comes_back(tmp_path: Path) -> None:
    with Served(save_model(tmp_path / "model", toys.byte_level())) as served:
        url = served.wait_ready()
        with httpx.Client(base_url=url) as client:
            client.post("/tokenize", json={"prompt": "hello"})
            client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        before = resident(served.process.pid)
        for name, (_, findings) in attack(url, 4 * MIB).items():
            print(name, round(findings.worst_gap, 3), round(findings.worst_health, 3))
            assert not findings.bad, name
            assert findings.worst_gap <= LONG and findings.worst_health <= LONG, (name, findings)
        time.sleep(1)
        assert resident(served.process.pid) < before + 100


def from_address(address: str) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=120)


@pytest.mark.slow
def test_one_callers_many_texts_do_not_hold_up_another() -> None:
    """Six large texts of one address wait for the one place; another address' text is next but one, not seventh."""
    with live_server() as live:
        url = live.url
        queues = live.state.text._pool._large._queues
        large = json.dumps({"prompt": "x" * (MIB // 4), "return_offsets": False}).encode()
        order: list[str] = []

        def ask(address: str) -> None:
            with from_address(address) as client:
                assert client.post(url + "/tokenize", content=large).status_code == 200
            order.append(address)

        with ThreadPoolExecutor(7) as pool:
            many = [pool.submit(ask, "127.0.0.1") for _ in range(6)]
            live.wait(lambda: [len(queue) for queue in list(queues.values())] == [5])  # and one runs
            other = pool.submit(ask, "127.0.0.2")
            for each in (*many, other):
                each.result()
        assert order.index("127.0.0.2") <= 3


@pytest.mark.slow
def test_clients_that_leave_while_they_wait_leave_their_places_to_others(tmp_path: Path) -> None:
    """Sockets closed at every moment of a wait for the one place; afterwards large texts are served as before."""
    with Served(save_model(tmp_path / "model", toys.byte_level())) as served:
        url = served.wait_ready()
        port = int(url.rpartition(":")[2])
        for path in ("/tokenize", "/v1/completions"):
            body = json.dumps({"prompt": "hello world " * 6000}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            sockets = []
            for _ in range(60):
                sockets.append(socket.create_connection(("127.0.0.1", port)))
                sockets[-1].sendall(head + body)
            for each in sockets:
                each.close()
                time.sleep(0.0015)
        begin = time.monotonic()
        response = httpx.post(url + "/tokenize", json={"prompt": "hello world " * 6000}, timeout=30)
        assert response.status_code == 200 and time.monotonic() - begin < 10
        assert "Traceback" not in served.errors
