"""The options of `windlass top`. Imports nothing that takes time."""

from __future__ import annotations

from typing import Annotated

import typer

from windlass.server.options.spelling import option


def top(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="A running server, with or without /v1.", envvar="WINDLASS_BASE_URL"),
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, option("--api-key", help="The server's key; where keys are named, that of an administrator.")
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval as plain text, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object for each interval, and nothing else.")
    ] = False,
) -> int:
    """Watch a running server: tokens, requests, cache, latencies, rotary scalings. q or ctrl-C ends it."""
    from windlass.server.cli.top.watching import watch

    return watch(url, api_key, interval, once=once, as_json=as_json)
