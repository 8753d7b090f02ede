"""Server-sent events that have names, as `/v1/responses` and `/v1/messages` send them."""

from __future__ import annotations

import json
from typing import Any

from helpers.live_server import Live


def named_events(live: Live, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which is named by its `type`. options: of `Live.stream_text`."""
    text = live.stream_text(path, body, **options)
    events = []
    assert text.endswith("\n\n")
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
