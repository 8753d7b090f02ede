"""Malformed and hostile requests to all routes of a real server, and requests that Schemathesis generates.

No answer may be a server error or hang, the engine must survive, and streams that run at the same time must be unharmed. Gaps
between their tokens are measured. A heartbeat thread detects pauses of this process on a busy machine, which count neither as
gaps nor as hanging requests. The long form prints counts by route and status.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from e2e_helpers.hostile_requests import CORPUS, KEY, Case
from e2e_helpers.streams import read_stream
from helpers.mutations import ITEM_TEMPLATES, OTHER_TEMPLATES, PROMPT_TEMPLATES, TEMPLATES, Mutator
from helpers.real_server import RealServer, serve

SEED = 20261124
LIMITS = ("--api-key", KEY, "--max-num-seqs", "8")
OPTIONS = (*LIMITS, "--default-max-tokens", "8", "--request-timeout", "4", "--attention-maps")
MUTATIONS = 300
CASES = int(os.environ.get("FUZZ_CASES", "40000"))
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "350")  # of Schemathesis, for each operation and phase
SENDERS = 3
AUTHORIZED = {"authorization": f"Bearer {KEY}"}

HANG_SECONDS = 5.0
HEARTBEAT_SECONDS = 0.05
LATE_SECONDS = 0.2  # after which a late heartbeat counts as a pause
READ_ONLY = "/ /docs /redoc /openapi.json /health /ready /version /metrics /v1/models /v1/rotary /v1/cache".split()
ODD_PATHS = [*READ_ONLY, "/v1/models/x", "/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/ui/a.js"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]
# Permitted statuses of 500 and above: a request may set a deadline that cannot be met.
EXPLAINED = {504: "deadline_exceeded"}
SERVER_ERRORS = (b"server_error", b"api_error", b"timeout_error", b"overloaded_error")
STREAM = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "timeout": 300}

SCHEMATHESIS_SECONDS = 150
CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"
MORE_CHECKS = f"""{CHECKS},content_type_conformance,response_headers_conformance,unsupported_method,
allow_header_conformance,use_after_free,ensure_resource_availability,ignored_auth""".replace("\n", "")
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "504"]\n'


class Heartbeat:
    """Pauses of this process or of the entire machine."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            if now - last - HEARTBEAT_SECONDS > LATE_SECONDS:
                self._pauses.append((last, now))
            last = now

    def stop(self) -> None:
        self._ended.set()

    def elapsed(self, begin: float, end: float) -> float:
        """Seconds between two times without pauses."""
        paused = (max(0.0, min(end, last) - max(begin, first)) for first, last in self._pauses[:])
        return end - begin - sum(paused)

    @property
    def total(self) -> float:
        return sum(last - first for first, last in self._pauses)


@dataclass
class Found:
    """The result of a run. counts: by route and status. wrong: descriptions of wrong answers, with their requests."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)  # of explained answers above 500
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    gaps: list[float] = field(default_factory=list)
    streams: int = 0
    paused: float = 0.0  # seconds

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def summary(self) -> str:
        ordered = sorted(self.gaps) or [0.0]
        quantiles = {
            share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 0.999, 1)
        }
        gaps = ", ".join(f"p{100 * share:g} {gap:.3f} s" for share, gap in quantiles.items())
        routes: dict[str, list[str]] = {}
        for (route, status), count in sorted(self.counts.items()):
            routes.setdefault(route, []).append(f"{status}: {count}")
        return "\n".join(
            [
                f"{self.total} cases, slowest {self.slowest:.2f} s, {dict(self.codes)}; paused for {self.paused:.0f} s",
                f"{self.streams} streams, gaps {gaps}",
                *(f"{route:34} " + "  ".join(counts) for route, counts in routes.items()),
            ]
        )


def cases(seed: int, count: int) -> Iterator[Case]:
    """The corpus once, then mutations of it, of every endpoint's bodies, and of paths and methods."""
    rng = random.Random(seed)
    mutator = Mutator(rng)
    yield from CORPUS[:count]
    templates = [*TEMPLATES, *ITEM_TEMPLATES, *PROMPT_TEMPLATES, *OTHER_TEMPLATES]
    bodies = [(case.path, body) for case in CORPUS if isinstance(body := _parsed(case.body), dict)]
    for _ in range(count - len(CORPUS)):
        kind = rng.random()
        if kind < 0.85:
            path, template = rng.choice(templates if kind < 0.6 else bodies)
            yield _posted(path, mutator.body(template), rng)
        else:
            yield _odd(rng, mutator)


