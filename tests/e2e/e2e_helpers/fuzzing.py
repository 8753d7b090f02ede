"""A fuzzer: sends malformed and hostile requests to a real server from several threads and counts answers by route and status.

Well-behaved streams run at the same time, and the gaps between their tokens are measured. A heartbeat thread detects pauses of
this process on a busy machine, which count neither as gaps nor as hanging requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from e2e_helpers.advisories import CORPUS, Hostile
from helpers.mutations import ITEM_TEMPLATES, OTHER_TEMPLATES, PROMPT_TEMPLATES, TEMPLATES, Mutator

KEY = "k"
HANG = 5.0  # seconds after which a request counts as hung
HEARTBEAT_SECONDS = 0.05
LATE = 0.2  # seconds after which a late heartbeat counts as a pause
READING = [
    "/",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/rotary",
    "/v1/cache",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]
# Answers of 500 and above that a request may ask for: a deadline that nothing can meet.
EXPLAINED = {504: "deadline_exceeded"}


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
            if now - last - HEARTBEAT_SECONDS > LATE:
                self._pauses.append((last, now))
            last = now

    def stop(self) -> None:
        self._ended.set()

    def paused(self, begin: float, end: float) -> float:
        """Seconds of pauses between two times."""
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self._pauses[:])

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

    def quantile(self, share: float) -> float:
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def table(self) -> str:
        """The number of answers by route and status."""
        routes: dict[str, list[tuple[int, int]]] = {}
        for (route, status), count in sorted(self.counts.items()):
            routes.setdefault(route, []).append((status, count))
        lines = (
            f"{route:34} " + "  ".join(f"{status}: {count}" for status, count in found)
            for route, found in routes.items()
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Case:
    route: str
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    allowed: frozenset[int] | None = None


def cases(seed: int, count: int) -> Iterator[Case]:
    """The corpus once, then mutations of it, of every endpoint's bodies, and of paths and methods."""
    rng = random.Random(seed)
    mutator = Mutator(rng)
    for hostile in CORPUS[:count]:
        yield _of(hostile)
    templates = [*TEMPLATES, *ITEM_TEMPLATES, *PROMPT_TEMPLATES, *OTHER_TEMPLATES]
    bodies = [(hostile.path, body) for hostile in CORPUS if isinstance(body := _parsed(hostile.body), dict)]
    for _ in range(count - len(CORPUS)):
        kind = rng.random()
        if kind < 0.6:
            path, template = rng.choice(templates)
            yield _posted(path, mutator.body(template), rng)
        elif kind < 0.85:
            path, template = rng.choice(bodies)
            yield _posted(path, mutator.body(template), rng)
        else:
            yield _odd(rng, mutator)


def _posted(path: str, body: bytes, rng: random.Random) -> Case:
    headers = {"content-type": "application/json"}
    if rng.random() < 0.02:
        headers["content-type"] = rng.choice(["text/plain", "", "application/json; charset=latin-1", "image/png"])
    return Case(path, "POST", path, body, {**headers, "authorization": f"Bearer {KEY}"})


def _odd(rng: random.Random, mutator: Mutator) -> Case:
    """Unlikely methods, paths and queries."""
    base = rng.choice(
        [*READING, "/v1/models/x", "/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/ui/a.js"]
    )
    base = base if rng.random() < 0.8 else rng.choice(TEMPLATES)[0]
    path = base
    if rng.random() < 0.3:
        path += "/" + quote(str(mutator.value(3))[:200], safe=rng.choice(["", "/", "/.%"]))
    if rng.random() < 0.4:
        path += "?" + "&".join(
            f"{quote(mutator.key())}={quote(str(mutator.value(3))[:100])}" for _ in range(rng.randint(1, 3))
        )
    body = mutator.body({}) if rng.random() < 0.3 else None
    headers = {} if rng.random() < 0.2 else {"authorization": f"Bearer {KEY}"}
    return Case(base, rng.choice(METHODS), path, body, headers)


