"""Every example of docs/clients.md runs, against a server that answers as Windlass does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.scripted_http import Exchange, answer, events, scripted_server

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
ENVELOPE = {"id": "x", "created": 1, "model": "demo"}


async def windlass(exchange: Exchange) -> None:
    """Answers every path the page uses."""
    path, body = exchange.request.path, exchange.request.json if exchange.request.body else {}
    chat = path.endswith("chat/completions")
    if path == "/health":
        await answer({"status": "ok"})(exchange)
    elif path == "/v1/models":
        await answer({"object": "list", "data": [{"id": "demo", "max_model_len": 512}]})(exchange)
    elif path == "/tokenize":
        await answer({"count": 2, "tokens": [1, 2], "max_model_len": 512})(exchange)
    elif path == "/v1/rotary":
        await answer({"model": {}, "default": {"rope_type": "default"}, "profiles": {}, "policy": "allow"})(exchange)
    elif path == "/v1/rotary/inspect":
        await answer({"rope_type": "dynamic", "inv_freq": [1.0], "wavelengths": [6.28], "fingerprint": "f"})(exchange)
    elif path == "/detokenize":
        await answer({"prompt": "hello"})(exchange)
    elif (body.get("max_tokens") or 0) > 512:
        error = {"message": "too long", "type": "invalid_request_error", "param": "max_tokens", "code": "c"}
        await answer({"error": error}, "400 Bad Request")(exchange)
    elif body.get("stream"):
        part = {"delta": {"content": "hi"}} if chat else {"text": "hi"}
        choices = [{"index": 0, **part, "finish_reason": reason} for reason in (None, "stop")]
        await events(*({**ENVELOPE, "choices": [choice]} for choice in choices), "[DONE]")(exchange)
    else:
        part = {"message": {"role": "assistant", "content": "hi"}} if chat else {"text": "hi"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        logprobs = {"tokens": ["hi"], "token_logprobs": [-0.5], "top_logprobs": [{"hi": -0.5}], "text_offset": [0]}
        choice = {"index": 0, **part, "finish_reason": "stop", "logprobs": None if chat else logprobs}
        await answer({**ENVELOPE, "choices": [choice], "usage": usage})(exchange)


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(source, monkeypatch):
    with scripted_server(windlass) as server:
        monkeypatch.setenv("WINDLASS_BASE_URL", server.url)
        exec(compile(source, str(PAGE), "exec"), {"__name__": "__main__"})
        assert server.requests


def test_the_page_has_examples():
    assert len(EXAMPLES) >= 5
