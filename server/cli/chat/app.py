"""Runs a chat: reads a message, streams the answer, says how fast it came. Errors are one line, and the chat goes on."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.clients.terminal.errors import CommandError
from windlass.engine.errors import EngineError
from windlass.server.cli.chat.console import ChatConsole
from windlass.server.cli.chat.dialogue import Dialogue
from windlass.server.options.answer_defaults import SamplingOptions
from windlass.server.options.engine import EngineOptions
from windlass.server.options.spelling import to_arguments
from windlass.server.startup.choice import choose_model

if TYPE_CHECKING:
    from windlass.clients import ChatCompletion, ChatCompletionChunk, Client, Model, Stream
    from windlass.server.cli.chat.commands import ChatCommands
    from windlass.server.cli.chat.own_server import OwnServer


def chat_here(model: str | None, options: EngineOptions, sampling: SamplingOptions, system: str | None) -> int:
    """Chat with a server of its own, which ends with the chat. Returns the exit code; raises EngineError, one line each."""
    from windlass.server.cli.chat.own_server import OwnServer

    options.to_config(Path())  # options at fault are reported before anything is looked up or downloaded
    sampling.check()
    console = ChatConsole()
    name = None
    if model is None or not Path(model).expanduser().exists():  # it may have to be downloaded, with a bar
        with console.leavable():
            name, path = choose_model(model)
        model = model or (name if not Path(name).exists() else str(path))
    with OwnServer(model, name, [*to_arguments(options), *to_arguments(sampling)]) as server:
        from windlass.clients import APIError, RetryPolicy  # imported while the server starts

        with console.leavable():
            server.wait_ready()
        console.greet(*(line.strip() for line in server.lines if line.startswith("  note: ")))
        dialogue = Dialogue(system=system)
        try:
            with server.client(retry=RetryPolicy(max_retries=0)) as client:
                return ChatLoop(console, dialogue, client, None, server).run()
        except APIError as error:
            raise EngineError(f"{server.url}: {_one_line(error)}") from error


def chat_with(url: str, api_key: str | None, model: str | None, system: str | None) -> int:
    """Chat through the server at `url` (with or without /v1). Returns the exit code; raises EngineError, one line each."""
    from windlass.clients import APIError, Client, RetryPolicy
    from windlass.server.cli.key_hint import with_key_hint

    console = ChatConsole()
    try:
        with Client(url, api_key=api_key, retry=RetryPolicy(max_retries=0)) as client:
            return ChatLoop(console, Dialogue(system=system), client, model, None).run()
    except APIError as error:
        raise EngineError(f"{url}: {with_key_hint(error)}") from error
    except ValueError as error:
        raise EngineError(f"{url}: {_one_line(error)}") from error


@dataclass(slots=True)
class _AnswerTiming:
    """Of one answer, on the monotonic clock: asked at, first text at, last text at; pieces of text that came."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    pieces: int = 0

    def tick(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.pieces += 1


class ChatLoop:
    """One chat. server: the one that it has for itself, None where it uses another's."""

    def __init__(
        self, console: ChatConsole, dialogue: Dialogue, client: Client, model: str | None, server: OwnServer | None
    ) -> None:
        from windlass.server.cli.chat.commands import ChatCommands

        self._console = console
        self._dialogue = dialogue
        self._client = client
        self._model = model
        self._server = server
        self._context: int | None = None
        self._commands: ChatCommands = ChatCommands(dialogue, client, model)
        self._failed = False

    def run(self) -> int:
        """Until the person leaves. 0, or 1 where a message from a file or another program got no answer."""
        self._introduce()
        while True:
            try:
                text = self._console.read()
            except EOFError:
                if self._console.interactive:
                    print(file=sys.stderr)
                break
            except KeyboardInterrupt:
                print(file=sys.stderr)
                self._console.note("ctrl-D or /quit leaves")
                continue
            if not text:
                continue
            if text.startswith("/"):
                if not self._command(text):
                    break
            else:
                self._ask(text)
            self._check_server(0.0)
        return int(self._failed and not self._console.interactive)

    def _introduce(self) -> None:
        with self._console.leavable():
            models = self._client.models()
        served: Model | None = next(
            (model for model in models if model.id == self._model), models[0] if models else None
        )
        if served is None:
            return
        self._check_template(served.id)
        self._context = served.max_model_len
        facts = [served.id, served.architecture, f"context of {self._context:,} tokens" if self._context else None]
        self._console.greet(f"{', '.join(fact for fact in facts if fact)}. /help lists what there is, ctrl-D leaves.")
        if served.recommended_sampling:  # which holds for requests that do not say
            shown = " ".join(f"{name}={value:g}" for name, value in served.recommended_sampling.items())
            self._console.greet(f"Drawn with {shown}, as this model's authors recommend; /params sets others.")

    def _check_template(self, model: str) -> None:
        """Raise EngineError, before anything is typed, where no message could be answered."""
        from windlass.clients import APIError

        try:
            with self._console.leavable():
                self._client.count_tokens([{"role": "user", "content": "hello"}], model=model)
        except APIError as error:
            if error.code == "no_chat_template":
                raise EngineError(
                    f"{model} has no chat template: continue texts with `windlass generate`, or give it one with "
                    "`windlass serve --chat-template FILE` and chat through --url"
                ) from None

    def _command(self, line: str) -> bool:
        """Carry it out; False to leave."""
        from windlass.clients import APIError

        try:
            result = self._commands.run(line)
        except (CommandError, APIError) as error:
            self._fail(error)
            return True
        self._console.note(*result.lines)
        if result.ask is not None and not self._ask(result.ask) and result.again is not None:
            self._dialogue.exchanges.append(result.again)  # nothing better came of it
        return not result.leave

    def _ask(self, question: str) -> bool:
        """Stream an answer; False where there is none that could be kept."""
        from windlass.clients import APIError

        stream: Stream[ChatCompletionChunk, ChatCompletion] | None = None
        timing, stopped = _AnswerTiming(time.monotonic()), False
        try:
            with self._console.stoppable():
                stream = self._client.chat(
                    self._dialogue.messages(question), model=self._model, stream=True, **self._dialogue.options()
                )
                with stream:
                    for chunk in stream:
                        if chunk.reasoning or chunk.text:
                            timing.tick()
                        if chunk.reasoning:
                            self._console.think(chunk.reasoning)
                        if chunk.text:
                            if stream.reasoning and stream.text == chunk.text:
                                self._console.think("\n\n")
                            self._console.write(chunk.text)
        except KeyboardInterrupt:
            stopped = True
        except (APIError, ValueError) as error:
            if timing.pieces:
                self._console.write("\n")
            self._fail(error)
            return False
        finally:
            if stream is not None:
                stream.close()
        self._console.write("\n")
        if stream is None or (stopped and not stream.text):
            self._console.note(f"[stopped before the {'answer' if timing.pieces else 'first token'}]")
            return False
        self._dialogue.exchanges.append((question, stream.text))
        self._commands.last = stream.rotary or self._commands.last
        self._tell(stream, timing, stopped)
        return True

    def _tell(self, stream: Stream[ChatCompletionChunk, ChatCompletion], timing: _AnswerTiming, stopped: bool) -> None:
        from windlass.server.cli.chat.commands import show_context, show_rotary, show_scaling

        usage = stream.usage
        tokens = usage.completion_tokens if usage else timing.pieces
        facts = [f"{tokens} tokens" if usage else f"stopped after about {tokens} tokens"]
        if timing.last > timing.first and tokens > 1:
            facts.append(f"{(tokens - 1) / (timing.last - timing.first):.1f} tokens/s")
        if timing.pieces:
            facts.append(f"the first after {timing.first - timing.asked:.2f} s")
        if usage and self._context:
            facts.append(f"{usage.total_tokens:,} of {self._context:,} of the context")
        if self._dialogue.rope is not None:
            facts.append(show_rotary(stream.rotary) if stream.rotary else show_scaling(self._dialogue.rope))
        if stream.rotary and (became := show_context(stream.rotary.context)):
            facts.append(became)
        self._console.note(f"[{', '.join(facts)}]")
        if stopped or stream.finish_reasons.get(0) != "length":
            return
        if usage and self._context and usage.total_tokens >= self._context:
            self._console.note(_FULL)
        else:
            self._console.note("[it ends at max_tokens: /params max_tokens=N allows more]")

    def _check_server(self, seconds: float) -> None:
        """Raise EngineError if the chat's own server ended, or does within so long."""
        if self._server is not None and (failure := self._server.failure(seconds)) is not None:
            raise EngineError(f"the server is gone: {failure}")

    def _fail(self, error: Exception) -> None:
        from windlass.clients import APIConnectionError

        self._failed = True
        if isinstance(error, APIConnectionError):
            self._check_server(_DYING_SECONDS)
        self._console.note("error: " + _one_line(error))
        if getattr(error, "code", None) == "context_length_exceeded":
            self._console.note(_FULL)


_DYING_SECONDS = 2.0  # a process closes its connections a little before it is gone
_FULL = (
    "[the context is full: /new begins anew, /undo takes the last question back, /context drop_turns leaves the oldest turns "
    "out, /context shift lets answers go on]"
)


def _one_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", None) or error).split())
