"""What the lines of a chat that begin with a slash do: they change the dialogue and say so. Ask no model anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windlass.clients import APIStatusError, Client, NotFoundError, RopeScaling
from windlass.clients.options import ChatOptions
from windlass.clients.rotary_types import ContextUse, Rotary
from windlass.clients.terminal.errors import CommandError
from windlass.engine.errors import did_you_mean
from windlass.server.cli.chat.dialogue import Dialogue

HELP = """\
/rope yarn 4       rotary scaling of the next answers: a kind and its factor, fields as name=value, a JSON object,
                   or a profile of the server; auto: the least that each answer's length needs; default: unscaled; off: the
                   server's own; alone: show it
/context shift     what is done where the chat outgrows the context: stop, error, shift (the oldest tokens go), drop_turns;
                   with keep=, window=, sinks=, reuse= (least tokens of a passage), recompute=; off: the server's own
/system TEXT       what the model is told before the chat; off: nothing; alone: show it
/params NAME=VALUE fields of the next requests, such as temperature=0.7 max_tokens=200 seed=1; NAME= takes one back
/new               forget what was said
/undo              take back the last question and its answer
/retry             answer the last question again
/quit              leave, as ctrl-D does
ctrl-C             stop an answer; what is there of it stays
\"\"\"                begins and ends a message of several lines"""

