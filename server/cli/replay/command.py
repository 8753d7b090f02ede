"""`windlass replay`: a file in, a server asked, a report out. Loads no model itself: a server of its own does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path

from windlass.clients import APIError, Client, RetryPolicy
from windlass.clients.loadtest.display import ProgressDisplay
from windlass.clients.loadtest.vocabulary import WORDS
from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.lines import say
from windlass.clients.terminal.signals import stopped_by_signals
from windlass.engine.errors import LoadError
from windlass.server.cli.chat.own_server import OwnServer
from windlass.server.cli.key_hint import with_key_hint
from windlass.server.cli.replay.asking import AskedAgain, asked_again
from windlass.server.cli.replay.reading import RecordedWorkload, read_recording
from windlass.server.cli.replay.report import as_object, good, lines
from windlass.server.cli.replay.running import Replayed, ReplayPace, replay
from windlass.server.options.answer_defaults import SamplingOptions
from windlass.server.options.engine import EngineOptions
from windlass.server.options.spelling import to_arguments
from windlass.server.startup.choice import choose_model


def read_pace(speed: float, as_fast_as_possible: bool, concurrency: int) -> ReplayPace:
    """Raises LoadError for a speed that is none."""
    if not (math.isfinite(speed) and speed > 0):
        raise LoadError(f"--speed must be more than 0, got {speed:g}")
    return ReplayPace(speed=None if as_fast_as_possible else speed, at_once=concurrency)


def replay_there(file: Path, url: str, api_key: str | None, pace: ReplayPace, as_json: bool) -> int:
    """Repeat the recording on the server at `url`. Returns the exit code; raises CommandError, one line."""
    recording = read_recording(file)
    try:
        client = Client(url, api_key=api_key, timeout=30, retry=RetryPolicy(max_retries=0))
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from error
    return _finish(recording, client, api_key, pace, as_json)


def replay_here(
    file: Path, model: str | None, options: EngineOptions, sampling: SamplingOptions, pace: ReplayPace, as_json: bool
) -> int:
    """Repeat it on a server of its own, which ends with it. Raises CommandError and EngineError, one line."""
    options.to_config(Path())  # options at fault are reported before anything is looked up or downloaded
    sampling.check()
    recording = read_recording(file)
    name = None
    if model is None or not Path(model).expanduser().exists():
        name, path = choose_model(model)
        model = model or (name if not Path(name).exists() else str(path))
    with OwnServer(model, name, [*to_arguments(options), *to_arguments(sampling)]) as server:
        server.wait_ready()
        client = server.client(timeout=30, retry=RetryPolicy(max_retries=0))
        return _finish(recording, client, server.api_key, pace, as_json)


def _finish(recording: RecordedWorkload, client: Client, api_key: str | None, pace: ReplayPace, as_json: bool) -> int:
    url = client.base_url
    try:
        with client:
            client.models()  # a wrong address or key is told once, not by every request
            replayed, stopped_by = _run(recording, client, url, api_key, pace)
    except APIError as error:
        raise CommandError(f"{url}: {with_key_hint(error)}") from error
    except ValueError as error:
        raise CommandError(f"{url}: {error}") from error
    if as_json:
        print(json.dumps(as_object(recording, replayed)))
    else:
        for line in lines(recording, replayed):
            print(line)
    if stopped_by is not None:
        return 128 + stopped_by
    return 0 if good(replayed) else 1


def _run(
    recording: RecordedWorkload, client: Client, url: str, api_key: str | None, pace: ReplayPace
) -> tuple[Replayed, signal.Signals | None]:
    """What came of it, and the signal that cut it short."""
    ordinary: list[int] = []
    if any(request.prompt_token_ids is None for request in recording.requests):
        found = client.tokenize(" ".join(WORDS), add_special_tokens=False)
        ordinary = sorted(set(found.tokens))
    asked = [asked_again(request, ordinary) for request in recording.requests]
    say(f"repeating {len(asked):,} requests on {url}")
    return asyncio.run(_until_stopped(url, api_key, asked, pace))


async def _until_stopped(
    url: str, api_key: str | None, asked: Sequence[AskedAgain], pace: ReplayPace
) -> tuple[Replayed, signal.Signals | None]:
    stop, signals = asyncio.Event(), list[signal.Signals]()
    display = ProgressDisplay()
    with stopped_by_signals(stop, signals), contextlib.ExitStack() as ending:
        ending.callback(display.stop)
        replayed = await replay(url, api_key, asked, pace, progress=display, stop=stop)
    return replayed, signals[0] if signals else None
