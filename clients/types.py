"""Responses as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.clients._parse import loads


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryChosen:
    """What `auto` chose a scaling by. length: tokens it was chosen for, None where it follows the text as that grows.

    up_to: tokens for which the choice is the same, None for any longer text. profile: that of the operator's ladder.
    """

    length: int | None = None
    up_to: int | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryGroup:
    """The rotary scaling of one group of layers. fingerprint: equal for equal frequencies and factors of the group."""

    rope_type: str
    parameters: dict[str, Any] = field(default_factory=dict)
    effective_length: float | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUse:
    """What became of an answer's context; None where it does not apply.

    window: tokens that were held at most where the oldest are dropped; kept_tokens: leading ones that stayed; dropped_tokens
    in so many shifts. attention_window, attention_sinks: what each token saw. dropped_turns: oldest turns left out of the
    chat. reused_tokens, reused_passages: taken from passages that stood elsewhere.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary scaling an answer ran under. parameters: its fields, theta included.

    policy: frozen, recompute or rotate. effective_length: tokens the frequencies were formed for, None for kinds that
    do not depend on length. fingerprint: equal for equal frequencies and factors. moves: how often the cached
    keys were re-rotated. groups: the same for each group of layers, where a model has several. context: where
    anything may be dropped. auto: where the scaling was chosen by length.
    """

    rope_type: str
    parameters: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    effective_length: float | None = None
    fingerprint: str | None = None
    moves: int = 0
    groups: dict[str, RotaryGroup] | None = None
    context: ContextUse | None = None
    auto: RotaryChosen | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySettings:
    """What /v1/rotary tells. profiles: scalings a request may name. policy: what requests may set: allow, profiles, off.

    rope_update: of requests that set none; None: each kind's own. rope_exact: whether they may ask for it. auto: what
    `rope_scaling="auto"` chooses from.
    """

    model: dict[str, Any]
    default: dict[str, Any]
    profiles: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    rope_update: str | None = None
    rope_exact: bool | None = None
    max_model_len: int | None = None
    auto: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryInspectionGroup:
    """What a scaling means for one group of layers. inv_freq: radians per token, one per rotated pair.

    wavelengths: tokens per turn, None for a pair that never turns. attention_factor: on cosines and sines.
    effective_length: tokens the frequencies are formed for, None for kinds that do not depend on length. distances: how far
    keys seem, where the kind changes that: chunk_size, local_size, log_n_length.
    """

    rope_type: str
    inv_freq: tuple[float, ...]
    wavelengths: tuple[float | None, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    attention_factor: float = 1.0
    softmax_scale: float = 1.0
    distances: dict[str, int] | None = None
    fingerprint: str | None = None
    effective_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryInspection(RotaryInspectionGroup):
    """What a scaling means for the served model: the main group of layers, and all of them where there are several.

    fingerprint: of all groups together. policy: frozen, recompute or rotate. length: what was asked about, in tokens.
    auto: what the scaling was chosen by, where it was.
    """

    policy: str | None = None
    length: int | None = None
    auto: RotaryChosen | None = None
    groups: dict[str, RotaryInspectionGroup] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryCurves:
    """What the frequencies of one group of layers come to. cos, sin: a row a position, a column a rotated pair.

    slow_pairs: pairs that turn less than once within trained_length tokens. decay_bound: RoFormer's, mean_cosine: the score of
    equal vectors of ones, both by distance and over their values at 0.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A function to be called. arguments: JSON text, as the model wrote it."""

    name: str = ""
    arguments: str = ""

    @property
    def values(self) -> Any:
        """The arguments as values, an object as a dict; raises ValueError where they are not JSON, such as cut ones."""
        return loads(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the assistant asks for."""

    function: FunctionCall
    id: str = ""
    type: str = "function"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    def reply(self, content: str) -> dict[str, Any]:
        """The message that brings this call's result back to the model."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What a chunk adds to one call. The first one bears id and name; arguments come in pieces."""

    index: int = 0
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """What the assistant said. It may stand among the messages of the next request as it is.

    reasoning_content: what it thought before, where the server tells the two apart. tool_calls: what it asks for;
    function_call: the same to a request with `functions`.
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
        """The content as the `answer_type` that was asked for; None without one, and where the turn calls tools instead.

        Raises ValueError where the content does not hold: it was cut short (`finish_reason` "length"), mostly.
        """
        return (
            None
            if self._parse_content is None or (not self.content and self.tool_calls)
            else self._parse_content(self.content or "")
        )

    def to_dict(self) -> dict[str, Any]:
        """The message as a request takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": _function_dict(call.function)}
                for call in self.tool_calls
            ]
        if self.function_call is not None:
            message["function_call"] = _function_dict(self.function_call)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """What a chunk adds to the message; the first one bears the role."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None


def _function_dict(call: FunctionCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTimings:
    """How long it took, in milliseconds. cache_n, prompt_n: tokens of the prompt from the cache, and computed."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """What fills a gap, or a piece of it in a stream. stop: whether the answer ends here.

    stop_type: "eos", "word" (a stop string, `stopping_word`) or "limit" (of tokens, time or indentation).
    truncated: whether any of what was given did not fit. tokens: ids, where `return_tokens` asked for them.
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


