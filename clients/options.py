"""Types of the parameters of the clients: prompts, fields of request bodies by their API names, retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import httpx

from windlass.clients.response_types import Message, ResponseItem
from windlass.clients.types import ChatMessage

TokenIds = Sequence[int]
Prompt = str | Sequence[str] | TokenIds | Sequence[TokenIds]
Messages = Sequence[Mapping[str, Any] | ChatMessage]
ResponseInput = str | Sequence[Mapping[str, Any] | ResponseItem]
MessageTurns = Sequence[Mapping[str, Any] | Message]
Timeout = float | httpx.Timeout | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retries of requests that could not connect or were answered with 429 or 503. A stream that has begun is never repeated.

    max_retries: requests after the first. The delay doubles from `first_delay` to `longest_delay` seconds, and each is drawn
    uniformly between half of it and all of it. A Retry-After header replaces it; above `longest_retry_after` seconds the error
    is raised instead.
    """

    max_retries: int = 2
    first_delay: float = 0.5
    longest_delay: float = 8.0
    longest_retry_after: float = 60.0

    def delay(self, attempt: int, retry_after: float | None, draw: float) -> float | None:
        """Seconds to wait after failed request number `attempt` (from 0), None to give up. draw: uniform in [0, 1)."""
        if attempt >= self.max_retries:
            return None
        if retry_after is not None:
            # All refused clients got the same number: spread their next requests.
            return retry_after * (1 + 0.1 * draw) if retry_after <= self.longest_retry_after else None
        doubled = self.first_delay * 2.0 ** min(attempt, 1000)  # a higher power overflows
        return min(self.longest_delay, doubled) * (0.5 + 0.5 * draw)


class CallOptions(TypedDict, total=False):
    """Options of every method that sends a body. A value of None is the same as an absent one.

    timeout: of the transfers of this request, instead of the client's own. extra_body: fields that this client does not know.
    """

    model: str | None
    timeout: Timeout
    extra_body: Mapping[str, Any] | None


class PromptOptions(CallOptions, total=False):
    """Body fields of the endpoints that run the model. deadline: the API's `timeout`, seconds until the server gives up."""

    deadline: float | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: str | None
    rope_scaling: Mapping[str, Any] | str | None
    rope_update: str | Mapping[str, Any] | None
    attention_window: int | None
    attention_sinks: int | None
    cache_salt: str | None
    priority: int | None
    request_id: str | None


class SharedOptions(PromptOptions, total=False):
    """Body fields of the endpoints that generate text."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | str | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    min_tokens: int | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    structured_outputs: Mapping[str, Any] | None
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    grammar: str | None
    json_schema: Mapping[str, Any] | None
    context_overflow: str | None
    keep_tokens: int | None
    cache_reuse: int | None
    passages: Sequence[Mapping[str, int]] | None
    cache_reuse_recompute: float | None


class GenerationOptions(SharedOptions, total=False):
    """Body fields of /v1/completions and /v1/chat/completions."""

    max_tokens: int | None
    max_completion_tokens: int | None
    n: int | None
    best_of: int | None
    return_progress: bool | None
    stop: str | Sequence[str] | None
    prompt_logprobs: int | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None
    stream_options: Mapping[str, bool] | None
    response_format: Mapping[str, Any] | None


class CompletionOptions(GenerationOptions, total=False):
    """Body fields of /v1/completions. logprobs: number of alternatives per token."""

    echo: bool | None
    logprobs: int | None
    suffix: str | None


class InfillOptions(SharedOptions, total=False):
    """Body fields of /infill, by llama.cpp's names."""

    input_extra: Sequence[Mapping[str, str]] | None
    prompt: str | None
    n_predict: int | None
    stop: str | Sequence[str] | None
    repeat_penalty: float | None
    n_indent: int | None
    t_max_predict_ms: float | None
    samplers: Sequence[str] | str | None
    response_fields: Sequence[str] | None
    return_tokens: bool | None
    lora: Sequence[Mapping[str, Any]] | None


class ChatOptions(GenerationOptions, total=False):
    """Body fields of /v1/chat/completions."""

    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    functions: Sequence[Mapping[str, Any]] | None
    function_call: str | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: str | None
    thinking_budget: int | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ResponseOptions(SharedOptions, total=False):
    """Body fields of /v1/responses."""

    instructions: str | None
    previous_response_id: str | None
    store: bool | None
    max_output_tokens: int | None
    stop: str | Sequence[str] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    text: Mapping[str, Any] | None
    reasoning: Mapping[str, Any] | None
    include: Sequence[str] | None
    top_logprobs: int | None
    truncation: str | None
    metadata: Mapping[str, str] | None
    stream_options: Mapping[str, bool] | None
    thinking_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class CountOptions(CallOptions, total=False):
    """Body fields of /v1/messages/count_tokens."""

    system: str | Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Mapping[str, Any] | None
    thinking: Mapping[str, Any] | None
    output_config: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class MessageOptions(SharedOptions, CountOptions, total=False):
    """Body fields of /v1/messages."""

    stop_sequences: Sequence[str] | None


class TemplateOptions(CallOptions, total=False):
    """Body fields of /apply_template."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class TokenizeOptions(TemplateOptions, total=False):
    """Body fields of /tokenize."""

    add_special_tokens: bool | None
    return_token_strs: bool | None
    return_offsets: bool | None


class DetokenizeOptions(CallOptions, total=False):
    """Body fields of /detokenize."""

    skip_special_tokens: bool | None
    return_offsets: bool | None
    return_token_strs: bool | None


class ClassifyOptions(PromptOptions, total=False):
    """Body fields of /classify."""

    use_activation: bool | None


class ScoreOptions(PromptOptions, total=False):
    """Body fields of /v1/score. instruction: the criterion, for a model whose prompt has a place for it."""

    pooling: str | None
    instruction: str | None


class RerankOptions(ScoreOptions, total=False):
    """Body fields of /v1/rerank. max_tokens_per_doc: documents are cut to this length."""

    return_documents: bool | None
    max_tokens_per_doc: int | None


class EmbeddingOptions(PromptOptions, total=False):
    """Body fields of /v1/embeddings. encoding_format: of the numbers in the response, "base64" by default."""

    pooling: str | None
    dimensions: int | None
    normalize: bool | None
    encoding_format: str | None


class PoolingOptions(EmbeddingOptions, total=False):
    """Body fields of /pooling. task: "embed", "token_embed", "classify" or "token_classify"."""

    task: str | None
    use_activation: bool | None
