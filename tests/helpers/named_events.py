"""Server-sent events that have names, as `/v1/responses` and `/v1/messages` send them."""

from __future__ import annotations

import json
from typing import Any

from helpers.described import description
from helpers.live_server import Live


def named_events(live: Live, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which is named by its `type`."""
    with live.http.stream("POST", path, json={**body, "stream": True}, **options) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
    description().check_stream(path, text)
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
