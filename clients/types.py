"""Responses as frozen dataclasses.

Unknown fields of a newer server are ignored; fields that an older one lacks have their default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Self

from windlass.clients._parse import ResponseModel, loads


class RotaryChosen(ResponseModel):
    """The automatic choice of a scaling. length: tokens it was chosen for, None if it follows the growing text.

    up_to: longest text, in tokens, with the same choice; None without a limit. profile: the chosen one of the operator's ladder.
    """

    length: int | None = None
    up_to: int | None = None
    profile: str | None = None


class RotaryGroup(ResponseModel):
    """The rotary scaling of one rotary group. parameters: its fields, rope_theta included.

    effective_length: tokens for which the frequencies were computed, None for kinds that do not depend on length. fingerprint:
    equal for equal frequencies and factors.
    """

    rope_type: str
    parameters: dict[str, Any] = field(default_factory=dict)
    effective_length: float | None = None
    fingerprint: str | None = None


class ContextUse(ResponseModel):
    """How the context of a request was used; fields that do not apply are None.

    window: the limit in tokens beyond which the oldest are dropped. kept_tokens: leading tokens that were retained.
    dropped_tokens, shifts: tokens that context shifts dropped, and the number of shifts. attention_window, attention_sinks: the
    limits of each token's attention. dropped_turns: oldest turns left out of the chat. reused_tokens, reused_passages: taken
    from cached passages at other positions.
    """

    window: int | None = None
    kept_tokens: int | None = None
    dropped_tokens: int | None = None
    shifts: int | None = None
    attention_window: int | None = None
    attention_sinks: int | None = None
    dropped_turns: int | None = None
    reused_tokens: int | None = None
    reused_passages: int | None = None


class Rotary(RotaryGroup):
    """The rotary scaling of a response.

    policy: frozen, recompute or rotate. moves: number of times that the cached keys were re-rotated. groups: the scaling of each
    rotary group, if the model has several. context: present if tokens may be dropped or reused. auto: present if the scaling was
    chosen by length.
    """

    policy: str | None = None
    moves: int = 0
    groups: dict[str, RotaryGroup] | None = None
    context: ContextUse | None = None
    auto: RotaryChosen | None = None


class RotarySettings(ResponseModel):
    """Response of /v1/rotary. profiles: scalings by name. policy: what requests may set: allow, profiles or off.

    rope_update: default of requests; None: that of each kind. rope_exact: whether requests may set `exact`. auto: the choices of
    `rope_scaling="auto"`. kinds: supported kinds with the lowest and highest useful value and a start of each field.
    """

    model: dict[str, Any]
    default: dict[str, Any]
    profiles: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    rope_update: str | None = None
    rope_exact: bool | None = None
    max_model_len: int | None = None
    auto: dict[str, Any] | None = None
    kinds: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)


class RotaryInspectionGroup(RotaryGroup):
    """The effect of a scaling on one rotary group. inv_freq: radians per token, one per rotated pair.

    wavelengths: tokens per turn, None for a pair that never turns. attention_factor: multiplies cosines and sines. distances:
    chunk_size, local_size and log_n_length of distance-based attention.
    """

    inv_freq: tuple[float, ...]
    wavelengths: tuple[float | None, ...] = ()
    attention_factor: float = 1.0
    softmax_scale: float = 1.0
    distances: dict[str, int] | None = None


class RotaryInspection(RotaryInspectionGroup):
    """The effect of a scaling on the served model: on its main rotary group, and in `groups` on each if there are several.

    fingerprint: of all groups together. policy: frozen, recompute or rotate. length: of the request in question, in tokens.
    auto: present if the scaling was chosen by length.
    """

    policy: str | None = None
    length: int | None = None
    auto: RotaryChosen | None = None
    groups: dict[str, RotaryInspectionGroup] | None = None


class RotaryCurves(ResponseModel):
    """Curves of the frequencies of one rotary group. cos, sin: one row per position, one column per rotated pair.

    slow_pairs: pairs that turn less than once within trained_length tokens. decay_bound: the bound of RoFormer's paper,
    mean_cosine: the score of two vectors of ones; both by distance and relative to distance 0.
    """

    group: str
    rope_type: str
    length: int
    trained_length: int
    rotary_dim: int
    slow_pairs: int
    fingerprint: str | None = None
    positions: tuple[int, ...] = ()
    cos: tuple[tuple[float, ...], ...] = ()
    sin: tuple[tuple[float, ...], ...] = ()
    distances: tuple[int, ...] = ()
    decay_bound: tuple[float, ...] = ()
    mean_cosine: tuple[float, ...] = ()


class FunctionCall(ResponseModel):
    """A function call. arguments: JSON text as the model wrote it."""

    name: str = ""
    arguments: str = ""

    @property
    def values(self) -> Any:
        """The parsed arguments; raises ValueError if they are not JSON, for example because they were cut short."""
        return loads(self.arguments)


class ToolCall(ResponseModel):
    """A tool call of the assistant."""

    id: str = ""
    type: str = "function"
    function: FunctionCall

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    def reply(self, content: str) -> dict[str, Any]:
        """The message that returns the result of this call to the model."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


