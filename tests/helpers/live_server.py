"""HTTP server and application on a loopback port, in a thread, with a scripted engine.

Responses to `Live.http` are validated against the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import tokenizers
from fastapi import FastAPI
from helpers.described import check, description
from helpers.scripted_engine import ScriptedEngine, model_info
from helpers.toy_tokenizers import byte_level, taught

from windlass.engine.interface.model_info import ModelInfo
from windlass.server.app.state import ServerState
from windlass.server.application import create_app
from windlass.server.config.settings import ServerSettings
from windlass.server.http.connection_limits import ConnectionRegistry, ConnectionSettings
from windlass.server.http.server import HttpServer
from windlass.server.text.tokenizer import Tokenizer

MODEL = "toy"
TEMPLATE = (
    "{{ bos_token }}{% if prefix is defined %}{{ prefix }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% if not loop.last or not continue_final_message %}{{ '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def toy_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), SPECIAL_TOKENS)


@dataclass
class Live:
    """Running server. `on_loop` runs a function in its event loop and returns the result."""

    url: str
    engine: ScriptedEngine
    state: ServerState
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    http: httpx.Client
    registry: ConnectionRegistry
    info: ModelInfo | None
    app: FastAPI

    def on_loop(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    def reset(self) -> None:
        """Restore the engine's defaults and its model, and clear its records."""
        self.engine.reset()
        self.engine.info = self.info

    def generate(self, text: str) -> list[int]:
        """Let the engine generate this text and then end; return its tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.engine.reply, self.engine.eos_after = ids or [1], len(ids)
        return ids

    @property
    def prompt(self) -> str:
        """Text of the last prompt that the engine received, with special tokens."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def request(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the response to a request, which must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
        """Return a completion, which must succeed."""
        return self.request("/v1/completions", prompt=prompt, **fields)

    def chat(self, content: Any = "hello", **fields: Any) -> dict[str, Any]:
        """Return a chat response, which must succeed."""
        return self.request("/v1/chat/completions", **{"messages": [{"role": "user", "content": content}], **fields})

    def stream(self, path: str, body: dict[str, Any], on_text: Callable[[str], object] = str) -> list[Any]:
        """Return the events of a stream as JSON, the last one "[DONE]", comments as ": …" strings. See `stream_text`."""
        return parse_events(self.stream_text(path, body, on_text))

    def stream_text(
        self, path: str, body: dict[str, Any], on_text: Callable[[str], object] = str, **options: Any
    ) -> str:
        """Return the text of a stream. on_text: called with the text so far whenever more has arrived."""
        with self.http.stream("POST", path, json={**body, "stream": True}, **options) as response:
            text = ""
            for piece in response.iter_text():
                text += piece
                on_text(text)
            assert response.status_code == 200, text
            assert response.headers["content-type"].startswith("text/event-stream")
        description().check_stream(path, text)
        return text

    def let_go(self, sign: str, count: int = 1) -> Callable[[str], object]:
        """Block the engine; return a callback for `on_text` that releases it once the stream contains `sign` `count` times."""
        self.engine.held = True

        def release(text: str) -> None:
            self.engine.held = text.count(sign) < count

        return release

    def refuse(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Return the error object of a request that must be refused with `status`."""
        response = self.http.post(path, content=body) if isinstance(body, bytes) else self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]
        assert response.headers["x-request-id"]
        return error

    def refusal(self, path: str, body: Any, status: int = 400) -> tuple[str | None, str]:
        """Return param and code of a refused request's error."""
        error = self.refuse(path, body, status)
        return error["param"], error["code"]

    def wait(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until a condition holds, or fail."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.005)


def parse_events(text: str) -> list[Any]:
    events: list[Any] = []
    for block in text.split("\n\n")[:-1]:
        assert "\n" not in block, f"an event is one line: {block!r}"
        if block.startswith(":"):
            events.append(block)
        else:
            data = block.removeprefix("data: ")
            assert data != block
            events.append(data if data == "[DONE]" else json.loads(data))
    assert text.endswith("\n\n")
    return events


@contextmanager
def live_server(
    engine: ScriptedEngine | None = None,
    *,
    template: str | None = TEMPLATE,
    tool_template: str | None = None,
    connections: ConnectionSettings | None = None,
    backend: tokenizers.Tokenizer | None = None,
    tokens: Sequence[str] = (),
    model: Mapping[str, object] | None = None,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """Serve until the block ends. `settings` are fields of ServerSettings.

    backend: tokenizer instead of the toy one. tokens: special tokens added to the toy one. model: fields of `model_info`.
    """
    if tokens:
        backend = taught(tuple(tokens))
        model = {"vocab_size": backend.get_vocab_size(), **(model or {})}
    engine = engine or ScriptedEngine(info=model_info(**(model or {})))
    named = {"default": template, "tool_use": tool_template}
    templates = {name: text for name, text in named.items() if text is not None}
    tokenizer = Tokenizer(backend or byte_level(), SPECIAL_TOKENS, templates)
    made = ServerSettings(served_model_name=MODEL, **settings)
    app = create_app(engine, tokenizer, made)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(
        app,
        listener,
        connections or ConnectionSettings(),
        max_header_bytes=256 * 1024,
        max_body_bytes=made.max_body_bytes,
        tls=tls,
    )
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end, "the server did not start"
        time.sleep(0.005)
    port = listener.getsockname()[1]
    url = f"http{'' if tls is None else 's'}://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=30, verify=tls is None, event_hooks={"response": [check]}) as http:
            yield Live(url, engine, app.state.windlass, tokenizer, loops[0], http, server.registry, engine.info, app)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def server_fixture(**options: Any) -> Any:
    """Return a module's fixture `shared`, a server with these options of `live_server`. The fixture `live` resets it."""

    @pytest.fixture(scope="module")
    def shared() -> Iterator[Live]:
        with live_server(**options) as live:
            yield live

    return shared
