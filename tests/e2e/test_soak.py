"""Real servers under load for a long time: mixed requests, and engines that are killed repeatedly.

The long forms, marked soak, take half an hour and ten minutes, or SOAK_SECONDS. The short ones are marked slow.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_helpers.streams import Streamed, stream
from helpers.adapters import save_adapter
from helpers.eventually import eventually, resident
from helpers.real_server import RealServer, serve

DEMO = Path(__file__).parents[2] / "models" / "demo"
SOAK_SECONDS = os.environ.get("SOAK_SECONDS")
# MiB that a process may grow by in the second half of a run. In the first half, caches and pools are filling.
TOLERANCE = 24.0

WORDS = "once upon a time there was king of the sea who had three ships and a house near old town".split()
PASSAGE = " ".join(WORDS) + ". "
SCALINGS: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_update": "recompute"},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_update": "rotate"},
    {"rope_scaling": {"rope_type": "self_extend", "group_size": 4, "window": 64}},
]
PARAMETERS = {"type": "object", "properties": {"at": {"enum": ["sea", "king"]}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


@dataclass
class Memory:
    """Resident memory of a process over time, in MiB at seconds."""

    pid: int
    samples: list[tuple[float, float]] = field(default_factory=list)

    def sample(self) -> None:
        self.samples.append((time.monotonic(), resident(self.pid)))

    def growth(self) -> tuple[float, float]:
        """Growth in the second half of the run: in MiB per minute (least squares), and in total."""
        half = self.samples[len(self.samples) // 2 :]
        middle, mean = (sum(column) / len(half) for column in zip(*half, strict=True))
        spread = sum((at - middle) ** 2 for at, _ in half)
        slope = sum((at - middle) * (size - mean) for at, size in half) / spread
        return 60 * slope, slope * (half[-1][0] - half[0][0])


@dataclass
class Accounts:
    """Outcomes of all requests by kind. wrong: descriptions of unexpected ones."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and outcome
    finished_samples: int = 0
    abandoned_samples: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, kind: str) -> None:
        with self.lock:
            self.sent[kind] += 1

    def end(self, kind: str, outcome: str, samples: int = 0, tokens: int = 0) -> None:
        with self.lock:
            self.ended[kind, outcome] += 1
            self.tokens += tokens
            if outcome == "abandoned":
                self.abandoned_samples += samples
            else:
                self.finished_samples += samples

    def table(self) -> str:
        return "\n".join(f"{kind:12} {outcome:9} {count}" for (kind, outcome), count in sorted(self.ended.items()))


Request = tuple[str, str, dict[str, Any]]  # kind, path and body