class InfillAccumulator:
    """Events of /infill, put together. The names are those of a stream."""

    final_event = "the event with stop: true"
    reasoning = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parsed = None

    def __init__(self) -> None:
        self.ended = False
        self.num_started = 0
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._last: Infill | None = None

    def add(self, chunk: Infill) -> None:
        """Take what an event brings."""
        self.num_started = 1
        self._pieces.append(chunk.content)
        self._tokens += chunk.tokens
        self._last, self.ended = chunk, chunk.stop

    @property
    def text(self) -> str:
        """What came so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def finish_reasons(self) -> dict[int, str]:
        """How it ended, once it has."""
        return {0: self._last.stop_type or ""} if self._last is not None and self.ended else {}

    @property
    def usage(self) -> Usage | None:
        """The counts so far, in the names of chats."""
        last = self._last
        if last is None:
            return None
        return Usage(
            prompt_tokens=last.tokens_evaluated,
            completion_tokens=last.tokens_predicted,
            total_tokens=last.tokens_evaluated + last.tokens_predicted,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=last.tokens_cached),
        )

    @property
    def rotary(self) -> Rotary | None:
        """What it ran under, once it has ended."""
        return None if self._last is None else self._last.rotary

    def result(self, request_id: str | None) -> Infill:
        """The whole answer."""
        assert self._last is not None
        return replace(self._last, content=self.text, tokens=tuple(self._tokens), request_id=request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """The pages of one KV group, by cells of `blocks_per_cell` blocks; see `CachePages` in the server's description. states: its
    blocks are no pages, but what layers carry of a sequence from token to token."""

    num_blocks: int
    num_shown: int
    blocks_per_cell: int
    window: int | None = None
    held: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    states: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSequence:
    """A running sequence: its tokens, those of its prompt, those found in the cache, and what moved in it."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_blocks: int = 0
    num_shifts: int = 0
    num_reused_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePages:
    """The cache as it is now. time: seconds on a clock that only goes forward. counters: by their names in the metrics."""

    time: float
    block_size: int
    bytes_per_token: int = 0
    groups: tuple[CacheGroup, ...] = ()
    sequences: tuple[CacheSequence, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMap:
    """What one head attends to: row i of weights (after the softmax) and scores (before it) has the tokens 0 to i.

    None: a token that it cannot see. *_by_distance: means by how many places back a token stands.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedText:
    """The vector of one text. index: its place in the input."""

    index: int
    embedding: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """A vector for each text, in order."""

    id: str = ""
    model: str = ""
    data: tuple[EmbeddedText, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        """The vectors alone."""
        return [item.embedding for item in self.data]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStates:
    """Hidden states of one text. rows: one, or with `pooling` "all" one for each token."""

    index: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledStates:
    """Hidden states of each text, in order."""

    id: str = ""
    model: str = ""
    data: tuple[TextStates, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """How well one pair goes together."""

    index: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """A score for each pair, in order."""

    id: str = ""
    model: str = ""
    data: tuple[ScoredPair, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None

    @property
    def scores(self) -> list[float]:
        """The scores alone."""
        return [item.score for item in self.data]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentText:
    """A document as it was sent."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingResult:
    """One of the documents. index: its place among those that were sent."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The documents, the best one first."""

    id: str = ""
    model: str = ""
    results: tuple[RankingResult, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClass:
    """The likeliest class of one text, and how likely each is, in the order of the model's labels."""

    index: int
    label: str
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The classes of each text, in order."""

    id: str = ""
    model: str = ""
    data: tuple[TextClass, ...]
    usage: Usage = field(default_factory=Usage)
    request_id: str | None = None