class ToolCallDelta(ResponseModel):
    """An addition to a tool call. The first one has id and name; arguments arrive in pieces."""

    index: int = 0
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatMessage(ResponseModel):
    """A message of the assistant. The next request accepts it among its messages.

    reasoning_content: the reasoning before the content, if the server separates the two. function_call: the call of a request
    with `functions`.
    """

    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    _parse_content: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The content as the requested `answer_type`; None without one, and if the message calls tools instead.

        Raises ValueError for content that does not match, mostly because it was cut short (`finish_reason` "length").
        """
        if self._parse_content is None or (not self.content and self.tool_calls):
            return None
        return self._parse_content(self.content or "")

    def to_dict(self) -> dict[str, Any]:
        """The message in the form that a request accepts: with a content of None, without a refusal."""
        fields = super().to_dict()
        fields.pop("refusal", None)
        return {"role": self.role, "content": self.content, **fields}


class ChatDelta(ResponseModel):
    """An addition to a message; the first one has the role."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None


class PromptTokensDetails(ResponseModel):
    """cached_tokens: prompt tokens that came from the prefix cache."""

    cached_tokens: int | None = None


class CompletionTokensDetails(ResponseModel):
    """reasoning_tokens: generated tokens up to the end of the reasoning."""

    reasoning_tokens: int | None = None


class Usage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Logprobs(ResponseModel):
    """Log-probabilities of a completion, one entry per token in each list."""

    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None
    text_offset: tuple[int, ...] | None = None


class TopLogprob(ResponseModel):
    """One alternative at a position. bytes: the token's own UTF-8 bytes."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(ResponseModel):
    """A generated token of a chat and its most likely alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat choice, one entry per token."""

    content: tuple[TokenLogprob, ...] | None = None


class CompletionChoice(ResponseModel):
    """A choice of a completion, or its addition in a chunk. stop_reason: the stop string or token id that ended it.

    rotary: present if the choices of a response differ in it.
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


class _Generated(ResponseModel):
    """Common fields of completions, chats and their chunks. rotary: of the first choice; in a chunk, of the choice that ends."""

    id: str
    model: str = ""
    system_fingerprint: str | None = None
    created: int = 0
    usage: Usage | None = None
    rotary: Rotary | None = None


class PromptProgress(ResponseModel):
    """Progress of a prompt: tokens in all, found in the cache, and computed or cached so far. index: of several prompts."""

    total: int
    cache: int
    processed: int
    time_ms: int
    index: int | None = None


class Completion(_Generated):
    """Response of /v1/completions. request_id: its `x-request-id`."""

    choices: tuple[CompletionChoice, ...]
    request_id: str | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""


class CompletionChunk(_Generated):
    """An event of a streamed completion. Those with the usage or the progress of the prompt have no choices."""

    choices: tuple[CompletionChoice, ...] = ()
    prompt_progress: PromptProgress | None = None

    @property
    def text(self) -> str:
        """New text of the first choice in this chunk."""
        return self.choices[0].text if self.choices else ""


