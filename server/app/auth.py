"""Authentication and rate limits: API keys, their limits and usage, and reloading of the key file."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.engine.errors import LoadError
from windlass.server.config.api_keys import ApiKey, read_key_file
from windlass.server.errors import ApiError, bad_request, error_response
from windlass.server.observability.logging import CALLER_NAME

Limit = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]

LIMITS: tuple[Limit, ...] = get_args(Limit)
CALLER = "windlass.caller"  # in a scope: the digest of the request's API key, if keys are required
PUBLIC_PATHS = frozenset({"/health", "/ready"})
_MINUTE = 60.0
_UNLIMITED_KEY = ApiKey(digest="")

_logger = logging.getLogger("windlass.server")


@dataclass(slots=True)
class _TokenBucket:
    """The remainder of a rate limit: at most the amount of one minute, negative after an overdraft."""

    rate: float  # per minute
    left: float
    at: float  # time.monotonic() seconds

    def fill(self, rate: float, now: float) -> None:
        self.left = min(rate, self.left + rate * (now - self.at) / _MINUTE)
        self.rate, self.at = rate, now

    def seconds_until(self, wanted: float) -> float:
        """Seconds until the amount, or the maximum if that is less, is available. A missing millionth is a rounding error."""
        missing = min(wanted, self.rate) - self.left
        return missing * _MINUTE / self.rate if missing > 1e-6 * max(1.0, wanted) else 0.0


@dataclass(slots=True)
class CallerUsage:
    """Usage by one named caller since the server started."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Callers:
    """The API keys of a server and their usage. keys: if empty, no key is required. clock: monotonic seconds, for tests."""

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._keys: dict[str, ApiKey] = {}
        self._buckets: dict[tuple[str, Limit], _TokenBucket] = {}
        self._in_flight: Counter[str] = Counter()
        self.usage: dict[str, CallerUsage] = {}  # by name
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace the valid keys. Callers that remain keep their usage."""
        self._keys = {key.digest: key for key in keys}
        names = {key.name for key in self._keys.values() if key.name}
        self._buckets = {(name, limit): bucket for (name, limit), bucket in self._buckets.items() if name in names}
        self.usage = {name: self.usage.get(name) or CallerUsage() for name in names}

    def find(self, digest: str) -> ApiKey | None:
        """The key with this digest. All are compared, so that the time reveals nothing."""
        found = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def key_of(self, caller: str) -> ApiKey:
        """The key with a digest that was found before; one without limits if it was removed or no key is required."""
        return self._keys.get(caller, _UNLIMITED_KEY)

    def cache_owner(self, caller: str) -> str:
        """The owner of cached blocks, without spaces: the caller's name, which outlives a change of the key, else the digest."""
        name = self.key_of(caller).name
        return f"name:{name}" if name else f"key:{caller}"

    @contextmanager
    def running(self, caller: str) -> Iterator[None]:
        """Count a request of `caller`, in progress until the block ends. Raises ApiError 429 if it exceeds a limit."""
        key = self.key_of(caller)
        name = key.name
        if key.concurrency is not None and self._in_flight[name] >= key.concurrency:
            text = f"{key.concurrency} requests of this key are in progress, its maximum"
            self._refuse(key, "concurrency", text, 1.0)
        bucket = self._bucket(key, "requests_per_minute", key.requests_per_minute)
        if bucket is not None:
            if seconds := bucket.seconds_until(1.0):
                text = f"this key may send {key.requests_per_minute:g} requests a minute"
                self._refuse(key, "requests_per_minute", text, seconds)
            bucket.left -= 1.0
        if name:
            self.usage[name].requests += 1
        self._in_flight[name] += 1
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            if self._in_flight[name] == 0:
                del self._in_flight[name]

    def charge_prompt_tokens(self, caller: str, tokens: int) -> None:
        """Count the tokens of a request's prompts. Raises ApiError 429 if the key does not have that many left now.

        Prompts over the limit of a minute are admitted once the limit is unused, and delay the requests after them.
        """
        key = self.key_of(caller)
        bucket = self._bucket(key, "tokens_per_minute", key.tokens_per_minute)
        if bucket is not None:
            if seconds := bucket.seconds_until(float(tokens)):
                text = f"this key may use {key.tokens_per_minute:g} tokens a minute and the prompt has {tokens}"
                self._refuse(key, "tokens_per_minute", text, seconds)
            bucket.left -= tokens
        if key.name:
            self.usage[key.name].prompt_tokens += tokens

    def charge_generated_tokens(self, caller: str, tokens: int) -> None:
        """Count generated tokens. Never refused: the next request waits instead."""
        key = self.key_of(caller)
        bucket = self._bucket(key, "tokens_per_minute", key.tokens_per_minute)
        if bucket is not None:
            bucket.left -= tokens
        if key.name:
            self.usage[key.name].generated_tokens += tokens

    def priority(self, caller: str, requested: int | None) -> int:
        """The priority of a request. Raises ApiError if the key may not use the requested one."""
        least = self.key_of(caller).priority
        if least is None:
            return requested or 0
        if requested is not None and requested < least:
            raise bad_request(f"priority must be {least} or higher with this key, got {requested}", "priority")
        return least if requested is None else requested

    def is_admin(self, caller: str) -> bool:
        """Whether the caller may inspect and change shared state; true for all if no key is required."""
        return not self._keys or (caller in self._keys and self._keys[caller].admin)

    def _bucket(self, key: ApiKey, limit: Limit, rate: float | None) -> _TokenBucket | None:
        if rate is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault((key.name, limit), _TokenBucket(rate, rate, now))
        bucket.fill(rate, now)
        return bucket

    def _refuse(self, key: ApiKey, limit: Limit, message: str, seconds: float) -> None:
        self.usage[key.name].refused[limit] += 1
        raise ApiError(
            429,
            f"{message}: try again in {max(1, math.ceil(seconds))} s",
            code="rate_limit_exceeded",
            retry_after=max(1, math.ceil(seconds)),
        )


