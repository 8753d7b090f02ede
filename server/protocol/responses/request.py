"""Body of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from windlass.server.protocol.base import INT32_MAX, FreeForm, OrString, StopStrings, StrictModel, without_nulls
from windlass.server.protocol.chat import Effort
from windlass.server.protocol.generation_request import PROMPT_CACHE, SharedRequest, only_empty
from windlass.server.protocol.kinds import OTHER, by_type
from windlass.server.protocol.responses.items import MAX_ITEMS, InputItem
from windlass.server.protocol.tools import (
    ALLOWED,
    MAX_TOOLS,
    FunctionDefinition,
    OtherTool,
    allowed_names,
    check_functions,
)

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16


class FunctionTool(FunctionDefinition):
    """A function on offer, as `/v1/responses` writes it."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "output_schema"})
    # Calls come from the model itself, and their results with a later request.
    neutral: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"], "async": False}
    hints: ClassVar[dict[str, str]] = {
        "function": "name, description and parameters stand beside type here",
        "allowed_callers": "only ['direct'] is supported",
        "async": "only false is supported",
    }

    type: Literal["function"]
    defer_loading: Annotated[bool | None, only_empty("defer_loading is")] = None


_Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[OtherTool, Tag(OTHER)],
    by_type(("function",)),
]


def _tools(value: list[FunctionTool]) -> list[FunctionTool]:
    check_functions(value)
    return value


def _choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    given = without_nulls(value) if isinstance(value, dict) else {}
    if (name := _named(given)) is not None:
        return _naming(name)
    if given.pop("type", None) == ALLOWED:
        mode, names = allowed_names(given, _named)
        return {"type": ALLOWED, "mode": mode, "tools": list(map(_naming, names))}
    raise PydanticCustomError(
        "type",
        "should be 'none', 'auto', 'required', {'type': 'function', 'name': '…'} or "
        "{'type': 'allowed_tools', 'mode': '…', 'tools': […]}",
    )


def _naming(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def _named(value: Any) -> str | None:
    """The function that {'type': 'function', 'name': '…'} names, None where it is no such object."""
    given = without_nulls(value) if isinstance(value, dict) else {}
    named = given.get("type") == "function" and set(given) == {"type", "name"} and isinstance(given["name"], str)
    return given["name"] if named else None


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _few_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:  # before they are looked at, one by one
        raise PydanticCustomError("too_many", "should have at most {most} entries", {"most": MAX_METADATA})
    return without_nulls(value) if isinstance(value, dict) else value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise PydanticCustomError("too_long", "should have keys of at most 64 characters and values of at most 512")
    return value


class ReasoningChoice(StrictModel):
    """`summary` has no effect: answers have the thinking itself, and no summary of it. Nor have `context` and `mode`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Effort | None = None


class TextConfig(StrictModel):
    """The form of the answer's text. `verbosity` has no effect."""

    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: Annotated[
        dict[str, Any] | None,
        Field(description="`{type: text}`, `{type: json_object}` or `{type: json_schema, name, schema}`."),
    ] = None


class ResponseStreamOptions(StrictModel):
    """`include_obfuscation` has no effect: events are never padded."""

    include_obfuscation: bool | None = None


class ResponseRequest(SharedRequest):
    """`input` behind `instructions` goes through the model's chat template, after the conversation that
    `previous_response_id` names."""

    hints: ClassVar[dict[str, str]] = SharedRequest.hints | {
        "messages": "it belongs to /v1/chat/completions; this is /v1/responses, which takes input",
        "max_tokens": "it is called max_output_tokens here",
        "max_completion_tokens": "it is called max_output_tokens here",
        "response_format": "it is called text.format here",
        "reasoning_effort": "it is called reasoning.effort here",
        "logprobs": f"ask for top_logprobs, or include {LOGPROBS!r}",
        "n": "a response is one answer",
        "n_predict": "it is called max_output_tokens here",
        "num_predict": "it is called max_output_tokens here",
    }
    ignored: ClassVar[frozenset[str]] = PROMPT_CACHE | {"client_metadata", "max_tool_calls", "verbosity"}

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
        OrString(_items),
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    stop: StopStrings | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_tools)] | None = None
    tool_choice: Annotated[
        Any,
        AfterValidator(_choice),
        Field(
            description="`none`, `auto`, `required`, `{type: function, name}` or `{type: allowed_tools, mode, tools}`."
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningChoice | None = None
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                ]
            ],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(_few_entries), AfterValidator(_metadata)
        ]
        | None
    ) = None
    stream_options: ResponseStreamOptions | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    chat_template_kwargs: FreeForm | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None

    # What only OpenAI's own service does
    background: Annotated[bool | None, only_empty("background responses are")] = None
    conversation: Annotated[Any, only_empty("conversations are")] = None
    prompt: Annotated[Any, only_empty("stored prompts are")] = None
    context_management: Annotated[Any, only_empty("context_management is")] = None
    moderation: Annotated[Any, only_empty("moderation is")] = None
    access_programs: Annotated[Any, only_empty("access_programs are")] = None


class CountInputRequest(ResponseRequest):
    """What the input of a response comes to in tokens, the chat template's own included. It takes a response's fields; those that
    say nothing of the input have no effect.
    """

    input: Annotated[
        list[InputItem],
        Field(max_length=MAX_ITEMS, fail_fast=True),
        OrString(_items),
    ] = Field(default_factory=list)