class Client(threading.Thread):
    """Sends random requests of every kind until a time, and checks the answers."""

    def __init__(self, url: str, seed: int, until: float, accounts: Accounts) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=300)
        self._rng = random.Random(seed)
        self._until = until
        self._accounts = accounts
        self._kinds: list[Callable[[], Request]] = [
            lambda: self._completion("plain", self._text(60), 60),
            lambda: self._completion("scaled", self._text(200), 60, **self._rng.choice(SCALINGS)),
            lambda: self._completion("shifted", PASSAGE * 18, 300, context_overflow="shift", keep_tokens=16, n=1),
            lambda: self._completion(
                "reused", f"{self._text(8)} {PASSAGE * self._rng.randint(4, 12)}", 20, cache_reuse=32
            ),
            lambda: self._completion("adapted", self._text(30), 30, model="first"),
            lambda: self._completion("form", self._text(10), 20, structured_outputs={"regex": "[a-z ]{4,12}"}, n=1),
            self._tools,
            self._embedding,
            lambda: ("refused", "/v1/completions", {"prompt": "a", "max_tokens": -self._rng.randint(1, 9)}),
        ]

    def run(self) -> None:
        while time.monotonic() < self._until and len(self._accounts.wrong) < 20:
            kind, path, body = self._rng.choice(self._kinds)()
            self._accounts.begin(kind)
            try:
                self._ask(kind, path, body)
            except Exception as error:
                self._accounts.wrong.append(f"{kind} {path} {str(body)[:300]}: {error!r}")
                self._accounts.end(kind, "failed")
        self._http.close()

    def _text(self, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    def _completion(self, kind: str, prompt: str, most: int, **fields: Any) -> Request:
        rng = self._rng
        body = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, most),
            "ignore_eos": True,
            "seed": rng.randrange(1 << 30),
        }
        body |= {"stream": rng.random() < 0.6, "n": rng.choice([1, 1, 1, 2]), **fields}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        return kind, "/v1/completions", body

    def _tools(self) -> Request:
        message = {"role": "user", "content": self._text(10)}
        body = {"messages": [message], "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
        return "tools", "/v1/chat/completions", body | {"stream": self._rng.random() < 0.5}

    def _embedding(self) -> Request:
        return "embedding", "/v1/embeddings", {"input": [self._text(40) for _ in range(self._rng.randint(1, 4))]}

    def _ask(self, kind: str, path: str, body: dict[str, Any]) -> None:
        samples = len(body["input"]) if kind == "embedding" else body.get("n", 1)
        if body.get("stream"):
            self._read(kind, path, body, samples)
            return
        answer = self._http.post(path, json=body)
        if answer.status_code != (400 if kind == "refused" else 200):
            raise AssertionError(f"{answer.status_code} {answer.text[:300]}")
        if kind in ("refused", "embedding"):
            self._accounts.end(kind, "complete", samples if kind == "embedding" else 0)
            return
        finishes = [choice["finish_reason"] for choice in answer.json()["choices"]]
        self._check(kind, body, finishes, answer.json()["usage"])
        self._accounts.end(kind, "complete", samples, answer.json()["usage"]["completion_tokens"])

    def _read(self, kind: str, path: str, body: dict[str, Any], samples: int) -> None:
        """Read a stream, of which a fifth are abandoned after a few events."""
        last = self._rng.randint(1, 20) if self._rng.random() < 0.2 else None
        result = Streamed()
        with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code} {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                result.take(line)
                if result.error is not None:
                    raise AssertionError(str(result.error))
                if len(result.times) == last:
                    self._accounts.end(kind, "abandoned", samples)
                    return
        if not result.done or len(result.finishes) != samples:
            raise AssertionError(
                f"a stream ended with {len(result.finishes)} of {samples} choices, done: {result.done}"
            )
        self._check(kind, body, list(result.finishes.values()), result.usage)
        self._accounts.end(kind, "complete", samples, 0 if result.usage is None else result.usage["completion_tokens"])

    @staticmethod
    def _check(kind: str, body: dict[str, Any], finishes: list[str], usage: dict[str, Any] | None) -> None:
        if any(finish not in ("length", "stop", "tool_calls") for finish in finishes):
            raise AssertionError(str(finishes))
        exact = body.get("ignore_eos") and kind != "form"
        if exact and usage is not None and usage["completion_tokens"] != body["n"] * body["max_tokens"]:
            raise AssertionError(f"usage is {usage}, requested were {body['n']} times {body['max_tokens']} tokens")


def soak(url: str, seconds: float, memories: list[Memory], *, clients: int = 6) -> Accounts:
    """Run `clients` clients for `seconds` seconds."""
    accounts, until = Accounts(), time.monotonic() + seconds
    threads = [Client(url, seed, until, accounts) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for memory in memories:
            memory.sample()
        time.sleep(1.0)
    return accounts


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(60.0, id="a minute", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(
            float(SOAK_SECONDS or 1800), id="half an hour", marks=[pytest.mark.soak, pytest.mark.timeout(4 * 3600)]
        ),
    ],
)
def test_mixed_load_leaves_nothing_behind(seconds: float, tmp_path: Path) -> None:
    """Memory stays constant, and every request is accounted for."""
    adapter = save_adapter(tmp_path / "first", DEMO, seed=1, strength=0.2)
    options = ["--lora", f"first={adapter}", "--max-num-seqs", "6", "--kv-cache-memory", "24MiB"]
    with serve(*options, model=DEMO) as server:
        engine = server.engine_pid()
        memories = {"server": Memory(server.process.pid), "engine": Memory(engine)}
        accounts = soak(server.url, seconds, list(memories.values()))
        print(accounts.table())
        assert not accounts.wrong, "\n".join(accounts.wrong[:10])
        assert sum(accounts.sent.values()) == sum(accounts.ended.values())
        kinds = {"plain", "scaled", "shifted", "reused", "adapted", "tools", "form", "embedding", "refused"}
        assert set(accounts.sent) == kinds
        assert any(outcome == "abandoned" for _, outcome in accounts.ended)

        eventually(lambda: server.metric("windlass_num_requests_running") == 0, 60.0)
        assert server.metric("windlass_num_requests_waiting") == 0
        assert server.metric("windlass_kv_cache_usage_perc") == 0
        assert server.metric("windlass_engine_restarts_total") == 0 and server.engine_pid() == engine
        finished = server.metric("windlass_request_success_total")
        assert accounts.finished_samples <= finished <= accounts.finished_samples + accounts.abandoned_samples
        for name, memory in memories.items():
            slope, growth = memory.growth()
            print(f"{name}: {memory.samples[-1][1]:.0f} MiB, {slope:+.2f} MiB/min, {growth:+.1f} in the second half")
            assert growth < TOLERANCE, f"the {name} has grown by {growth:.0f} MiB"
        preemptions, shifts = (
            server.metric(f"windlass_{name}_total") for name in ("num_preemptions", "context_shifts")
        )
        print(f"{sum(accounts.sent.values())} requests, {accounts.tokens} tokens, {preemptions=}, {shifts=}")
        assert "Traceback" not in server.log.read_text()


# ---- two engines that are killed repeatedly ------------------------------------------------------------------------------
TEXTS, CLIENTS = 16, 5


def request_of(number: int) -> dict[str, Any]:
    return {"prompt": [10 + number, 11, 12], "max_tokens": 200, "temperature": 0, "ignore_eos": True}


async def read_streams(client: httpx.AsyncClient, first: int, until: float, ended: list[tuple[int, Streamed]]) -> int:
    """Read streams one after the other, and return the number of started ones."""
    begun = 0
    while time.monotonic() < until:
        number = (first + begun * CLIENTS) % TEXTS
        begun += 1
        ended.append((number, await stream(client, request_of(number))))
    return begun


async def kill_engines(
    server: RealServer, client: httpx.AsyncClient, until: float, longest: float, memory: Memory
) -> int:
    """Kill a random engine repeatedly, but never while another starts, and return the number of deaths."""

    async def both_ready() -> bool:
        return (await client.get("/health")).json()["replicas"]["ready"] == 2

    rng, deaths = random.Random(7), 0
    while time.monotonic() < until:
        pause = time.monotonic() + rng.uniform(longest / 3, longest)
        while time.monotonic() < until and (time.monotonic() < pause or not await both_ready()):
            memory.sample()
            await asyncio.sleep(0.5)
        if time.monotonic() < until:
            os.kill(rng.choice(server.engine_pids()), signal.SIGKILL)
            deaths += 1
    return deaths


@pytest.mark.parametrize(
    ("seconds", "longest"),
    [
        pytest.param(30.0, 18.0, id="half a minute", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
        pytest.param(
            float(SOAK_SECONDS or 600), 36.0, id="ten minutes", marks=[pytest.mark.soak, pytest.mark.timeout(4 * 3600)]
        ),
    ],
)
def test_streams_of_killed_replicas_end_once(seconds: float, longest: float) -> None:
    """Each request ends complete or with an error."""
    small = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")
    with serve("--replicas", "2", "--deterministic", "--max-num-seqs", "3", *small) as server:
        ended: list[tuple[int, Streamed]] = []
        memory = Memory(server.process.pid)

        async def work() -> tuple[list[int], int]:
            until = time.monotonic() + seconds
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                clients = [read_streams(client, number, until, ended) for number in range(CLIENTS)]
                *begun, deaths = await asyncio.gather(*clients, kill_engines(server, client, until, longest, memory))
                return begun, deaths

        begun, deaths = asyncio.run(work())
        eventually(lambda: server.get("/health")["replicas"]["ready"] == 2, 60.0)
        assert len(ended) == sum(begun) and all(result.done for _, result in ended)
        outcomes = Counter("complete" if result.error is None else result.error["code"] for _, result in ended)
        print(f"{deaths} deaths, {dict(outcomes)}, server at {memory.samples[-1][1]:.0f} MiB")
        assert set(outcomes) <= {"complete", "engine_unavailable"}
        assert outcomes["complete"] > outcomes["engine_unavailable"]
        assert deaths > 1 and server.metric("windlass_engine_restarts_total") == deaths
        assert server.metric("windlass_num_requests_running") == server.metric("windlass_num_requests_waiting") == 0
        alone = {number: server.complete(**request_of(number))["choices"][0]["text"] for number in range(TEXTS)}
        for (
            number,
            result,
        ) in ended:  # also of streams that moved to the other engine, and of the received part of cut ones
            assert result.text == (alone[number] if result.error is None else alone[number][: len(result.text)])
        assert memory.growth()[1] < TOLERANCE
        assert "Traceback" not in server.log.read_text()
