"""Arguments of `windlass.LLM`: options, sampling parameters, prompts and conversations, each error with its correction."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, ValidationError

from windlass.clients import BadRequestError
from windlass.clients._parse import to_json_value
from windlass.engine.errors import LoadError, did_you_mean
from windlass.server.app.request_body import validation_error
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import foreign_keyword_hint, moved_option_hint
from windlass.server.config.option import excerpt, options_of
from windlass.server.config.option_names import with_keyword_names
from windlass.server.config.server_options import ServerOptions
from windlass.server.errors import INVALID_REQUEST
from windlass.server.schemas.completions import CompletionLogprobsField
from windlass.server.schemas.generation import GenerationRequest


class SamplingParams(GenerationRequest):
    """Parameters of `LLM.generate` and `LLM.chat` for one prompt or for all: `SamplingParams(temperature=0, max_tokens=200)`.

    The fields and their defaults are those of the HTTP API. `logprobs` is the number of alternatives per token, for chats too.
    Raises BadRequestError, which names the field at fault.
    """

    model_config = ConfigDict(title="SamplingParams")

    ignored: ClassVar[Set[str]] = frozenset()
    hints: ClassVar[dict[str, str]] = GenerationRequest.hints | {
        "echo": "it is a keyword of generate",
        "suffix": "it is a keyword of generate",
        "top_logprobs": "it is called logprobs here",
        "tools": "it is a keyword of chat",
        "chat_template_kwargs": "it is a keyword of chat",
    }

    logprobs: CompletionLogprobsField = None

    if not TYPE_CHECKING:  # type checkers derive the parameters from the fields

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**{name: _json_value(name, value) for name, value in fields.items()})
            except ValidationError as error:
                wrong = validation_error(error)
                message, given = wrong.message, fields.get(wrong.param or "")
                message += f", got {excerpt(given)}" if given is not None and wrong.code == "invalid_value" else ""
                raise BadRequestError(
                    message, status=wrong.status, type=INVALID_REQUEST, param=wrong.param, code=wrong.code
                ) from None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return list(self.fields().items())

    def fields(self) -> dict[str, Any]:
        """The fields that were set, as keywords of `LLM.generate`."""
        return self.model_dump(exclude_unset=True)

    def chat_fields(self) -> dict[str, Any]:
        """The fields that were set, as keywords of `LLM.chat`."""
        fields = self.fields()
        if fields.get("logprobs") is not None:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        return fields


def _json_value(name: str, value: Any) -> Any:
    """The value as a JSON body has it. Raises BadRequestError."""
    try:
        return json.loads(json.dumps(to_json_value(value)))
    except (TypeError, ValueError, RecursionError):
        message = f"{name} cannot be written as JSON, got {excerpt(value)}"
        raise BadRequestError(message, status=400, type=INVALID_REQUEST, param=name, code="invalid_value") from None


AnyParams = SamplingParams | Mapping[str, Any]

# Keywords of vLLM's methods.
_CALL_HINTS = {
    "use_tqdm": "it is called progress here",
    "params": "it is called sampling_params here",
    "lora_request": "load adapters with LLM(..., lora=...) and give the name of one as model",
    "prompt_token_ids": "give token ids as the prompts",
    "stream": "use stream or stream_chat",
}


def merged_fields(
    params: AnyParams | Sequence[AnyParams] | None, keywords: Mapping[str, Any], count: int, *, chat: bool = False
) -> list[dict[str, Any]]:
    """The fields of each of `count` requests. params override the keywords. Raises TypeError or ValueError."""
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        shared: Sequence[AnyParams] = [params or {}] * count
    elif isinstance(params, Sequence) and all(isinstance(each, (SamplingParams, Mapping)) for each in params):
        shared = params
    else:
        raise TypeError(
            "sampling_params must be SamplingParams, a mapping, or a list with one of these for each prompt, "
            f"got {excerpt(params)}"
        )
    if len(shared) != count:
        raise ValueError(
            f"sampling_params has {len(shared)} entries for {count} prompts: give one for each prompt, or one for all"
        )
    return [check_keywords({**keywords, **_fields(each, chat=chat)}) for each in shared]


def _fields(params: AnyParams, *, chat: bool) -> Mapping[str, Any]:
    if not isinstance(params, SamplingParams):
        return params
    return params.chat_fields() if chat else params.fields()


def check_keywords(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, which the app checks, without keywords of vLLM. Raises TypeError."""
    for name, hint in _CALL_HINTS.items():
        if name in fields:
            raise TypeError(f"`{name}` is not supported here: {hint}")
    return fields


def read_prompts(given: Any) -> list[Any]:
    """A list of prompts, from one prompt or several. Raises TypeError."""
    if isinstance(given, str):
        return [given]
    items = _list(given)
    if items is None:
        raise TypeError(f"prompts must be a text, token ids, or a list of these, got {excerpt(given)}")
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
    prompts = [item if isinstance(item, str) else _list(item) for item in items]
    for index, prompt in enumerate(prompts):
        if prompt is None:
            raise TypeError(f"prompts[{index}] must be a text or a list of token ids, got {excerpt(items[index])}")
    return prompts


def read_conversations(given: Any) -> list[Any]:
    """A list of conversations, from one or several. Raises TypeError."""
    items = _list(given)
    if items is not None:
        one = any(_is_message(item) for item in items)
        conversations = [items] if one else [_list(item) for item in items]
        if items and all(each and all(map(_is_message, each)) for each in conversations):
            return conversations
        if not items:
            return [items]  # the app refuses it
    raise TypeError(
        'messages must be a list such as [{"role": "user", "content": "…"}], or a list of such lists, '
        f"got {excerpt(given)}"
    )


def _list(given: Any) -> list[Any] | None:
    """The items of an iterable or of an array, None for a text, a mapping and what is not iterable."""
    if hasattr(given, "tolist"):  # numpy's arrays
        given = given.tolist()
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
        return None
    return list(given)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) or hasattr(item, "to_dict")


def read_options(given: Mapping[str, Any]) -> tuple[EngineOptions, ServerOptions]:
    """Options of the engine and of the server from keywords, and from the engine's variables for experts.

    Raises LoadError, one line, for a wrong name or value.
    """
    engine, server = options_of(EngineOptions), options_of(ServerOptions)
    known = {name: each for name, each in {**server, **engine}.items() if each.in_llm and each.scope != "variable"}
    for name in given:
        if name not in known:
            raise LoadError(with_keyword_names(f"there is no option {name!r}{_option_hint(name, known, server)}"))
    variables = {each.name: os.environ.get(each.variable) for each in engine.values() if each.scope == "variable"}
    values = {**{name: value for name, value in variables.items() if value}, **given}
    try:
        return (
            EngineOptions(**{name: value for name, value in values.items() if name in engine}),
            ServerOptions(**{name: value for name, value in values.items() if name in server}),
        )
    except LoadError as error:
        raise LoadError(with_keyword_names(str(error))) from None


def _option_hint(name: str, known: Collection[str], server: Collection[str]) -> str:
    """What to write instead of a keyword that `LLM` does not have."""
    if name in server:
        return ": it concerns the HTTP server, which LLM does not start: leave it out"
    hint = moved_option_hint(None, name) or foreign_keyword_hint(name, known)
    if hint is not None:
        return f": {hint}"
    return did_you_mean(name, known) or ": `windlass serve --help-all` lists them"
