"""`windlass chat`: a chat in the terminal, with the commands that begin with a slash."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windlass.clients import APIStatusError, Client, NotFoundError
from windlass.clients.options import CallOptions, ChatOptions
from windlass.clients.terminal import CommandError, LoadingDisplay, print_status, stderr_is_terminal
from windlass.clients.types import ContextUse, Rotary
from windlass.engine.errors import EngineError, RequestError, did_you_mean, with_place
from windlass.engine.rotary.scaling_text import names_kind, parse_scaling, read_value, split_words
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.server_options import SamplingOptions

if TYPE_CHECKING:
    from windlass.clients import ChatCompletion, ChatCompletionChunk, Model, Stream
    from windlass.server.cli.managed_server import ManagedServer


MAX_ANSWER_TOKENS = 4096  # for models that never end an answer
_LONG_WAIT_SECONDS = 1.0
_LONG_PROMPT_TOKENS = 1024  # that are not cached: the prompt's progress is shown


@dataclass(slots=True)
class Dialogue:
    """A conversation and the fields of its next requests.

    exchanges: questions with their answers, in order. system: the system message, None for none. params: fields of the next
    requests. rope: their rotary scaling, an object or a profile's name; None: the server's own.
    """

    system: str | None = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | str | None = None

    def messages(self, question: str) -> list[dict[str, str]]:
        """The messages of a request for an answer to `question`, with the conversation before it."""
        messages_so_far = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in self.exchanges:
            messages_so_far += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages_so_far, {"role": "user", "content": question}]

    def options(self) -> dict[str, Any]:
        """The other fields of a request."""
        limited = not {"max_tokens", "max_completion_tokens"}.isdisjoint(self.params)
        fields = self.params if limited else {"max_tokens": MAX_ANSWER_TOKENS, **self.params}
        return fields if self.rope is None else {**fields, "rope_scaling": self.rope}


_BLOCK = '"""'

# Control characters, which could move the cursor, change colours or send input to the terminal; newlines and tabs are text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ChatConsole:
    """Input and output of a chat. Create it in the main thread. interactive: whether the input is a terminal."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._screen = sys.stdout.isatty()
        self._interrupt: Literal["raise", "once", "ignore"] = "ignore"
        for stream in (sys.stdin, sys.stdout):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # arrow keys and history

                # Pasted lines are then one message, which the next Enter ends.
                readline.parse_and_bind("set enable-bracketed-paste on")
        signal.signal(signal.SIGINT, self._on_interrupt)

    def read(self) -> str:
        """The next message, stripped; may be empty. Raises EOFError at the end of the input, KeyboardInterrupt on ctrl-C."""
        line = self._line("> ")
        if not line.lstrip().startswith(_BLOCK):
            return line.strip()
        text = line.lstrip().removeprefix(_BLOCK)
        while not text.rstrip().endswith(_BLOCK):
            try:
                text += "\n" + self._line("... ")
            except EOFError:
                if self.interactive:
                    raise  # ctrl-D ends the chat
                return text.strip()  # the end of a file ends its last message too
        return text.rstrip().removesuffix(_BLOCK).strip()

    def _line(self, prompt: str) -> str:
        if not self.interactive:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.removesuffix("\n")
        if not self._screen:  # `input` would write the prompt between the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        with self._on_ctrl_c("raise"):
            return input(prompt)

    def write(self, text: str) -> None:
        """Write a piece of an answer immediately, on a terminal without control characters, which a model may generate."""
        sys.stdout.write(_CONTROLS.sub("", text) if self._screen else text)
        sys.stdout.flush()

    def write_reasoning(self, text: str) -> None:
        """Write a piece of the reasoning immediately, to standard error, since it is not part of the answer."""
        text = _CONTROLS.sub("", text)
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text)
        sys.stderr.flush()

    def note(self, *lines: str) -> None:
        """Write lines that are not part of an answer, to standard error."""
        for line in lines:
            line = _CONTROLS.sub("", line)
            print_status(f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line)

    def note_if_interactive(self, *lines: str) -> None:
        """Write lines if the input is a terminal."""
        if self.interactive:
            self.note(*lines)

    @contextlib.contextmanager
    def interrupt_exits(self) -> Iterator[None]:
        """Context without an answer to stop: ctrl-C raises KeyboardInterrupt."""
        with self._on_ctrl_c("raise"):
            yield

    @contextlib.contextmanager
    def interrupt_stops_answer(self) -> Iterator[None]:
        """Context of a running answer: the first ctrl-C raises KeyboardInterrupt, further ones are ignored."""
        with self._on_ctrl_c("once"):
            yield

    @contextlib.contextmanager
    def _on_ctrl_c(self, what: Literal["raise", "once"]) -> Iterator[None]:
        self._interrupt = what
        try:
            yield
        finally:
            self._interrupt = "ignore"  # between two contexts it is unclear what ctrl-C should stop

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._interrupt == "ignore":
            return
        if self._interrupt == "once":
            self._interrupt = "ignore"
        raise KeyboardInterrupt


HELP = """\
/rope yarn 4       rotary scaling of the next answers: a kind and its factor, fields as name=value, a JSON object,
                   or a profile of the server; auto: the smallest that each answer's length needs; default: unscaled; off:
                   the server's own; without a value: show it
