"""Asks a server for its metrics again and again and shows what has changed: live on a terminal, else as text or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from rich.console import Console
from rich.live import Live

from windlass.clients import (
    APIError,
    APIStatusError,
    Client,
    RateLimitError,
    RetryPolicy,
    ServerError,
)
from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.lines import say
from windlass.clients.terminal.streams import leave_output, nobody_reads
from windlass.server.cli.key_hint import with_key_hint
from windlass.server.cli.top.figures import QUANTILES, Figures, MetricsLook, figures
from windlass.server.cli.top.keys import typed_keys
from windlass.server.cli.top.view import plain, screen

ANSWER_SECONDS = 5.0  # a server that takes longer counts as silent


class NoWindlassError(ValueError):
    """What answered has no metrics under the names that are read here; the message says what to do."""


class ServerWatch:
    """One server, looked at again and again. Making it looks for the first time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = self._look()

    def next(self) -> Figures:
        """What has happened since the last look that succeeded. Raises APIError."""
        before, self._before = self._before, self._look()
        return figures(before, self._before)

    def _look(self) -> MetricsLook:
        state = self._client.ready().status or "unknown"
        look = MetricsLook(at=time.monotonic(), state=state, metrics=self._client.metrics())
        if not look.is_windlass:
            raise NoWindlassError(
                "its metrics have other names: this takes a Windlass server that was not started with --metrics-names vllm"
            )
        return look


def watch(url: str, api_key: str | None, interval: float, *, once: bool, as_json: bool) -> int:
    """Until the person leaves, or for one interval; the exit code. Raises CommandError, one line."""
    try:
        with Client(url, api_key=api_key, timeout=ANSWER_SECONDS, retry=RetryPolicy(max_retries=0)) as client:
            watched = ServerWatch(client)
            if once or as_json or not sys.stdout.isatty():
                _write(watched, client.base_url, interval, once=once, as_json=as_json)
            else:
                _show(watched, client.base_url, interval)
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        if not nobody_reads(error):
            raise
        leave_output()
        return 0
    except APIError as error:
        raise CommandError(f"{url}: {_words(error)}") from error
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from error
    return 0


def _write(watched: ServerWatch, url: str, interval: float, *, once: bool, as_json: bool) -> None:
    """A server that falls silent is said once and asked again, unless once is all that is wanted."""
    silent = False
    while True:
        time.sleep(interval)
        try:
            found = watched.next()
        except APIError as error:
            if once or not _is_silence(error):
                raise
            if not silent:
                say(f"{url}: {_words(error)} (it is asked again)")
            silent = True
            continue
        silent = False
        print(json.dumps(_object(found)) if as_json else plain(found, url), flush=True)
        if once:
            return


def _object(found: Figures) -> dict[str, object]:
    """Latencies by the names of their quantiles."""
    shown = asdict(found)
    for name in ("first_token", "between_tokens", "loop_lag"):
        if shown[name] is not None:
            shown[name] = {f"p{share * 100:.0f}": value for share, value in zip(QUANTILES, shown[name], strict=True)}
    return shown


def _show(watched: ServerWatch, url: str, interval: float) -> None:
    """A server that falls silent is asked again: it may be starting anew, and the person may leave."""
    with typed_keys() as keys, Live(screen(None, url), console=Console(), screen=True, auto_refresh=False) as live:
        found: Figures | None = None
        while not keys.wait("qQ\x1b\x04", interval):
            trouble = ""
            try:
                found = watched.next()
            except APIError as error:
                if not _is_silence(error):
                    raise
                trouble = _words(error)
            live.update(screen(found, url, trouble), refresh=True)


def _is_silence(error: APIError) -> bool:
    """Whether the same question may be answered later: not where it is refused, as with a key that is none any more."""
    return not isinstance(error, APIStatusError) or isinstance(error, (ServerError, RateLimitError))


def _words(error: APIError) -> str:
    if isinstance(error, APIStatusError):
        return f"it answered {error.status}: {with_key_hint(error)}"
    return error.message