class ChatChoice(ResponseModel):
    """A choice of a chat. stop_reason: the stop string or token id that ended it. rotary: present if the choices differ in it."""

    index: int
    message: ChatMessage
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | None = None
    rotary: Rotary | None = None


class ChatChunkChoice(ResponseModel):
    """An addition to a choice of a chat."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | None = None


class ChatCompletion(_Generated):
    """Response of /v1/chat/completions. request_id: its `x-request-id`."""

    choices: tuple[ChatChoice, ...]
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    request_id: str | None = None

    @property
    def text(self) -> str:
        """Content of the first choice."""
        return (self.choices[0].message.content or "") if self.choices else ""

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice."""
        return (self.choices[0].message.reasoning_content or "") if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the first choice."""
        return (self.choices[0].message.tool_calls or ()) if self.choices else ()

    @property
    def parsed(self) -> Any:
        """The first choice as the requested `answer_type`; see `ChatMessage.parsed`."""
        return self.choices[0].message.parsed if self.choices else None


class ChatCompletionChunk(_Generated):
    """An event of a streamed chat. Those with the usage or the progress of the prompt have no choices."""

    choices: tuple[ChatChunkChoice, ...] = ()
    prompt_progress: PromptProgress | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None

    @property
    def text(self) -> str:
        """New content of the first choice in this chunk."""
        return (self.choices[0].delta.content or "") if self.choices else ""

    @property
    def reasoning(self) -> str:
        """New reasoning of the first choice in this chunk."""
        return (self.choices[0].delta.reasoning_content or "") if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """Additions of this chunk to the tool calls of the first choice."""
        return (self.choices[0].delta.tool_calls or ()) if self.choices else ()


class Model(ResponseModel):
    """A served model. max_model_len: length of its context in tokens, prompt and answer together.

    context: defaults of requests (`context_overflow`, `keep_tokens`, `attention_window`, `attention_sinks`, `cache_reuse`), and
    `shift_context`, `max_total_tokens`, `shift_refusal` and `reuse_refusal`. parent, adapter: for a LoRA adapter, its base model,
    and its `rank`, `targets` and `num_bytes`. tasks: generate, infill (accepts a `suffix`), embed, score, classify,
    token_classify. scored_by: source of the scores of pairs: "answer", "head" or "vectors". rotary_auto: choices of
    `rope_scaling="auto"`: `steps`, and whether it is the `default`. embedding: `dimensions`, `pooling` and `normalize` of its
    vectors. classes: `labels`, `activation` and `per_token` of a classifier. template: whether the chat template supports
    `tools`, `calls` and the role `developer`, and its reasoning; None without a template.
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
    attention_maps: bool | None = None
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


class Tokenization(ResponseModel):
    """Token ids of a text. offsets: [start, end) of each token in characters of the text."""

    count: int
    tokens: tuple[int, ...]
    max_model_len: int | None = None
    offsets: tuple[tuple[int, int], ...] | None = None
    token_strs: tuple[str, ...] | None = None


class Detokenization(ResponseModel):
    """Text of token ids. offsets: [start, end) of each token in characters. token_strs: the text of each token alone."""

    prompt: str
    offsets: tuple[tuple[int, int], ...] | None = None
    token_strs: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        """The text, by the name that other responses use."""
        return self.prompt


class Health(ResponseModel):
    """Response of /health or /ready. ok: whether the HTTP status was 200."""

    ok: bool
    status: str = ""
    degraded: tuple[str, ...] = ()