/context shift     handling of a chat that exceeds the context: stop, error, shift (drop the oldest tokens), drop_turns;
                   with keep=, window=, sinks=, reuse= (shortest passage in tokens), recompute=; off: the server's own
/system TEXT       set the system message; off: remove it; without a value: show it
/params NAME=VALUE fields of the next requests, such as temperature=0.7 max_tokens=200 seed=1; NAME= removes one
/new               start a new conversation
/undo              remove the last question and its answer
/retry             answer the last question again
/quit              end the chat, as ctrl-D does
ctrl-C             stop an answer; the part received so far is stored
\"\"\"                begins and ends a message of several lines"""

# Fields that the chat sets itself, or with which an answer would not be one text.
_RESERVED_FIELDS = {"n", "best_of", "logprobs", "top_logprobs", "stream_options", "rope_scaling"}

_RESERVED_FIELDS |= {*CallOptions.__annotations__, "deadline"}

_RESERVED_FIELDS |= {"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"}

_OVERFLOWS = ("stop", "error", "shift", "drop_turns")

# Short names of fields in /context.
_CONTEXT_FIELDS = {
    "keep": "keep_tokens",
    "window": "attention_window",
    "sinks": "attention_sinks",
    "reuse": "cache_reuse",
    "recompute": "cache_reuse_recompute",
}

