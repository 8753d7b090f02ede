"""Mixed load on a real server for as long as wanted, every request accounted for, and the memory of its processes over time.

Clients are threads that each draw what to ask from a seed: plain and streamed texts, scalings of several kinds, contexts that
shift, passages that are used again, adapters, tools, forms, embeddings, refusals, and streams that are left in the middle.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = "once upon a time there was king of the sea who had three ships and a house near old town".split()
PASSAGE = " ".join(WORDS) + ". "
SCALINGS: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_update": "recompute"},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_update": "rotate"},
    {"rope_scaling": {"rope_type": "self_extend", "group_size": 4, "window": 64}},
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["sea", "king"]}}}},
}


@dataclass
class Accounts:
    """What became of every request, by kind. wrong: what may not be."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and outcome
    finished_samples: int = 0
    left_samples: int = 0
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
            if outcome == "left":
                self.left_samples += samples
            else:
                self.finished_samples += samples

    def table(self) -> str:
        return "\n".join(f"{kind:12} {outcome:8} {count}" for (kind, outcome), count in sorted(self.ended.items()))


class Client(threading.Thread):
    """One of those that ask."""

    def __init__(self, url: str, seed: int, until: float, accounts: Accounts, adapters: bool) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=300)
        self._rng = random.Random(seed)
        self._until = until
        self._accounts = accounts
        self._kinds: list[Callable[[], tuple[str, str, dict[str, Any]]]] = [
            self._plain,
            self._scaled,
            self._shifted,
            self._reused,
            self._tools,
            self._form,
            self._embedding,
            self._refused,
        ]
        if adapters:
            self._kinds.append(self._adapted)

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

    # ---- what is asked ----------------------------------------------------------------------------------------------------
    def _text(self, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    def _completion(self, kind: str, prompt: str, most: int, **fields: Any) -> tuple[str, str, dict[str, Any]]:
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

    def _plain(self) -> tuple[str, str, dict[str, Any]]:
        return self._completion("plain", self._text(60), 60)

    def _scaled(self) -> tuple[str, str, dict[str, Any]]:
        return self._completion("scaled", self._text(200), 60, **self._rng.choice(SCALINGS))

    def _shifted(self) -> tuple[str, str, dict[str, Any]]:
        return self._completion("shifted", PASSAGE * 18, 300, context_overflow="shift", keep_tokens=16, n=1)

    def _reused(self) -> tuple[str, str, dict[str, Any]]:
        prompt = self._text(8) + " " + PASSAGE * self._rng.randint(4, 12)
        return self._completion("reused", prompt, 20, cache_reuse=32)

    def _adapted(self) -> tuple[str, str, dict[str, Any]]:
        return self._completion("adapted", self._text(30), 30, model="first")

    def _tools(self) -> tuple[str, str, dict[str, Any]]:
        message = {"role": "user", "content": self._text(10)}
        body = {"messages": [message], "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
        return "tools", "/v1/chat/completions", body | {"stream": self._rng.random() < 0.5}

    def _form(self) -> tuple[str, str, dict[str, Any]]:
        kind, path, body = self._completion(
            "form", self._text(10), 20, structured_outputs={"regex": "[a-z ]{4,12}"}, n=1
        )
        return kind, path, body

    def _embedding(self) -> tuple[str, str, dict[str, Any]]:
        return "embedding", "/v1/embeddings", {"input": [self._text(40) for _ in range(self._rng.randint(1, 4))]}

    def _refused(self) -> tuple[str, str, dict[str, Any]]:
        return "refused", "/v1/completions", {"prompt": "a", "max_tokens": -self._rng.randint(1, 9)}

    # ---- what must come ----------------------------------------------------------------------------------------------------
    def _ask(self, kind: str, path: str, body: dict[str, Any]) -> None:
        samples = len(body["input"]) if kind == "embedding" else body.get("n", 1)
        if not body.get("stream"):
            answer = self._http.post(path, json=body)
            if answer.status_code != (400 if kind == "refused" else 200):
                raise AssertionError(f"{answer.status_code} {answer.text[:300]}")
            if kind in ("refused", "embedding"):
                self._accounts.end(kind, "whole", samples if kind == "embedding" else 0)
                return
            self._check(kind, body, answer.json()["choices"], answer.json()["usage"])
            self._accounts.end(kind, "whole", samples, answer.json()["usage"]["completion_tokens"])
            return
        leaves_after = self._rng.randint(1, 20) if self._rng.random() < 0.2 else None
        choices: dict[int, dict[str, Any]] = {}
        usage, events, done = None, 0, False
        with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code} {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    events += 1
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise AssertionError(str(event))
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        if choice["finish_reason"] is not None:
                            choices[choice["index"]] = choice
                if events == leaves_after:
                    self._accounts.end(kind, "left", samples)
                    return
        if not done or len(choices) != samples:
            raise AssertionError(f"a stream ended with {len(choices)} of {samples} choices, done: {done}")
        self._check(kind, body, list(choices.values()), usage)
        self._accounts.end(kind, "whole", samples, 0 if usage is None else usage["completion_tokens"])

    @staticmethod
    def _check(kind: str, body: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> None:
        if any(choice["finish_reason"] not in ("length", "stop", "tool_calls") for choice in choices):
            raise AssertionError(str(choices))
        exact = body.get("ignore_eos") and kind != "form"
        if exact and usage is not None and usage["completion_tokens"] != body["n"] * body["max_tokens"]:
            raise AssertionError(f"usage says {usage}, asked were {body['n']} times {body['max_tokens']}")


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class Memory:
    """Resident memory of a process over time, in MiB at seconds."""

    pid: int
    samples: list[tuple[float, float]] = field(default_factory=list)

    def sample(self, now: float) -> None:
        self.samples.append((now, resident(self.pid)))

    def growth(self, warm: float) -> tuple[float, float]:
        """Growth in MiB per minute after the first `warm` share of the run (least squares), and in total."""
        kept = self.samples[int(warm * len(self.samples)) :]
        middle, mean = (sum(column) / len(kept) for column in zip(*kept, strict=True))
        spread = sum((at - middle) ** 2 for at, _ in kept)
        slope = sum((at - middle) * (size - mean) for at, size in kept) / spread
        return 60 * slope, slope * (kept[-1][0] - kept[0][0])


def soak(url: str, seconds: float, memories: list[Memory], *, clients: int = 6, adapters: bool = True) -> Accounts:
    """Run `clients` clients for `seconds` seconds."""
    accounts, until = Accounts(), time.monotonic() + seconds
    threads = [Client(url, seed, until, accounts, adapters) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for memory in memories:
            memory.sample(time.monotonic())
        time.sleep(1.0)
    return accounts