class InfillTimings(ResponseModel):
    """Times in milliseconds. cache_n, prompt_n: cached and computed tokens of the prompt."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


class Infill(ResponseModel):
    """Response of /infill, or an event of its stream. stop: whether the text ends here.

    stop_type: "eos", "word" (a stop string, `stopping_word`) or "limit" (of tokens, time or indentation).
    truncated: whether a part of the input did not fit. tokens: token ids, if `return_tokens` was set.
    """

    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    has_new_line: bool = False
    truncated: bool = False
    stop_type: str | None = None
    stopping_word: str = ""
    timings: InfillTimings | None = None
    rotary: Rotary | None = None
    request_id: str | None = None


class CacheGroup(ResponseModel):
    """Blocks of one KV group in cells of `blocks_per_cell` blocks; see `CachePages` in the OpenAPI document.

    states: whether the blocks hold recurrent states instead of keys and values.
    """

    num_blocks: int
    num_shown: int
    blocks_per_cell: int
    window: int | None = None
    held: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    states: bool = False


class CacheSequence(ResponseModel):
    """Numbers of tokens, blocks and context shifts of a running sequence."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_blocks: int = 0
    num_shifts: int = 0
    num_reused_tokens: int = 0


class CachePages(ResponseModel):
    """Current contents of the cache. time: seconds of a monotonic clock. counters: by metric name."""

    time: float
    block_size: int
    bytes_per_token: int = 0
    groups: tuple[CacheGroup, ...] = ()
    sequences: tuple[CacheSequence, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)


class AttentionMap(ResponseModel):
    """Attention of one head. Row i of weights (after the softmax) and scores (before it) has the tokens 0 to i.

    None marks a token outside the attention window. *_by_distance: means by distance between query and key.
    """

    layer: int
    head: int
    num_layers: int
    num_heads: int
    tokens: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float | None, ...], ...]
    weight_by_distance: tuple[float, ...] = ()
    score_by_distance: tuple[float | None, ...] = ()
    fingerprint: str | None = None
    model: str | None = None


class _Pooled(ResponseModel):
    """Fields of the responses of endpoints that generate no text."""

    id: str = ""
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None


class EmbeddedText(ResponseModel):
    """The vector of one text. index: its position in the input."""

    index: int
    embedding: tuple[float, ...]


class Embeddings(_Pooled):
    """Response of /v1/embeddings, in the order of the texts."""

    data: tuple[EmbeddedText, ...]

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        """The vectors without their index."""
        return [item.embedding for item in self.data]


class TextStates(ResponseModel):
    """Hidden states of one text. rows: one, or with `pooling` "all" one per token."""

    index: int
    rows: tuple[tuple[float, ...], ...]


class PooledStates(_Pooled):
    """Response of /pooling, in the order of the texts."""

    data: tuple[TextStates, ...]


class ScoredPair(ResponseModel):
    """The score of one pair of texts."""

    index: int
    score: float


class PairScores(_Pooled):
    """Response of /v1/score, in the order of the pairs."""

    data: tuple[ScoredPair, ...]

    @property
    def scores(self) -> list[float]:
        """The scores without their index."""
        return [item.score for item in self.data]


class DocumentText(ResponseModel):
    """A document as it was sent."""

    text: str


class RankingResult(ResponseModel):
    """One of the documents. index: its position in the request."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(_Pooled):
    """Response of /v1/rerank, the best document first."""

    results: tuple[RankingResult, ...]


class TextClass(ResponseModel):
    """The most probable class of one text, and the probability of each class in the order of the model's labels."""

    index: int
    label: str
    probs: tuple[float, ...]


class Classification(_Pooled):
    """Response of /classify, in the order of the texts."""

    data: tuple[TextClass, ...]


class MetricSample(ResponseModel):
    """A sample of a metric. name: with its suffix, such as `_total`, `_bucket`, `_sum` and `_count`."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Metrics(ResponseModel):
    """The samples of /metrics in order. docs/reference/metrics.md lists the names."""

    samples: tuple[MetricSample, ...] = ()

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with this name and these labels; None if there are none."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and all(sample.labels.get(key) == wanted for key, wanted in labels.items())
        ]
        return sum(found) if found else None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Prometheus' text format; raises ValueError for any other text."""
        # Imported here because it is slow to import.
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"not Prometheus' text format: {error}") from error
        found = (sample for family in families for sample in family.samples)
        return cls(samples=tuple(MetricSample(name=s.name, value=s.value, labels=s.labels) for s in found))