_CHAT_FIELDS = sorted(set(ChatOptions.__annotations__) - _RESERVED_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command. lines: to show. question: to answer now instead of `retried`, which was removed from the dialogue."""

    lines: tuple[str, ...] = ()
    question: str | None = None
    retried: tuple[str, str] | None = None
    exits: bool = False


class ChatCommands:
    """Commands that change a dialogue. last: rotary scaling of the last answer, as reported by the server."""

    def __init__(self, dialogue: Dialogue, client: Client, model: str | None) -> None:
        self._dialogue = dialogue
        self._client = client
        self._model = model
        self.last: Rotary | None = None
        self._handlers: dict[str, Callable[[str], CommandResult]] = {
            "help": lambda rest: _lines_result(*HELP.splitlines()),
            "rope": self._rope,
            "context": self._context,
            "system": self._system,
            "params": self._params,
            "new": self._new,
            "undo": self._undo,
            "retry": self._retry,
            "quit": lambda rest: CommandResult(exits=True),
            "exit": lambda rest: CommandResult(exits=True),
        }

    def run(self, line: str) -> CommandResult:
        """Execute a line that begins with a slash. Raises CommandError, one line, and APIError of the client."""
        name, _, rest = line[1:].partition(" ")
        command = self._handlers.get(name.lower())
        if command is None:
            raise CommandError(
                f"there is no /{name}{did_you_mean(name.lower(), self._handlers)}: /help lists the commands"
            )
        return command(rest.strip())

    def _rope(self, rest: str) -> CommandResult:
        if rest == "off":
            self._dialogue.rope = None
            return _lines_result("next answers: under the server's own scaling")
        if rest:
            wanted = _parse_rope(rest)
            self._check(wanted)
            self._dialogue.rope = wanted
        asked, the_servers = self._dialogue.rope, "under the server's own scaling"
        lines = [f"next answers: {the_servers if asked is None else show_scaling(asked)}"]
        if not rest and self.last is not None:
            lines.append(f"last answer: {show_rotary(self.last)}, policy {self.last.policy}")
        return _lines_result(*lines)

    def _check(self, wanted: dict[str, Any] | str) -> None:
        """Have the server check a scaling in advance. Errors of servers without this endpoint are ignored."""
        try:
            self._client.inspect(wanted, model=self._model)
        except NotFoundError:
            if isinstance(wanted, str):
                raise CommandError(
                    f"{wanted!r} is not a kind of scaling, and this server lists no profiles: {_KINDS}"
                ) from None
        except APIStatusError as error:
            if isinstance(wanted, str):
                raise CommandError(
                    f"{wanted!r} is neither a kind of scaling ({_KINDS}) nor a profile here{did_you_mean(wanted, _SCALING_WORDS)}"
                ) from error
            raise

    def _context(self, rest: str) -> CommandResult:
        params, fields = dict(self._dialogue.params), ("context_overflow", *_CONTEXT_FIELDS.values())
        for word in rest.split():
            name, equals, value = word.partition("=")
            if word == "off":
                params = {field: value for field, value in params.items() if field not in fields}
            elif not equals and name in _OVERFLOWS:
                params["context_overflow"] = name
            elif not equals or name not in _CONTEXT_FIELDS:
                wanted = [*_OVERFLOWS, *(f"{known}=NUMBER" for known in _CONTEXT_FIELDS), "off"]
                raise CommandError(f"{word!r} is not a context setting: write {', '.join(wanted)}")
            elif value:
                params[_CONTEXT_FIELDS[name]] = read_value(value)
            else:
                params.pop(_CONTEXT_FIELDS[name], None)
        self._dialogue.params = _validate_params(params)
        shown = " ".join(f"{name}={_brief(params[name])}" for name in fields if name in params)
        lines = ["next answers: " + (shown or "the server's default")]
        if not rest and self.last is not None:
            lines.append(f"last answer: {show_context(self.last.context) or 'the entire chat'}")
        return _lines_result(*lines)

    def _system(self, rest: str) -> CommandResult:
        if rest:
            self._dialogue.system = None if rest == "off" else rest
        return _lines_result(f"system message: {self._dialogue.system or 'none'}")

    def _params(self, rest: str) -> CommandResult:
        given: dict[str, Any] = {}
        for word in split_words(rest):
            name, equals, value = word.partition("=")
            if not equals:
                raise CommandError(f"write name=value, such as temperature=0.7, not {word!r}")
            if name not in _CHAT_FIELDS:
                others = did_you_mean(name, _CHAT_FIELDS) or f": those are {', '.join(_CHAT_FIELDS)}"
                raise CommandError(f"{name!r} is not a field that a chat can set{others}")
            given[name] = read_value(value) if value else None
        merged = {**self._dialogue.params, **given}
        self._dialogue.params = _validate_params({name: value for name, value in merged.items() if value is not None})
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in self._dialogue.params.items())
        return _lines_result("next requests: " + (shown or "the server's defaults"))

    def _new(self, rest: str) -> CommandResult:
        self._dialogue.exchanges.clear()
        return _lines_result("cleared: the next message begins a new conversation")

    def _undo(self, rest: str) -> CommandResult:
        question, _ = self._last_exchange("remove")
        return _lines_result(f"removed: {_short(question)}")

    def _retry(self, rest: str) -> CommandResult:
        retried = self._last_exchange("answer again")
        return CommandResult(question=retried[0], retried=retried)

    def _last_exchange(self, what: str) -> tuple[str, str]:
        if not self._dialogue.exchanges:
            raise CommandError(f"there is no question yet to {what}")
        return self._dialogue.exchanges.pop()


def show_scaling(scaling: dict[str, Any] | str) -> str:
    """A short description of a scaling: "yarn, factor 4"; a scaling per layer group as JSON."""
    if scaling == "auto":
        return "auto, the smallest scaling that each answer's length needs"
    if isinstance(scaling, str):
        return f"the server's profile {scaling}"
    kind = scaling.get("rope_type")
    if kind is None:
        return json.dumps(scaling)
    return ", ".join([str(kind), *(f"{n} {_brief(v)}" for n, v in scaling.items() if n != "rope_type")])


def show_context(use: ContextUse | None) -> str:
    """A short description of how the context of an answer was changed; "" if it was not."""
    if use is None:
        return ""
    counts = [
        (use.dropped_turns, "turn", "{} dropped"),
        (use.dropped_tokens, "token", "{} dropped"),
        (use.reused_tokens, "token", "{} taken from passages"),
        (use.attention_window, "token", "a window of {}"),
    ]
    return ", ".join(text.format(_counted(number, noun)) for number, noun, text in counts if number)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_rotary(rotary: Rotary) -> str:
    """The rotary scaling of an answer, without the theta, which every kind has."""
    fields = {name: value for name, value in rotary.parameters.items() if name != "rope_theta"}
    shown = show_scaling({"rope_type": rotary.rope_type, **fields})
    if rotary.auto is None or rotary.auto.length is None:
        return shown
    return f"{shown}, chosen for {rotary.auto.length:,} tokens"


_KINDS = "default, linear, ntk, dynamic, yarn, llama3, longrope, proportional, dual_chunk, self_extend, rerope, log_n"
_SCALING_WORDS = (*_KINDS.split(", "), "auto", "off")


def _parse_rope(text: str) -> dict[str, Any] | str:
    """The scaling of `yarn 4 beta_fast=16`, a JSON object, or a profile's name, which the server checks."""
    if not names_kind(text) and len(text.split()) == 1:
        return text
    try:
        return parse_scaling(text).to_dict()
    except RequestError as error:
        raise CommandError(str(error)) from None


def _validate_params(params: dict[str, Any]) -> dict[str, Any]:
    """The fields, if a request may have them. Raises CommandError that names the field at fault."""
    from windlass.server.app.request_body import parse_body
    from windlass.server.errors import ApiError
    from windlass.server.schemas.chat import ChatRequest

    try:
        parse_body(json.dumps({**params, "messages": [{"role": "user", "content": ""}]}).encode(), ChatRequest)
    except ApiError as error:
        raise CommandError(error.message) from None
    return params


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _lines_result(*lines: str) -> CommandResult:
    return CommandResult(lines=lines)


def chat_locally(model: str | None, options: EngineOptions, sampling: SamplingOptions, system: str | None) -> int:
    """Chat with a managed server. Returns the exit code. Raises EngineError."""
    from windlass.server.cli.managed_server import managed_server

    options.to_config(Path())  # report bad options before anything is downloaded
    sampling.check()
    console = ChatConsole()
    with console.interrupt_exits():  # a download shows a progress bar
        managed = managed_server(model, options, sampling)
    with managed as server:
        from windlass.clients import APIError, RetryPolicy  # imported while the server starts

        with console.interrupt_exits():
            server.wait_ready()
        console.note_if_interactive(*(line.strip() for line in server.lines if line.startswith("  note: ")))
        dialogue = Dialogue(system=system)
        try:
            with server.client(retry=RetryPolicy(max_retries=0)) as client:
                return ChatLoop(console, dialogue, client, None, server).run()
        except APIError as error:
            raise EngineError(with_place(server.url, _one_line(error))) from error


def chat_remote(url: str, api_key: str | None, model: str | None, system: str | None) -> int:
    """Chat through the server at `url` (with or without /v1). Returns the exit code; raises EngineError, one line each."""
    from windlass.clients import APIError, Client, RetryPolicy
    from windlass.server.cli.parameters import with_key_hint

    console = ChatConsole()
    try:
        with Client(url, api_key=api_key, retry=RetryPolicy(max_retries=0)) as client:
            return ChatLoop(console, Dialogue(system=system), client, model, None).run()
    except APIError as error:
        raise EngineError(with_place(url, with_key_hint(error))) from error
    except ValueError as error:
        raise EngineError(with_place(url, _one_line(error))) from error


@dataclass(slots=True)
class _AnswerTiming:
    """Times of one answer on the monotonic clock: of the question, the first and the last text. pieces: of text."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    pieces: int = 0

    def tick(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.pieces += 1

    def describe(self, counted: str, tokens: int) -> str:
        """The time of an answer and its speed: "12 tokens in 0.3 s (40 tokens/s)". counted: the number of tokens in words.

        If the first token took long, the speed is that after it.
        """
        if not self.pieces:
            return counted
        total, waited = self.last - self.asked, self.first - self.asked
        if waited >= _LONG_WAIT_SECONDS and tokens > 1 and self.last > self.first:
            speed = (tokens - 1) / (self.last - self.first)
            return f"{counted} in {total:.1f} s (the first after {waited:.1f} s, then {speed:,.0f} tokens/s)"
        return f"{counted} in {total:.1f} s ({tokens / max(total, 1e-3):,.0f} tokens/s)"


class ChatLoop:
    """One chat. server: started for this chat; None if it uses a running one."""

    def __init__(
        self, console: ChatConsole, dialogue: Dialogue, client: Client, model: str | None, server: ManagedServer | None
    ) -> None:
        self._console = console
        self._dialogue = dialogue
        self._client = client
        self._model = model
        self._server = server
        self._context: int | None = None
        self._shows_progress = False  # of long prompts
        self._commands: ChatCommands = ChatCommands(dialogue, client, model)
        self._failed = False

    def run(self) -> int:
        """Chat until the user ends it. Returns 1 if a message that was not typed on a terminal got no answer, else 0."""
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
                self._console.note("ctrl-D or /quit ends the chat")
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
        from windlass.server.startup.display import count

        with self._console.interrupt_exits():
            models = self._client.models()
        served: Model | None = next(
            (model for model in models if model.id == self._model), models[0] if models else None
        )
        if served is None:
            return
        self._check_model(self._model or served.id)
        self._context = served.max_model_len
        self._shows_progress = served.context is not None and stderr_is_terminal()  # other servers have no such field
        facts = [f"context of {self._context:,} tokens"] if self._context else []
        if served.num_parameters:
            facts.insert(0, f"{count(served.num_parameters)} parameters")
        described = f"{served.id} ({', '.join(facts)})" if facts else served.id
        self._console.note_if_interactive(f"{described}. /help lists commands.")
        if served.recommended_sampling:  # of requests that set none
            shown = ", ".join(f"{name} {value:g}" for name, value in served.recommended_sampling.items())
            self._console.note_if_interactive(
                f"Sampling as the model's authors recommend: {shown}. /params changes it."
            )

    def _check_model(self, model: str) -> None:
        """Raise EngineError before the first message if the server has no such model, or the model no chat template."""
        from windlass.clients import APIError

        try:
            with self._console.interrupt_exits():
                self._client.count_tokens([{"role": "user", "content": "hello"}], model=model)
        except APIError as error:
            if error.code == "model_not_found":
                raise
            if error.code == "no_chat_template":
                raise EngineError(
                    f"{model} has no chat template: continue texts with `windlass generate`, or give it one with "
                    "`windlass serve --chat-template FILE` and chat through --url"
                ) from None

    def _command(self, line: str) -> bool:
        """Execute a command. Returns False to end the chat."""
        from windlass.clients import APIError

        try:
            result = self._commands.run(line)
        except (CommandError, APIError) as error:
            self._report_error(error)
            return True
        self._console.note(*result.lines)
        if result.question is not None and not self._ask(result.question) and result.retried is not None:
            self._dialogue.exchanges.append(result.retried)  # the new attempt failed
        return not result.exits

    def _ask(self, question: str) -> bool:
        """Stream an answer. Returns False if there is none to store."""
        from windlass.clients import APIError

        stream: Stream[ChatCompletionChunk, ChatCompletion] | None = None
        timing, stopped = _AnswerTiming(time.monotonic()), False
        reading, options = LoadingDisplay(), self._dialogue.options()
        if self._shows_progress:
            options = {"return_progress": True, **options}
        try:
            with self._console.interrupt_stops_answer():
                stream = self._client.chat(self._dialogue.messages(question), model=self._model, stream=True, **options)
                with stream:
                    for chunk in stream:
                        progress = chunk.prompt_progress
                        if progress is None:
                            reading.stop()
                        elif progress.total - progress.cache >= _LONG_PROMPT_TOKENS:
                            reading("reading the prompt", progress.processed, progress.total)
                        if chunk.reasoning or chunk.text:
                            timing.tick()
                        if chunk.reasoning:
                            self._console.write_reasoning(chunk.reasoning)
                        if chunk.text:
                            if stream.reasoning and stream.text == chunk.text:
                                self._console.write_reasoning("\n\n")
                            self._console.write(chunk.text)
        except KeyboardInterrupt:
            stopped = True
        except (APIError, ValueError) as error:
            reading.stop()
            if timing.pieces:
                self._console.write("\n")
            self._report_error(error)
            return False
        finally:
            reading.stop()
            if stream is not None:
                stream.close()
        self._console.write("\n")
        if stream is None or (stopped and not stream.text):
            self._console.note(f"stopped before the {'answer' if timing.pieces else 'first token'}")
            return False
        self._dialogue.exchanges.append((question, stream.text))
        self._commands.last = stream.rotary or self._commands.last
        self._show_statistics(stream, timing, stopped)
        return True

    def _show_statistics(
        self, stream: Stream[ChatCompletionChunk, ChatCompletion], timing: _AnswerTiming, stopped: bool
    ) -> None:
        usage = stream.usage
        tokens = usage.completion_tokens if usage else timing.pieces
        counted = _counted(tokens, "token")
        facts = [timing.describe(counted if usage else f"stopped after about {counted}", tokens)]
        if usage and self._context:
            change = stream.rotary.context if stream.rotary else None
            used = usage.total_tokens - (change.dropped_tokens or 0 if change else 0)
            facts.append(f"{min(used, self._context):,} of {self._context:,} tokens of context used")
        if self._dialogue.rope is not None:
            facts.append(
                f"scaling {show_rotary(stream.rotary) if stream.rotary else show_scaling(self._dialogue.rope)}"
            )
        if stream.rotary and (context := show_context(stream.rotary.context)):
            facts.append(context)
        self._console.note(", ".join(facts))
        if stopped or stream.finish_reasons.get(0) != "length":
            return
        if usage and self._context and usage.total_tokens >= self._context:
            self._console.note(_CONTEXT_FULL_HINT)
        else:
            self._console.note("the answer reached max_tokens: /params max_tokens=N sets another limit")

    def _check_server(self, seconds: float) -> None:
        """Raise EngineError if the server of this chat has ended, or ends within this time."""
        if self._server is not None and (failure := self._server.failure(seconds)) is not None:
            raise EngineError(f"the server ended: {failure}")

    def _report_error(self, error: Exception) -> None:
        from windlass.clients import APIConnectionError

        self._failed = True
        if isinstance(error, APIConnectionError):
            self._check_server(_EXIT_SECONDS)
        self._console.note("error: " + _one_line(error))
        if getattr(error, "code", None) == "context_length_exceeded":
            self._console.note(_CONTEXT_FULL_HINT)


_EXIT_SECONDS = 2.0  # a process closes its connections shortly before it ends

_CONTEXT_FULL_HINT = (
    "the context is full: /new starts a new chat, /undo removes the last question, /context drop_turns drops the oldest turns, "
    "/context shift lets answers continue"
)


def _one_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", None) or error).split())