def _posted(path: str, body: bytes, rng: random.Random) -> Case:
    kind = "application/json"
    if rng.random() < 0.02:
        kind = rng.choice(["text/plain", "", "application/json; charset=latin-1", "image/png"])
    return Case("POST", path, body, {"content-type": kind}, None, base=path)


def _odd(rng: random.Random, mutator: Mutator) -> Case:
    """Unlikely methods, paths and queries."""
    base = rng.choice(ODD_PATHS)
    base = base if rng.random() < 0.8 else rng.choice(TEMPLATES)[0]
    path = base
    if rng.random() < 0.3:
        path += "/" + quote(str(mutator.value(3))[:200], safe=rng.choice(["", "/", "/.%"]))
    if rng.random() < 0.4:
        path += "?" + "&".join(
            f"{quote(mutator.key())}={quote(str(mutator.value(3))[:100])}" for _ in range(rng.randint(1, 3))
        )
    body = mutator.body({}) if rng.random() < 0.3 else None
    keyed = rng.random() >= 0.2
    return Case(rng.choice(METHODS), path, body, {}, None, keyed, base)


def _parsed(body: bytes | None) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(body or b"")
    return None


class Sender:
    """Sends cases over one connection, which is reopened after the server has closed it."""

    def __init__(self, url: str, heart: Heartbeat, found: Found) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._heart, self._found = heart, found
        self._connection: http.client.HTTPConnection | None = None

    def send(self, case: Case) -> None:
        """Send a case and check its answer."""
        wrong, request = self._found.wrong, f"{case.method} {case.path[:200]}"
        sent = repr((case.body or b"")[:1000])
        begin = time.monotonic()
        try:
            status, headers, text = self._exchange(case)
        except Exception as error:
            wrong.append(f"{request} got no answer: {error!r} {sent}")
            self.close()
            return
        elapsed = self._heart.elapsed(begin, time.monotonic())
        self._found.counts[case.route, status] += 1
        self._found.slowest = max(self._found.slowest, elapsed)
        context = f"{request}: {status} in {elapsed:.2f} s {text[:300]!r} {sent}"
        if elapsed > HANG_SECONDS:
            wrong.append(f"hung: {context}")
        if case.allowed is not None and status not in case.allowed and status not in EXPLAINED:
            wrong.append(f"unexpected status: {context}")
        for code in _server_errors(status, headers, text):
            if code in EXPLAINED.values():
                self._found.codes[code] += 1
            else:
                wrong.append(f"{code}: {context}")
        if "x-request-id" not in headers:
            wrong.append(f"no request id: {context}")

    def _exchange(self, case: Case) -> tuple[int, dict[str, str], bytes]:
        for attempt in range(2):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(*self._address, timeout=60)
                attempt = 1
            try:
                # http.client refuses other characters in a path.
                path = "".join(c if "!" <= c <= "~" else quote(c) for c in case.path)
                self._connection.putrequest(case.method, path, skip_accept_encoding=True)
                for name, value in case.sent_headers.items():
                    self._connection.putheader(name, value)
                if case.body is not None:
                    self._connection.putheader("content-length", str(len(case.body)))
                self._connection.endheaders(case.body)
                answer = self._connection.getresponse()
                text = answer.read()
            except (ConnectionError, http.client.BadStatusLine):
                self.close()
                if attempt:
                    raise
                continue
            headers = {name.lower(): value for name, value in answer.getheaders()}
            if answer.will_close:
                self.close()
            return answer.status, headers, text
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _server_errors(status: int, headers: dict[str, str], text: bytes) -> list[str]:
    """Codes of server errors in an answer or a stream."""
    found = []
    if status >= 500:
        match = re.search(rb'"code":"(\w+)"', text)
        found.append(match[1].decode() if match else f"status {status}")
    if headers.get("content-type", "").startswith("text/event-stream"):
        for line in text.split(b"\n"):
            if line.startswith(b"data: {") and b'"error":{' in line:
                match = re.search(rb'"code":"(\w+)"', line)
                kind = re.search(rb'"type":"(\w+)"', line)
                if kind and kind[1] in SERVER_ERRORS:
                    found.append(match[1].decode() if match else "an error without code")
        if not (text.rstrip().endswith(b"data: [DONE]") or b"event: " in text):
            found.append("a stream without its end")
    return found


