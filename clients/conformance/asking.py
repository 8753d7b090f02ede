"""Asks a server for greedy answers with log-probabilities, and says how far two steps are apart. Knows no check."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import httpx

from windlass.clients.terminal.errors import CommandError

TOP = 5
OPTIONAL = ("cache_salt", "cache_prompt", "ignore_eos")  # sent until the server refuses a body that has them


class NotAskableError(Exception):
    """This server cannot be asked this; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy step: its token's text, and the log-probabilities (nats) of the likeliest tokens by text."""

    token: str
    top: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. cached: prompt tokens the server says it did not compute, None where it does not say."""

    text: str
    steps: tuple[Step, ...]
    prompt_tokens: int
    cached: int | None


def distance(one: Step, other: Step) -> float:
    """The largest change of a log-probability between two steps, in nats; a lower bound where the lists differ.

    A token in only one of the lists has, in the other, at most the least value listed there. A tie can choose either
    token without changing any log-probability, so the chosen tokens themselves are not compared.
    """
    far = 0.0
    for mine, theirs in ((one.top, other.top), (other.top, one.top)):
        least = min(theirs.values())
        for token, value in mine.items():
            far = max(far, abs(value - theirs[token]) if token in theirs else value - least)
    return far


class Asker:
    """One model of one server, asked over /v1/completions with text prompts. Safe to use from several threads."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, timeout: float, client: httpx.Client | None = None
    ) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = client or httpx.Client(timeout=timeout, trust_env=False)
        self._http.headers.update(headers)
        self._optional = set(OPTIONAL)
        self.card = self._find(model)
        self.model: str = self.card["id"]

    def close(self) -> None:
        self._http.close()

    def _find(self, model: str | None) -> dict[str, Any]:
        try:
            reply = self._http.get(self._base + "/models")
            cards = reply.json()["data"] if reply.status_code == 200 else []
            cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"no server answers at {self._base}: {error}; give the address it listens on") from None
        except (ValueError, KeyError, TypeError):
            cards = []
        if model is None and not cards:
            raise CommandError(
                f"{self._base}/models lists no model (status {reply.status_code}): give --model, and --api-key where needed"
            )
        found = [card for card in cards if model in (None, card["id"])]
        return found[0] if found else {"id": model}

    def context(self) -> int | None:
        """The longest context in tokens, where /v1/models tells it in vLLM's or llama.cpp's way."""
        meta = self.card.get("meta")
        for value in (self.card.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None):
            if isinstance(value, int) and value > 0:
                return value
        return None

    def ask(self, prompt: str, tokens: int, *, fresh: bool = False) -> Answer:
        """The greedy answer of at most `tokens` tokens. fresh: ask that no earlier request's cache be used."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": TOP,
        }
        extras: dict[str, Any] = {"ignore_eos": True}
        if fresh:
            extras.update(cache_salt=secrets.token_hex(8), cache_prompt=False)
        unsure: set[str] = set()  # left out for an error that names none of them
        while True:
            sent = {name: value for name, value in extras.items() if name in self._optional - unsure}
            try:
                reply = self._http.post(self._base + "/completions", json=body | sent)
            except httpx.TimeoutException:
                raise NotAskableError("the server did not answer in time: give a longer --timeout") from None
            except httpx.HTTPError as error:
                raise CommandError(f"the server at {self._base} stopped answering: {error}") from None
            if reply.status_code in (400, 422) and sent:
                named = [name for name in sent if name in reply.text]
                if named:
                    self._optional -= set(named)
                else:
                    unsure = set(sent)  # an error of another kind comes again without them: then they stay
                continue
            break
        if reply.status_code == 200:
            self._optional -= unsure
        if reply.status_code in (401, 403):
            raise CommandError("the server refuses the key: give --api-key")
        if reply.status_code != 200:
            raise NotAskableError(f"status {reply.status_code}: {reply.text[:200]}")
        return _read(reply)


def _read(reply: httpx.Response) -> Answer:
    try:
        body = reply.json()
        choice, usage = body["choices"][0], body["usage"]
        given = choice.get("logprobs") or {}
        if isinstance(given.get("content"), list):  # llama.cpp answers in the form of chats
            steps = [
                Step(one["token"], {top["token"]: float(top["logprob"]) for top in one["top_logprobs"]})
                for one in given["content"]
            ]
        else:
            tops = given.get("top_logprobs") or []
            steps = [
                Step(token, {name: float(value) for name, value in top.items()})
                for token, top in zip(given.get("tokens") or [], tops, strict=True)
            ]
        details = usage.get("prompt_tokens_details") or {}
        answer = Answer(choice["text"], tuple(steps), int(usage["prompt_tokens"]), details.get("cached_tokens"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise NotAskableError(f"the answer is no completion as OpenAI has it ({error!r})") from None
    if not answer.steps or any(not step.top for step in answer.steps):
        raise NotAskableError("the answer has no top_logprobs: this server does not offer logprobs in /v1/completions")
    return answer
