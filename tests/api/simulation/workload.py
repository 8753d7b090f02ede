"""Requests of simulated clients and their expected answers, drawn from the seed.

An `Ask` is an HTTP request with its expected answer in the absence of faults.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from simulation.model import LETTERS, PLANNER, TEXT, answer
from simulation.text import tasks, tokenizer

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.text.workers.frames import unpack_ids

ADAPTERS = ("first", "second")
SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    {"rope_type": "dynamic", "factor": 2.0},
)


@dataclass(frozen=True)
class Choice:
    text: str
    finish: str


@dataclass
class Ask:
    """reader, sender: behaviour of the client. choices: expected ones; None: nothing is generated."""

    request_id: str
    method: str
    path: str
    key: str | None
    body: dict[str, Any] | None = None
    choices: list[Choice] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    timeout: float | None = None
    reader: str = "quick"
    sender: str = "quick"
    leaves_after: float = 0.0
    fresh: bool = True  # on a new connection
    pause: float = 0.0  # seconds before it
    adapter: str | None = None
    status: int = 200

    @property
    def stream(self) -> bool:
        return bool(self.body and self.body.get("stream"))

    def head_and_body(self) -> tuple[bytes, bytes]:
        """Return the bytes of the request."""
        data = b"" if self.body is None else json.dumps(self.body).encode()
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: simulated", f"x-request-id: {self.request_id}"]
        if self.key is not None:
            lines.append(f"authorization: Bearer {self.key}")
        if self.body is not None:
            lines += ["content-type: application/json", f"content-length: {len(data)}"]
        return "\r\n".join([*lines, "", ""]).encode(), data


@dataclass
class TokenSampler:
    """Draws asks.

    max_model_len: of the simulated model. keys: of the callers; empty if none is required. behaviours: shares of asks with
    unusual clients.
    """

    rng: random.Random
    max_model_len: int
    keys: Sequence[str]
    behaviours: dict[str, float]
    prefixes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefixes = [self.rng.choices(LETTERS, k=self.rng.randint(4, 24)) for _ in range(3)]

    def asks(self, name: str, count: int) -> list[Ask]:
        """Return the consecutive requests of a client."""
        found = []
        for number in range(count):
            found.append(self.ask(f"{name}-{number}"))
            if self.rng.random() < 0.08:
                found += self._adapter(f"{name}-{number}", self.rng.choice(self.keys) if self.keys else None)
        return found

    def ask(self, request_id: str) -> Ask:
        rng = self.rng
        key = rng.choice(self.keys) if self.keys else None
        kind = rng.random()
        if kind < 0.08:
            path = rng.choice(["/v1/models", "/health", "/metrics", "/v1/rotary", "/v1/models/simulated"])
            found = Ask(request_id, "GET", path, key)
        elif kind < 0.12:
            found = Ask(request_id, "POST", "/v1/completions", key, {"prompt": "x", "max_tokens": -1}, status=400)
        elif kind < 0.35:
            found = self._chat(request_id, key)
        else:
            found = self._completion(request_id, key)
        found.fresh = rng.random() < 0.6
        found.pause = rng.choice([0.0, 0.0, rng.expovariate(2.0), rng.expovariate(0.2)])
        for behaviour, share in self.behaviours.items():
            if rng.random() < share:
                if behaviour == "client sends slowly":
                    found.sender = rng.choice(["slow", "slow", "stops"])
                else:
                    found.reader = {"client is slow": "slow", "client stops reading": "stops"}.get(behaviour, "leaves")
                    found.leaves_after = rng.expovariate(1.0)
        return found

    def plain(self, request_id: str, key: str | None) -> Ask:
        """Return a request of an ordinary client, which must be answered."""
        return self._completion(request_id, key, odd=False)

    def _adapter(self, name: str, key: str | None) -> list[Ask]:
        """Load an adapter and unload it."""
        body = {"lora_name": f"late-{name}"}
        return [
            Ask(f"{name}-load", "POST", "/v1/load_lora_adapter", key, {**body, "lora_path": "."}),
            Ask(f"{name}-unload", "POST", "/v1/unload_lora_adapter", key, body),
        ]

    # ---- kinds of requests -----------------------------------------------------------------------------------------------------
    def _prompt(self) -> list[int]:
        rng = self.rng
        prefix = rng.choice(self.prefixes) if rng.random() < 0.7 else []
        tokens = [*prefix, *rng.choices(LETTERS, k=rng.randint(1, 12))]
        return tokens[: self.max_model_len - 1]

    def _settings(self, odd: bool) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(1 << 30), "temperature": 1.0}
        if rng.random() < 0.6:
            body["stream"] = True
            if rng.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.25:
            body["n"] = rng.randint(2, 3)
        if (scaling := rng.choice(SCALINGS)) is not None:
            body["rope_scaling"] = scaling
            if scaling["rope_type"] == "dynamic":
                body["rope_update"] = rng.choice(["frozen", "recompute"])
        if rng.random() < 0.25:
            body["stop"] = rng.sample("abcdefghijklmnopqrstuvwxyz", 2)
        if rng.random() < 0.15:
            body["cache_salt"] = rng.choice(["salt", "pepper"])
        if rng.random() < 0.2:
            body["priority"] = rng.randint(-1, 2)
        if odd and rng.random() < 0.4:
            body["timeout"] = rng.choice([0.01, 0.1, 0.5, 3.0])
        return body

    def _completion(self, request_id: str, key: str | None, odd: bool = True) -> Ask:
        rng = self.rng
        body = self._settings(odd)
        prompts = [self._prompt() for _ in range(1 if rng.random() < 0.8 else rng.randint(2, 4))]
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
        if len(prompts) == 1 and rng.random() < 0.3:
            body["prompt"] = "".join(TEXT[token] for token in prompts[0])
            (packed,) = tasks().encode(texts=[body["prompt"]], add_special_tokens=True)
            prompts = [unpack_ids(packed)]
        ask = Ask(request_id, "POST", "/v1/completions", key, body, timeout=body.get("timeout"))
        if odd and rng.random() < 0.1:
            ask.adapter = body["model"] = rng.choice(ADAPTERS)
        return self._expect(ask, prompts)

    def _chat(self, request_id: str, key: str | None) -> Ask:
        body = self._settings(True)
        words = self.rng.choices(["who", "is", "the", "king", "of", "it"], k=self.rng.randint(1, 3))
        body["messages"] = [{"role": "user", "content": " ".join(words)}]
        prompt = tokenizer().encode(f"<|bos|>[user]{' '.join(words)}\n[assistant]", add_special_tokens=False)
        ask = Ask(request_id, "POST", "/v1/chat/completions", key, body, timeout=body.get("timeout"))
        return self._expect(ask, [prompt])

    def _expect(self, ask: Ask, prompts: list[list[int]]) -> Ask:
        body = ask.body
        assert body is not None
        if any(len(prompt) >= self.max_model_len for prompt in prompts):
            ask.status = 400
            return ask
        scaling = None if "rope_scaling" not in body else RopeScaling.from_dict(body["rope_scaling"])
        ask.choices = []
        for prompt in prompts:
            most = min(body["max_tokens"], self.max_model_len - len(prompt))
            plan = PLANNER.plan(len(prompt) + most, scaling, body.get("rope_update"))
            ask.prompt_tokens += len(prompt)
            for index in range(body.get("n", 1)):
                adapter = None if ask.adapter is None else 1 + ADAPTERS.index(ask.adapter)
                found = answer(
                    prompt,
                    plan,
                    seed=body["seed"],
                    index=index,
                    max_tokens=most,
                    adapter=adapter,
                    stops=body.get("stop", ()),
                )
                ask.choices.append(Choice(found.text, found.finish))
                ask.completion_tokens += len(found.tokens)
        return ask
