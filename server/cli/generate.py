"""`windlass generate`: stream the continuation of one prompt to the terminal.

The text comes from a running server (`--url`) or from an engine process that ends with the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.clients import APIConnectionError, APIError, APIStatusError, Client, RetryPolicy, Stream
from windlass.clients.terminal import LoadingDisplay, print_status
from windlass.engine.errors import EngineError, LoadError, RequestError, with_place
from windlass.engine.interface.request import EngineRequest
from windlass.server.cli.parameters import GenerateOptions, with_key_hint
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.server_options import SamplingOptions
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.startup.engines import Engines
from windlass.server.startup.launch import check_model
from windlass.server.startup.model_defaults import find_sampling
from windlass.server.startup.model_files import choose_model, known_sampling, with_draft_model

if TYPE_CHECKING:
    from windlass.server.schemas.completions import CompletionRequest
    from windlass.server.text.tokenizer import Tokenizer


def _fields(request: GenerateOptions) -> dict[str, Any]:
    """The fields of an API request, without those that were not given."""
    names = ("max_tokens", "temperature", "top_p", "seed", "stop")
    return {name: value for name in names if (value := getattr(request, name)) is not None and value != []}


def check_request(request: GenerateOptions) -> CompletionRequest:
    """The request as the HTTP API reads it, without its prompt. Raises LoadError that names the option at fault."""
    from windlass.server.app.request_body import parse_body
    from windlass.server.errors import ApiError
    from windlass.server.schemas.completions import CompletionRequest

    if request.max_tokens < 1:
        raise LoadError(f"--max-tokens must be at least 1, got {request.max_tokens}")
    try:
        return parse_body(json.dumps({"prompt": "", **_fields(request)}).encode(), CompletionRequest)
    except ApiError as error:
        name = (error.param or "").partition("[")[0]
        flag, rest = f"--{name.replace('_', '-')}", error.message.removeprefix(name)
        raise LoadError(f"{flag}: {rest}" if rest == error.message else flag + rest) from None


def generate_locally(
    request: GenerateOptions, model: str | None, options: EngineOptions, sampling: SamplingOptions, log_level: str
) -> None:
    """Load the model, write the continuation, and stop the engine. Raises EngineError."""
    asyncio.run(_generate_locally(request, model, options, sampling, log_level))


async def _generate_locally(
    request: GenerateOptions, model: str | None, options: EngineOptions, sampling: SamplingOptions, log_level: str
) -> None:
    options.to_config(Path())  # report bad options before anything is downloaded
    sampling.check()
    with contextlib.closing(Engines(options, log_level)) as engines:
        await _generate_with(engines, request, model, options, sampling)


async def _generate_with(
    engines: Engines, request: GenerateOptions, model: str | None, options: EngineOptions, given: SamplingOptions
) -> None:
    name, path = choose_model(model)
    options = with_draft_model(options)
    check_model(options, path)
    path = ensure_tokenizer(path)
    recommended = known_sampling(model, name, path)
    found = find_sampling(path, recommended, given.generation_config, given.override_generation_config)
    client = engines.client(options, path)
    loading = LoadingDisplay()
    terminal = sys.stderr.isatty()
    client.progress = loading if terminal else None
    client.spawn()  # the engine loads while the tokenizer is imported and read
    try:
        client.start_nowait()
        from windlass.server.serving.job import build_sampling
        from windlass.server.text.detokenizer import Detokenizer
        from windlass.server.text.tokenizer import Tokenizer

        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, path)
        prompt = await _prompt_ids(request, tokenizer)
        info = await client.wait_ready()
        loading.stop()
        sampling = build_sampling(
            check_request(request),
            info,
            max_tokens=max(1, min(request.max_tokens, info.max_model_len - len(prompt))),
            samples=1,
            logprobs=None,
            prompt_logprobs=None,
            defaults=found.sampling,
        )
        detokenizer = Detokenizer(tokenizer, prompt, stop=tuple(request.stop or ()))
        start, first, tokens, reason = time.monotonic(), 0.0, 0, ""
        engine_request = EngineRequest("generate", prompt, sampling, reports_progress=terminal)
        async with contextlib.aclosing(client.generate(engine_request)) as outputs:
            async for output in outputs:
                if output.prompt_computed is not None:
                    loading("reading the prompt", output.prompt_computed, len(prompt))
                    continue
                loading.stop()
                first = first or time.monotonic()
                tokens += len(output.token_ids)
                hidden = output.stop_token_id is not None
                write(detokenizer.push(output.token_ids, hide_last=hidden, final=output.finish_reason is not None))
                reason = output.finish_reason or reason
                if detokenizer.stopped is not None:
                    reason = "stop"
                    break
        end_line()
        if request.stats:
            rate = (tokens - 1) / (time.monotonic() - first) if tokens > 1 else 0.0
            print_status(
                f"[{len(prompt)} prompt tokens, first token after {first - start:.2f} s, "
                f"{tokens} tokens at {rate:.1f} tokens/s, {reason}]"
            )
    finally:
        loading.stop()
        await client.close()


async def _prompt_ids(request: GenerateOptions, tokenizer: Tokenizer) -> list[int]:
    text = await _render_chat(request.prompt, tokenizer) if request.chat else request.prompt
    ids = tokenizer.encode(text, add_special_tokens=not request.chat)
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise RequestError("the prompt is empty and this model has no BOS token: write a prompt")
    return ids


async def _render_chat(prompt: str, tokenizer: Tokenizer) -> str:
    """The prompt as a chat. The template is code from the model's files: it runs with limits, as on a server."""
    from windlass.server.config.settings import ServerSettings
    from windlass.server.errors import ApiError
    from windlass.server.schemas.chat import ChatMessage
    from windlass.server.text.service import TextService

    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template: leave --chat out")
    service = TextService(tokenizer, ServerSettings(served_model_name="model"))
    try:
        return await service.render(
            [ChatMessage(role="user", content=prompt)],
            add_generation_prompt=True,
            continue_final_message=False,
            variables=None,
            caller="",
        )
    except ApiError as error:
        raise EngineError(f"the chat template rejects this prompt: {error.message}") from error
    finally:
        service.close()


