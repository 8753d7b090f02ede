"""What the client gives: answers as frozen dataclasses.

Knows field names; knows nothing of HTTP. Fields a newer server adds are ignored, fields an older one lacks are None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.clients.chat_types import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from windlass.clients.rotary_types import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensDetails:
    """cached_tokens: prompt tokens that came from the prefix cache."""

    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTokensDetails:
    """reasoning_tokens: generated tokens up to the end of the thinking."""

    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities of a completion: parallel lists, one entry per token."""

    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None
    text_offset: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One alternative at a position. bytes: the token's own UTF-8 bytes."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A generated token of a chat and its most likely alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLogprobs:
    """Log-probabilities of a chat choice, one entry per token."""

    content: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """One answer, or in a stream its new part. stop_reason: the stop string or token id that ended it.

    rotary: where the choices of an answer differ in it.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer of /v1/completions. rotary: the first choice's. request_id: the `x-request-id` of the answer."""

    id: str
    choices: tuple[CompletionChoice, ...]
    model: str = ""
    system_fingerprint: str | None = None
    created: int = 0
    usage: Usage | None = None
    rotary: Rotary | None = None
    request_id: str | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChunk:
    """One event of a streamed completion. The usage chunk, where asked for, has no choices.

    rotary: of the choice that ends in this chunk.
    """

    id: str
    choices: tuple[CompletionChoice, ...] = ()
    model: str = ""
    system_fingerprint: str | None = None
    created: int = 0
    usage: Usage | None = None
    rotary: Rotary | None = None

    @property
    def text(self) -> str:
        """New text of the first choice in this chunk."""
        return self.choices[0].text if self.choices else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One answer. stop_reason: the stop string or token id that ended it. rotary: where the choices differ in it."""

    index: int
    message: ChatMessage
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChunkChoice:
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """The answer of /v1/chat/completions. rotary: the first choice's. request_id: the `x-request-id` of the answer."""

    id: str
    choices: tuple[ChatChoice, ...]
    model: str = ""
    system_fingerprint: str | None = None
    created: int = 0
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    rotary: Rotary | None = None
    request_id: str | None = None

    @property
    def text(self) -> str:
        """Content of the first choice."""
        return (self.choices[0].message.content or "") if self.choices else ""

    @property
    def reasoning(self) -> str:
        """What the first choice thought before it answered."""
        return (self.choices[0].message.reasoning_content or "") if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the first choice asks for."""
        return (self.choices[0].message.tool_calls or ()) if self.choices else ()

    @property
    def parsed(self) -> Any:
        """The first choice as the `answer_type` that was asked for; see `ChatMessage.parsed`."""
        return self.choices[0].message.parsed if self.choices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionChunk:
    """One event of a streamed chat. The usage chunk, where asked for, has no choices.

    rotary: of the choice that ends in this chunk.
    """

    id: str
    choices: tuple[ChatChunkChoice, ...] = ()
    model: str = ""
    system_fingerprint: str | None = None
    created: int = 0
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    rotary: Rotary | None = None

    @property
    def text(self) -> str:
        """New content of the first choice in this chunk."""
        return (self.choices[0].delta.content or "") if self.choices else ""

    @property
    def reasoning(self) -> str:
        """New thinking of the first choice in this chunk."""
        return (self.choices[0].delta.reasoning_content or "") if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """What this chunk adds to the calls of the first choice."""
        return (self.choices[0].delta.tool_calls or ()) if self.choices else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model. max_model_len: tokens its context holds, prompt and answer together.

    context: what holds for requests that do not say (`context_overflow`, `keep_tokens`, `attention_window`, `attention_sinks`,
    `cache_reuse`), and `shift_context`, `max_total_tokens`, `shift_refusal` and `reuse_refusal`. parent, adapter: of a LoRA
    adapter the model that it changes, and its `rank`, `targets` and `num_bytes`. tasks: what it can be asked for: generate,
    infill (a `suffix`), embed, score, classify, token_classify. scored_by: what scores of pairs come from: "answer", "head" or
    "vectors".
    rotary_auto: what `rope_scaling="auto"` chooses from: whether it is the `default`, and `steps`.
    embedding: `dimensions`, `pooling` and `normalize` of its vectors; classes: `labels`, `activation` and `per_token` of one that
    classifies.
    template: whether its chat template knows `tools`, `calls` and the role `developer`, and how it thinks; None without one.
    """

    id: str
    created: int = 0
    owned_by: str = ""
    max_model_len: int | None = None
    architecture: str | None = None
    num_parameters: int | None = None
    draft_model: dict[str, Any] | None = None
    dtype: str | None = None
    weight_dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    sampling_defaults: dict[str, float] | None = None
    recommended_sampling: dict[str, float] | None = None
    context: dict[str, Any] | None = None
    rotary: dict[str, Any] | None = None
    rotary_auto: dict[str, Any] | None = None
    tasks: tuple[str, ...] | None = None
    scored_by: str | None = None
    embedding: dict[str, Any] | None = None
    classes: dict[str, Any] | None = None
    vocab_size: int | None = None
    trained_len: int | None = None
    special_tokens: dict[str, str] | None = None
    template: dict[str, Any] | None = None
    parent: str | None = None
    adapter: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """Token ids of a text. offsets: per token its [start, end) in characters of the text."""

    count: int
    tokens: tuple[int, ...]
    max_model_len: int | None = None
    offsets: tuple[tuple[int, int], ...] | None = None
    token_strs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Detokenization:
    """Text of token ids. offsets: per token what it adds, [start, end) in characters. token_strs: the text of each alone."""

    prompt: str
    offsets: tuple[tuple[int, int], ...] | None = None
    token_strs: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        """The text, by the name that the other answers use."""
        return self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What /health or /ready answered: `ok` for 200. status, degraded: in the server's words."""

    ok: bool
    status: str = ""
    degraded: tuple[str, ...] = ()