# What a chat decides itself, or where an answer would not be one text.
_OURS = {"n", "best_of", "logprobs", "top_logprobs", "stream_options", "rope_scaling"}
_OURS |= {"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"}
_OVERFLOWS = ("stop", "error", "shift", "drop_turns")
# Their short names in /context.
_CONTEXT_FIELDS = {
    "keep": "keep_tokens",
    "window": "attention_window",
    "sinks": "attention_sinks",
    "reuse": "cache_reuse",
    "recompute": "cache_reuse_recompute",
}
_FIELDS = sorted(set(ChatOptions.__annotations__) - _OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """lines: to show. ask: a question to answer now, in place of the exchange `again`, which it took from the dialogue."""

    lines: tuple[str, ...] = ()
    ask: str | None = None
    again: tuple[str, str] | None = None
    leave: bool = False


class ChatCommands:
    """The commands, on one dialogue. last: the scaling that the last answer ran under, as the server reported it."""

    def __init__(self, dialogue: Dialogue, client: Client, model: str | None) -> None:
        self._dialogue = dialogue
        self._client = client
        self._model = model
        self.last: Rotary | None = None
        self._known: dict[str, Callable[[str], CommandResult]] = {
            "help": lambda rest: _said(*HELP.splitlines()),
            "rope": self._rope,
            "context": self._context,
            "system": self._system,
            "params": self._params,
            "new": self._new,
            "undo": self._undo,
            "retry": self._retry,
            "quit": lambda rest: CommandResult(leave=True),
            "exit": lambda rest: CommandResult(leave=True),
        }

    def run(self, line: str) -> CommandResult:
        """Carry out one line, which begins with a slash. Raises CommandError, one line, and APIError of the client."""
        name, _, rest = line[1:].partition(" ")
        command = self._known.get(name.lower())
        if command is None:
            raise CommandError(
                f"there is no /{name}{did_you_mean(name.lower(), self._known)}: /help lists what there is"
            )
        return command(rest.strip())

    def _rope(self, rest: str) -> CommandResult:
        if rest == "off":
            self._dialogue.rope = None
            return _said("next answers: under the server's own scaling")
        if rest:
            wanted = _parse_rope(rest)
            self._check(wanted)
            self._dialogue.rope = wanted
        asked = self._dialogue.rope
        lines = [f"next answers: {'under the server’s own scaling' if asked is None else show_scaling(asked)}"]
        if not rest and self.last is not None:
            lines.append(f"last answer: {show_rotary(self.last)}, policy {self.last.policy}")
        return _said(*lines)

    def _check(self, wanted: dict[str, Any] | str) -> None:
        """Have the server look at a scaling before an answer needs it. Another kind of server is asked nothing."""
        try:
            self._client.inspect(wanted, model=self._model)
        except NotFoundError:
            if isinstance(wanted, str):
                raise CommandError(
                    f"{wanted!r} is no kind of scaling, and this server tells of no profiles: {_KINDS}"
                ) from None
        except APIStatusError as error:
            if isinstance(wanted, str):
                raise CommandError(
                    f"{wanted!r} is neither a kind of scaling ({_KINDS}) nor a profile here{did_you_mean(wanted, _WORDS)}"
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
                raise CommandError(f"{word!r} says nothing of a context: write {', '.join(wanted)}")
            elif value:
                params[_CONTEXT_FIELDS[name]] = _value(value)
            else:
                params.pop(_CONTEXT_FIELDS[name], None)
        self._dialogue.params = _checked(params)
        shown = " ".join(f"{name}={_brief(params[name])}" for name in fields if name in params)
        lines = [f"next answers: {shown or 'as the server has it'}"]
        if not rest and self.last is not None:
            lines.append(f"last answer: {show_context(self.last.context) or 'all of the chat, computed as it stands'}")
        return _said(*lines)

    def _system(self, rest: str) -> CommandResult:
        if rest:
            self._dialogue.system = None if rest == "off" else rest
        return _said(f"the model is told: {self._dialogue.system or 'nothing of ours'}")

    def _params(self, rest: str) -> CommandResult:
        given: dict[str, Any] = {}
        for word in _split(rest):
            name, equals, value = word.partition("=")
            if not equals:
                raise CommandError(f"write name=value, such as temperature=0.7, not {word!r}")
            if name not in _FIELDS:
                others = did_you_mean(name, _FIELDS) or f": those are {', '.join(_FIELDS)}"
                raise CommandError(f"{name!r} is no field that a chat can set{others}")
            given[name] = _value(value) if value else None
        merged = {**self._dialogue.params, **given}
        self._dialogue.params = _checked({name: value for name, value in merged.items() if value is not None})
        shown = " ".join(f"{name}={json.dumps(value)}" for name, value in self._dialogue.params.items())
        return _said(f"next requests: {shown or 'as the server has them by default'}")

    def _new(self, rest: str) -> CommandResult:
        self._dialogue.exchanges.clear()
        return _said("forgotten: the next message begins a new conversation")

    def _undo(self, rest: str) -> CommandResult:
        question, _ = self._last_exchange("take back")
        return _said(f"taken back: {_short(question)}")

    def _retry(self, rest: str) -> CommandResult:
        again = self._last_exchange("answer again")
        return CommandResult(ask=again[0], again=again)

    def _last_exchange(self, what: str) -> tuple[str, str]:
        if not self._dialogue.exchanges:
            raise CommandError(f"nothing was said yet that one could {what}")
        return self._dialogue.exchanges.pop()


def show_scaling(scaling: dict[str, Any] | str) -> str:
    """A scaling in a few words: "yarn, factor 4"; one by groups of layers as JSON."""
    if scaling == "auto":
        return "auto, the least scaling that each answer's length needs"
    if isinstance(scaling, str):
        return f"the server's profile {scaling}"
    kind = scaling.get("rope_type")
    if kind is None:
        return json.dumps(scaling)
    return ", ".join([str(kind), *(f"{n} {_brief(v)}" for n, v in scaling.items() if n != "rope_type")])


def show_context(use: ContextUse | None) -> str:
    """What became of the context of an answer, in a few words; "" where nothing did."""
    if use is None:
        return ""
    counts = {
        "{:,} turns dropped": use.dropped_turns,
        "{:,} tokens dropped": use.dropped_tokens,
        "{:,} tokens taken from passages": use.reused_tokens,
        "a window of {:,} tokens": use.attention_window,
    }
    return ", ".join(text.format(count) for text, count in counts.items() if count)


def show_rotary(rotary: Rotary) -> str:
    """What an answer ran under."""
    shown = show_scaling({"rope_type": rotary.rope_type, **rotary.parameters})
    if rotary.auto is None or rotary.auto.length is None:
        return shown
    return f"{shown}, chosen for {rotary.auto.length:,} tokens"


_KINDS = "default, linear, ntk, dynamic, yarn, llama3, longrope, proportional, dual_chunk, self_extend, rerope, log_n"
_WORDS = (*_KINDS.split(", "), "auto", "off")
_OLDER = ("su", "mrope", "learned")  # that are taken too


def _parse_rope(text: str) -> dict[str, Any] | str:
    """`yarn 4 beta_fast=16`, a JSON object, or a profile's name."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"that is no JSON ({error}): write /rope yarn 4, or an object of config.json") from None
        return _scaling(given)
    kind, *words = _split(text)
    fields: dict[str, Any] = {"rope_type": kind}
    for word in words:
        name, equals, value = word.partition("=")
        fields |= {name: _value(value)} if equals else {"factor": _value(word)}
    try:
        return _scaling(fields)
    except CommandError:
        if not words and kind not in _KINDS.split(", "):
            return kind  # perhaps a profile: the server knows
        raise


def _scaling(given: Any) -> dict[str, Any]:
    try:
        return dict(RopeScaling.from_dict(given))
    except ValueError as error:
        kind = given.get("rope_type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in (*_WORDS, *_OLDER):
            raise CommandError(f"{kind!r} is no kind of scaling{did_you_mean(kind, _WORDS)}: {_KINDS}") from None
        raise CommandError(str(error)) from None


def _checked(params: dict[str, Any]) -> dict[str, Any]:
    """The fields, if a request may have them; raises CommandError that names the one at fault."""
    from windlass.server.errors import ApiError
    from windlass.server.exchange.body import parse_body
    from windlass.server.protocol.chat import ChatRequest

    try:
        parse_body(json.dumps({**params, "messages": [{"role": "user", "content": ""}]}).encode(), ChatRequest)
    except ApiError as error:
        raise CommandError(error.message) from None
    return params


def _split(text: str) -> list[str]:
    """Words; a value in double quotes or brackets may hold spaces."""
    words, depth, quoted = [""], 0, False
    for letter in text:
        if letter == '"' and not words[-1].endswith("\\"):
            quoted = not quoted
        elif not quoted:
            depth += (letter in "[{") - (letter in "]}")
        if letter.isspace() and depth == 0 and not quoted:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word]


def _value(text: str) -> Any:
    """JSON where it is some, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)} numbers]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _said(*lines: str) -> CommandResult:
    return CommandResult(lines=lines)