def generate_remote(
    request: GenerateOptions, model: str | None, options: EngineOptions, url: str, api_key: str | None
) -> None:
    """Stream the continuation from the server at `url` (with or without /v1). Raises EngineError."""
    declared = options.profiles()
    if options.is_profile_reference() and options.rope_scaling not in declared:
        scaling: Any = options.rope_scaling  # a profile of that server
    else:
        parsed = options.parse_rope_scaling()
        scaling = parsed.to_dict() if parsed else None
    rest = {"model": model, "rope_scaling": scaling, "rope_update": options.rope_update}
    settings = _fields(request) | {name: value for name, value in rest.items() if value is not None}
    start, reason = time.monotonic(), None
    try:
        with (
            Client(url, api_key=api_key, retry=RetryPolicy(max_retries=0)) as client,
            _open(client, request, settings) as stream,
        ):
            for chunk in stream:
                write(chunk.text)
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
    except APIStatusError as error:
        raise EngineError(f"{url} answered {error.status}: {with_key_hint(error)}") from error
    except APIConnectionError as error:
        raise EngineError(error.message) from error
    except (APIError, ValueError) as error:
        raise EngineError(with_place(url, error)) from error
    finally:
        end_line()
    if request.stats:
        print_status(f"[{time.monotonic() - start:.2f} s, {reason}]")


def _open(client: Client, request: GenerateOptions, settings: dict[str, Any]) -> Stream[Any, Any]:
    if request.chat:
        return client.chat([{"role": "user", "content": request.prompt}], stream=True, **settings)
    return client.completions(request.prompt, stream=True, **settings)


def write(text: str) -> None:
    """Write new text immediately, with replacements for characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def end_line() -> None:
    """End the line on a terminal; a file or a pipe receives only the text."""
    if sys.stdout.isatty():
        write("\n")