class CallerCollector(Collector):
    """Usage by named callers, read at each scrape."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "windlass_caller_requests", "Requests admitted, by caller (--api-key-file).", labels=["caller"]
        )
        tokens = CounterMetricFamily(
            "windlass_caller_tokens", "Tokens by caller and kind: prompt or generated.", labels=["caller", "kind"]
        )
        refused = CounterMetricFamily(
            "windlass_caller_refused",
            "Requests refused with status 429, by caller and limit.",
            labels=["caller", "limit"],
        )
        for name, usage in sorted(self._callers.usage.items()):
            requests.add_metric([name], usage.requests)
            tokens.add_metric([name, "prompt"], usage.prompt_tokens)
            tokens.add_metric([name, "generated"], usage.generated_tokens)
            for limit in LIMITS:
                refused.add_metric([name, limit], usage.refused[limit])
        yield from (requests, tokens, refused)


def reload_keys_on_sighup(
    path: Path, plain: tuple[str, ...], callers: Callers, sighup_received: Callable[[], bool]
) -> None:
    """Read the key file again at each SIGHUP. Call it on the event loop.

    plain: keys of the command line, which remain valid next to those of the file. sighup_received: whether the signal arrived
    earlier, after the file was read first.
    """

    def reload() -> None:
        try:
            found = read_key_file(path)
        except LoadError as error:
            _logger.error("%s; the previous keys remain valid", error)
            return
        listed = (key if isinstance(key, ApiKey) else ApiKey.plain(key) for key in found)
        callers.replace((*map(ApiKey.plain, plain), *listed))
        _logger.warning("--api-key-file %s was read again: %d keys are valid", path, len(found))

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    if sighup_received():
        reload()


class AuthMiddleware:
    """Requires `Authorization: Bearer <key>` or `x-api-key: <key>` on every path that is not public."""

    def __init__(self, app: ASGIApp, *, callers: Callers, public_paths: Collection[str] = PUBLIC_PATHS) -> None:
        self._app = app
        self._open = public_paths
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            caller = self._caller(scope)
            if caller is not None or scope["path"] in self._open:
                scope[CALLER] = caller
                scope[CALLER_NAME] = self._callers.key_of(caller).name if caller is not None else ""
                await self._app(scope, receive, send)
            else:
                error = ApiError(
                    401,
                    "a valid API key is needed: send the header Authorization: Bearer <key>, or x-api-key: <key>",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(error, scope)(scope, receive, send)
        else:  # there are no WebSocket endpoints
            await send({"type": "websocket.close", "code": 1008})

    def _caller(self, scope: Scope) -> str | None:
        """The digest of the request's key in hexadecimal; None without a valid key."""
        found = None
        for key in _keys(scope):
            # All digests have the same length, so comparing them does not reveal the length of a key.
            digest = hashlib.sha256(key).hexdigest()
            if self._callers.find(digest) is not None:
                found = found or digest
        return found


def _keys(scope: Scope) -> list[bytes]:
    """The keys of a request, at most one in each header."""
    keys = []
    for header, prefix in ((b"authorization", b"bearer"), (b"x-api-key", b"")):
        given = [value for name, value in scope["headers"] if name == header]
        if len(given) == 1:
            scheme, _, key = given[0].partition(b" ") if prefix else (b"", b"", given[0])
            if scheme.lower() == prefix:
                keys.append(key.strip())
    return keys