def fuzz(url: str, seed: int, count: int, *, streams: int = 2) -> Found:
    """Send `count` cases in several threads while streams run."""
    heart, found, ended = Heartbeat(), Found(), threading.Event()
    todo, lock = cases(seed, count), threading.Lock()

    def send() -> None:
        sender = Sender(url, heart, found)
        while len(found.wrong) < 50:
            with lock:
                case = next(todo, None)
            if case is None:
                break
            sender.send(case)
        sender.close()

    def stream(number: int) -> None:
        first = ""
        while not ended.is_set():
            try:
                result = read_stream(url, {**STREAM, "seed": number}, headers=AUTHORIZED)
                assert result.error is None and result.finish == "length", result
            except Exception as error:
                found.wrong.append(f"a well-behaved stream failed: {error!r}")
                return
            found.streams += 1
            found.gaps += [heart.elapsed(*times) for times in pairwise(result.times)]
            first = first or result.text
            if result.text != first:
                found.wrong.append(f"a well-behaved stream changed: {result.text[:200]!r}, first {first[:200]!r}")

    background = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(streams)]
    threads = [threading.Thread(target=send, daemon=True) for _ in range(SENDERS)]
    for thread in (*background, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    for thread in background:
        thread.join(60)
    heart.stop()
    found.paused = heart.total
    return found


def run_schemathesis(server: RealServer, folder: Path, *options: str) -> str:
    """Output of a run that found nothing."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    command = shutil.which("st", path=path) or pytest.skip("needs the extra e2e: pip install -e '.[e2e]'")
    (folder / "schemathesis.toml").write_text(CONFIG)
    arguments = [
        *("run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", *options),
        *("--seed", "1", "--continue-on-failure", "--no-color", "--no-shrink", "--suppress-health-check", "all"),
    ]
    run = subprocess.run([command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr
    return run.stdout


def check_unharmed(server: RealServer, found: Found, engine: int) -> None:
    assert not found.wrong, f"{len(found.wrong)} answers are wrong:\n" + "\n".join(found.wrong[:10])
    assert server.process.poll() is None and server.engine_pid() == engine
    log = server.log.read_text()
    assert "Traceback" not in log, log[-3000:]
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=AUTHORIZED, timeout=60).status_code == 200


def test_corpus_and_mutations_do_not_harm_the_server() -> None:
    with serve(*OPTIONS) as server:
        engine = server.engine_pid()
        found = fuzz(server.url, SEED, len(CORPUS) + MUTATIONS, streams=1)
        print(found.summary())
        check_unharmed(server, found, engine)
    statuses = {status for _, status in found.counts}
    assert statuses >= {200, 400, 401, 404, 405}, statuses
    assert found.total == len(CORPUS) + MUTATIONS and found.streams > 0


@pytest.mark.slow
@pytest.mark.timeout(SCHEMATHESIS_SECONDS + 150)
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    with serve(*LIMITS, "--default-max-tokens", "16", "--request-timeout", "20") as server:
        most = ("--max-examples", "6", "--max-time", str(SCHEMATHESIS_SECONDS))
        assert "Tested: " in run_schemathesis(server, tmp_path, "--checks", MORE_CHECKS, *most)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_fifty_thousand_requests_do_not_harm_the_server(tmp_path: Path) -> None:
    with serve(*OPTIONS) as server:
        engine = server.engine_pid()
        found = fuzz(server.url, SEED + 1, CASES)
        print(found.summary())
        check_unharmed(server, found, engine)
        output = run_schemathesis(server, tmp_path, "--checks", CHECKS, "--max-examples", EXAMPLES)
        generated = re.search(r"(\d+) generated", output)
        assert generated, output[-3000:]
        print(f"Schemathesis: {generated[1]} cases")
        check_unharmed(server, found, engine)
        assert found.total + int(generated[1]) >= 50_000 or "FUZZ_CASES" in os.environ
        assert server.process.poll() is None
