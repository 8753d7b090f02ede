"""Asks a server for greedy answers with log-probabilities, in bounded time. Knows no check."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from threading import Event
from typing import Any

import httpx

from windlass.clients.conformance.answers import Answer, AnswerParser, CheckUnavailableError
from windlass.clients.sse import SSEDecoder
from windlass.clients.terminal.errors import CommandError

TOP = 5
# Sent until the server refuses a body that has them. Without stream_options, usage may still come.
OPTIONAL = ("cache_salt", "cache_prompt", "ignore_eos", "logprobs", "stream_options")


class ConformanceClient:
    """One model of one server, asked over /v1/completions with text prompts. Safe to use from several threads.

    timeout: seconds for one request. time_limit: seconds for all of them; past it nothing more is asked.
    by_text: whether the server turned out to offer no log-probabilities, so that only texts can be compared.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None,
        timeout: float,
        client: httpx.Client | None = None,
        *,
        time_limit: float = float("inf"),
    ) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A connection each: a server may close one that it kept just when the next request is sent.
        self._http = client or httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._http.headers.update(headers)
        self._timeout, self._end = timeout, time.monotonic() + time_limit
        self._optional = set(OPTIONAL)
        self.by_text: bool | None = None
        self.card = self._find(model)
        self.model: str = self.card["id"]

    def close(self) -> None:
        self._http.close()

    def _find(self, model: str | None) -> dict[str, Any]:
        end = min(self._end, time.monotonic() + self._timeout)
        try:
            with self._http.stream("GET", self._base + "/models", timeout=self._timeout) as reply:
                body = b"".join(_until(end, reply, "it did not tell its models in time"))
            cards = json.loads(body)["data"] if reply.status_code == 200 else []
            cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (httpx.HTTPError, httpx.InvalidURL, CheckUnavailableError) as error:
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
        return self._card_value("max_model_len", "n_ctx")

    def trained(self) -> int | None:
        """The positions the model was trained on, where /v1/models tells them in Windlass's or llama.cpp's way."""
        return self._card_value("trained_len", "n_ctx_train")

    def _card_value(self, name: str, in_meta: str) -> int | None:
        meta = self.card.get("meta")
        for value in (self.card.get(name), meta.get(in_meta) if isinstance(meta, dict) else None):
            if isinstance(value, int) and value > 0:
                return value
        return None

    def ask(self, prompt: str, tokens: int, *, fresh: bool = False, began: Event | None = None) -> Answer:
        """The greedy answer of at most `tokens` tokens.

        fresh: ask that no earlier request's cache be used. began: is set when the first part of the answer arrives.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        extras: dict[str, Any] = {
            "logprobs": TOP,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        if fresh:
            extras.update(cache_salt=secrets.token_hex(8), cache_prompt=False)
        unsure: set[str] = set()  # left out for an error that names none of them
        while True:
            sent = {name: value for name, value in extras.items() if name in self._optional - unsure}
            reader, status, error_text = self._send(body | sent, began)
            if status in (400, 422) and sent:
                named = [name for name in sent if name in error_text]
                if named:
                    self._optional -= set(named)
                else:
                    unsure = set(sent)  # an error of another kind comes again without them: then they stay
                continue
            break
        if status == 200:
            self._optional -= unsure
        if status in (401, 403):
            raise CommandError("the server refuses the key: give --api-key")
        if status != 200:
            raise CheckUnavailableError(f"status {status}: {error_text[:200]}")
        if self.by_text is None:
            self.by_text = not reader.steps
        return reader.whole(by_text=self.by_text)

    def _send(self, body: dict[str, Any], began: Event | None) -> tuple[AnswerParser, int, str]:
        """What was read of the answer, the status, and the text of an error."""
        end = min(self._end, time.monotonic() + self._timeout)
        late = "the time of the run is used up: give a longer --time-limit"
        if end <= time.monotonic():
            raise CheckUnavailableError(late)
        if end != self._end:
            late = "the server did not answer in time: give a longer --timeout"
        reader = AnswerParser()
        wait = end - time.monotonic()
        try:
            with self._http.stream("POST", self._base + "/completions", json=body, timeout=wait) as reply:
                chunks = _until(end, reply, late)
                if reply.status_code != 200:
                    return reader, reply.status_code, b"".join(chunks).decode("utf-8", "replace")
                streams = "event-stream" in reply.headers.get("content-type", "")
                for part in _parts(chunks) if streams else [json.loads(b"".join(chunks))]:
                    reader.part(part, time.monotonic())
                    if began is not None and reader.times:
                        began.set()
        except httpx.TimeoutException:
            raise CheckUnavailableError(late) from None
        except httpx.HTTPError as error:
            raise CommandError(f"the server at {self._base} stopped answering: {error}") from None
        except ValueError as error:
            raise CheckUnavailableError(f"the answer is no JSON ({error})") from None
        return reader, 200, ""


def _until(end: float, reply: httpx.Response, late: str) -> Iterator[bytes]:
    """The body as it arrives. Raises CheckUnavailableError, saying `late`, once more of it comes after `end`."""
    for chunk in reply.iter_bytes():
        if time.monotonic() > end:
            raise CheckUnavailableError(late)
        yield chunk


def _parts(chunks: Iterable[bytes]) -> Iterator[Any]:
    """The JSON objects of a stream as they arrive."""
    decoder = SSEDecoder()
    for chunk in chunks:
        for event in decoder.feed(chunk):
            if event.data != "[DONE]":
                yield json.loads(event.data)
