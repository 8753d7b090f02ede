"""`windlass generate`: one prompt, its continuation written to the terminal as it comes.

Either through a running server (`--url`) or with an engine process of its own that ends with the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from windlass.engine.errors import EngineError, LoadError, RequestError
from windlass.engine.request import EngineRequest, SamplingParams
from windlass.server.display import LoadingDisplay, say
from windlass.server.hub import resolve_model
from windlass.server.launch import make_client
from windlass.server.options import EngineOptions

if TYPE_CHECKING:
    from windlass.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate. chat: the prompt is a user's message, rendered by the model's chat template."""

    prompt: str
    chat: bool = False
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stats: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise LoadError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 2:
            raise LoadError(f"--temperature must lie between 0 and 2, got {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise LoadError(f"--top-p must be more than 0 and at most 1, got {self.top_p:g}")


def generate_here(wanted: Generation, model: str | None, options: EngineOptions, log_level: str) -> None:
    """Load the model, write the continuation, end. Raises EngineError subclasses, one line each."""
    asyncio.run(_generate_here(wanted, model, options, log_level))


async def _generate_here(wanted: Generation, model: str | None, options: EngineOptions, log_level: str) -> None:
    options.to_config(Path())  # options at fault are reported before anything is looked up or downloaded
    path = resolve_model(model)
    client = make_client(options, path, log_level)
    loading = LoadingDisplay()
    client.progress = loading if sys.stderr.isatty() else None
    client.spawn()  # it loads while the tokenizer is imported and read
    try:
        client.start_nowait()
        from windlass.server.detokenizer import Detokenizer
        from windlass.server.tokenizer import Tokenizer

        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, path)
        prompt = _prompt_ids(wanted, tokenizer)
        info = await client.wait_ready()
        loading.stop()
        sampling = SamplingParams(
            max_tokens=max(1, min(wanted.max_tokens, info.max_model_len - len(prompt))),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
        )
        detokenizer = Detokenizer(tokenizer, prompt, stop=wanted.stop)
        start, first, tokens, reason = time.monotonic(), 0.0, 0, ""
        async with contextlib.aclosing(client.generate(EngineRequest("generate", prompt, sampling))) as outputs:
            async for output in outputs:
                first = first or time.monotonic()
                tokens += len(output.token_ids)
                hidden = output.stop_token_id is not None
                write(detokenizer.push(output.token_ids, hide_last=hidden, final=output.finish_reason is not None))
                reason = output.finish_reason or reason
                if detokenizer.stopped is not None:
                    reason = "stop"
                    break
        finish()
        if wanted.stats:
            rate = (tokens - 1) / (time.monotonic() - first) if tokens > 1 else 0.0
            say(
                f"[{len(prompt)} prompt tokens, first token after {first - start:.2f} s, "
                f"{tokens} tokens at {rate:.1f} tokens/s, {reason}]"
            )
    finally:
        loading.stop()
        await client.close()


def _prompt_ids(wanted: Generation, tokenizer: Tokenizer) -> list[int]:
    if not wanted.chat:
        ids = tokenizer.encode(wanted.prompt)
    else:
        from windlass.server.chat_template import ChatTemplate, ChatTemplateError

        if tokenizer.chat_template is None:
            raise RequestError("this model has no chat template: leave --chat out")
        try:
            template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
            text = template.render([{"role": "user", "content": wanted.prompt}], add_generation_prompt=True)
        except ChatTemplateError as error:
            raise EngineError(f"the chat template refuses this prompt: {error}") from error
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise RequestError("the prompt is empty and this model has no token to begin with: write a prompt")
    return ids


def generate_remote(
    wanted: Generation, model: str | None, options: EngineOptions, url: str, api_key: str | None
) -> None:
    """Ask the server at `url` (with or without /v1), write its stream. Raises EngineError, one line."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "seed": wanted.seed,
        "stop": list(wanted.stop) or None,
        "rope_scaling": scaling.to_dict() if (scaling := options.parse_rope_scaling()) else None,
        "stream": True,
    }
    body = {name: value for name, value in body.items() if value is not None}
    if wanted.chat:
        path, body["messages"] = "/chat/completions", [{"role": "user", "content": wanted.prompt}]
    else:
        path, body["prompt"] = "/completions", wanted.prompt
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    start = time.monotonic()
    try:
        # No limit on reading: a long prompt takes its time, and ctrl-C ends the request.
        timeout = httpx.Timeout(10.0, read=None)
        with httpx.stream("POST", base + path, json=body, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise EngineError(f"{url} answered {response.status_code}: {_error_message(response.text)}")
            reason = _write_events(response.iter_lines(), url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"cannot reach {url} ({error}): is the server running?") from error
    finish()
    if wanted.stats:
        say(f"[{time.monotonic() - start:.2f} s, {reason}]")


def _write_events(lines: Iterable[str], url: str) -> str:
    """Write the text of a completion or chat stream; returns its finish reason."""
    reason = None
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            finish()
            raise EngineError(f"{url} ended the stream: {_error_message(line.removeprefix('data: '))}")
        for choice in event.get("choices", ()):
            write(choice.get("text") or choice.get("delta", {}).get("content") or "")
            reason = choice.get("finish_reason") or reason
    if reason is None:
        finish()
        raise EngineError(f"{url} closed the stream before the answer was complete: try again")
    return str(reason)


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def write(text: str) -> None:
    """Show new text at once, whatever the terminal's encoding can hold."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def finish() -> None:
    """End the line on a terminal; a file or a pipe gets the text alone."""
    if sys.stdout.isatty():
        write("\n")