def _of(hostile: Hostile) -> Case:
    headers = {**hostile.headers, **({"authorization": f"Bearer {KEY}"} if hostile.keyed else {})}
    route = urlsplit(hostile.path).path if hostile.body is not None else "(corpus)"
    return Case(route, hostile.method, hostile.path, hostile.body, headers, hostile.allowed)


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
        begin = time.monotonic()
        try:
            status, headers, text = self._exchange(case)
        except Exception as error:
            self._found.wrong.append(
                f"{case.method} {case.path[:200]} got no answer: {error!r} {(case.body or b'')[:1000]!r}"
            )
            self.close()
            return
        end = time.monotonic()
        taken = end - begin - self._heart.paused(begin, end)
        self._found.counts[case.route, status] += 1
        self._found.slowest = max(self._found.slowest, taken)
        context = (
            f"{case.method} {case.path[:200]}: {status} in {taken:.2f} s {text[:300]!r} {(case.body or b'')[:1000]!r}"
        )
        if taken > HANG:
            self._found.wrong.append(f"hung: {context}")
        if case.allowed is not None and status not in case.allowed and status not in EXPLAINED:
            self._found.wrong.append(f"unexpected status: {context}")
        for code in self._codes(status, headers, text):
            if code in EXPLAINED.values():
                self._found.codes[code] += 1
            else:
                self._found.wrong.append(f"{code}: {context}")
        if "x-request-id" not in headers:
            self._found.wrong.append(f"no request id: {context}")

    def _codes(self, status: int, headers: dict[str, str], text: bytes) -> list[str]:
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
                    if kind and kind[1] in (b"server_error", b"api_error", b"timeout_error", b"overloaded_error"):
                        found.append(match[1].decode() if match else "an error without code")
            if not (text.rstrip().endswith(b"data: [DONE]") or b"event: " in text):
                found.append("a stream without its end")
        return found

    def _exchange(self, case: Case) -> tuple[int, dict[str, str], bytes]:
        for attempt in range(2):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(*self._address, timeout=60)
                attempt = 1
            try:
                self._connection.putrequest(case.method, _on_the_wire(case.path), skip_accept_encoding=True)
                for name, value in case.headers.items():
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


def _on_the_wire(path: str) -> str:
    """Quote the characters that http.client refuses."""
    return "".join(c if "!" <= c <= "~" else quote(c) for c in path)


class Streams:
    """Well-behaved streams, one after the other in each of a few threads."""

    def __init__(self, url: str, count: int, heart: Heartbeat, found: Found) -> None:
        self._url, self._heart, self._found = url, heart, found
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        parts = urlsplit(self._url)
        body = {
            "prompt": "Once upon a time",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "seed": number,
            "timeout": 300,
        }
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        first = ""
        while not self._ended.is_set():
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
            try:
                text = self._read(connection, body, headers)
            except Exception as error:
                self._found.wrong.append(f"a well-behaved stream failed: {error!r}")
                return
            finally:
                connection.close()
            self._found.streams += 1
            first = first or text
            if text != first:
                self._found.wrong.append(
                    f"a well-behaved stream changed its text: {text[:200]!r}, first {first[:200]!r}"
                )

    def _read(self, connection: http.client.HTTPConnection, body: dict[str, Any], headers: dict[str, str]) -> str:
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise AssertionError(f"{answer.status} {answer.read()[:300]!r}")
        text, last, finish = "", 0.0, None
        for line in answer:
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise AssertionError(str(event))
            if last:
                self._found.gaps.append(now - last - self._heart.paused(last, now))
            last = now
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        if finish != "length":
            raise AssertionError(f"it ended by {finish}")
        return text


_SENDERS = 3


def fuzz(url: str, seed: int, count: int, *, streams: int = 2) -> Found:
    """Send `count` cases in several threads while streams run."""
    heart, found = Heartbeat(), Found()
    background = Streams(url, streams, heart, found)
    todo, lock = cases(seed, count), threading.Lock()

    def work() -> None:
        sender = Sender(url, heart, found)
        while len(found.wrong) < 50:
            with lock:
                case = next(todo, None)
            if case is None:
                break
            sender.send(case)
        sender.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    background.stop()
    heart.stop()
    found.paused = heart.total
    return found
