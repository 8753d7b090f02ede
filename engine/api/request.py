"""Plain data that crosses the boundary between server and engine: requests in, outputs and statistics out.

Everything here is picklable and free of torch. Text, HTTP and chat templates are unknown at this level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.api.adapters import AdapterInfo
from windlass.engine.api.context import ContextReport, ContextRule, NonPrefixReuseParams
from windlass.engine.api.model_heads import ClassifierInfo, PoolingDefaults
from windlass.engine.api.pooling import PooledRows, PoolingRule
from windlass.engine.rotary.groups import RotaryGroup
from windlass.engine.rotary.ladder import AutoScalingThresholds
from windlass.engine.rotary.policy import RopeUpdate, RotaryReport
from windlass.engine.rotary.scaling import RopeScaling

FinishReason = Literal["stop", "length", "abort", "timeout"]


MAX_REPEAT_WINDOW = 32_768  # tokens in which repeats are looked for


@dataclass(frozen=True, slots=True)
class RepeatPenalty:
    """The penalty on tokens that would go on with a sequence said before (DRY); see `windlass.engine.sampling.repeats`.

    last_n: tokens looked back at, 1 to MAX_REPEAT_WINDOW. breaker_ids, breaker_sequences (of two ids and more): no sequence
    goes past them, and breaker_ids lose nothing themselves.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = MAX_REPEAT_WINDOW
    breaker_ids: frozenset[int] = frozenset()
    breaker_sequences: frozenset[tuple[int, ...]] = frozenset()


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After so many tokens of thinking come those that close it, unless it has been closed.

    close: the marker's ids, one or more. opens: spellings of what begins the thinking, at the beginning of the output or after
    at most two further tokens; where none stands there, nothing is thought. Empty: the output begins inside the thinking.
    closes: further spellings of what closes it.
    """

    tokens: int
    close: tuple[int, ...]
    opens: tuple[tuple[int, ...], ...] = ()
    closes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Token ids are validated against the vocabulary by `windlass.engine.api.validation`.

    temperature: 0 means greedy (argmax).
    top_k: 0 means off. top_p, typical_p: 1.0 means off. min_p: 0.0 means off.
    xtc_probability, xtc_threshold: the chance that a draw leaves out the top choices, which hold that share each, but for the
    least likely of them; 0.0 means off.
    seed: the draw of output token i of sample s depends on (seed, s, i) alone; None picks a fresh seed.
    stop_token_ids: end generation (kept out of the text by the server); eos ids of the model end it too unless `ignore_eos`.
    logprobs: None for none, else the number of most likely alternatives reported beside the drawn token (0 is allowed).
    prompt_logprobs: the same for every prompt token but the first. Such a request takes no prefix hits.
    prompt_logprobs_from: the first prompt token they are wanted for, the entries before are None; then what stands before
    may come from the prefix cache. 0, 1: for all.
    grammar: what the output has to match, as a grammar serialized by llguidance; None for anything. It ends where the grammar
    does, also where eos is ignored, and min_tokens keeps no complete output open.
    logit_bias: added to the logits. allowed_token_ids: every other id is masked. bad_words: id sequences never completed.
    n: samples drawn from one prefill; outputs carry `index` 0..n-1.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeats: RepeatPenalty | None = None
    grammar: str | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    thinking: ThinkingBudget | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    n: int = 1


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to complete. `deadline` is `time.monotonic()` seconds.

    rope_scaling: None means the server's default, `AUTO` the least that the length needs. rope_update: when frequencies that
    depend on length change, None for the server's or the kind's default. rope_exact: under `recompute`, dynamic follows every
    token rather than its grid.
    reuse: what it may take of other prompts beside an equal beginning, None for nothing. adapter: the id of a loaded one.
    pooling: set where the prompt is to be pooled; then nothing is generated, and `sampling.max_tokens` is 0.
    caller: on whose account it runs: where more is asked for than there is, callers get equal parts, or as their `share` is to
    that of others.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rope_scaling: RopeScaling | None = None
    rope_update: RopeUpdate | None = None
    rope_exact: bool = False
    cache_salt: str | None = None
    context: ContextRule = field(default_factory=ContextRule)
    reuse: NonPrefixReuseParams | None = None
    priority: int = 0  # lower runs first, as in vLLM
    caller: str = ""
    share: float = 1.0
    deadline: float | None = None
    adapter: int | None = None
    pooling: PoolingRule | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the model's own distribution (before penalties and temperature).

    token_id/logprob/rank: the token that stands there, rank 1 being the most likely.
    top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one sample of a request.

    token_ids: new tokens only (a step may add several). logprobs: parallel to token_ids when asked for.
    prompt_logprobs: on the first output of sample 0 when asked for; entry 0 is None (the first token has no context).
    finish_reason: set on the last output of this sample. stop_token_id: the eos or stop id that ended it, if one did
    (that id is the last of `token_ids`).
    cached_tokens: prompt tokens that came from the prefix cache.
    pooled: what came of a pooled prompt, on its only output.
    rotary, context: what the sample ran under and what became of its context, on its last output unless it failed.
    error: set when the request failed; then it is the last output of the request (all samples).
    scheduled_at: `time.monotonic()` seconds when its first step was planned, on its first output.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    rotary: RotaryReport | None = None
    context: ContextReport | None = None
    error: Exception | None = None
    pooled: PooledRows | None = None
    scheduled_at: float | None = None


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The draft model beside it, or its own prediction layer, which has no path.

    num_tokens: what it proposes for a stream per step, at most; the rest as in `ModelInfo`.
    """

    path: str
    architecture: str
    quantization: str | None
    weight_dtype: str
    num_parameters: int
    weight_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine loaded: enough for the server to validate requests and to describe itself."""

    path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    trained_len: int  # M: the model's own context length
    dtype: str  # compute dtype: float32 | bfloat16 | float16
    weight_dtype: str
    kv_cache_dtype: str
    quantization: str | None  # of the weights, with the forms of their blocks: "int8 (q8_0)", "GGUF Q4_1, Q8_0"
    device: str
    num_parameters: int
    num_layers: int
    block_size: int
    num_kv_blocks: tuple[int, ...]  # per KV group
    kv_cache_bytes: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    rotary_groups: tuple[RotaryGroup, ...]  # under this server's default scaling
    model_rotary_groups: tuple[RotaryGroup, ...]  # under the model's own
    weight_bytes: int
    load_seconds: float
    rotary_ladder: AutoScalingThresholds | None = None  # what a scaling is chosen from by length
    rotary_auto: bool = False  # it is for requests that ask for nothing else
    shift_context: int = 0  # tokens that a sequence holds at once where its oldest are dropped
    max_total_tokens: int | None = None  # prompt and output of such a sequence together
    shift_refusal: str | None = None  # why no sequence of this model may drop tokens
    reuse_refusal: str | None = None  # why none may take up passages that stood elsewhere
    window_refusal: str | None = None  # why none may have an attention window
    sinks_refusal: str | None = None  # why none may have sinks in front of it
    num_states: int = 0  # blocks of what layers carry from token to token
    state_bytes: int = 0  # of such a block
    draft_model: DraftInfo | None = None
    fingerprint: str = ""  # of the weights and of all that changes what is computed from them
    adapters: tuple[AdapterInfo, ...] = ()  # those loaded at the start
    hidden_size: int = 0  # of the vectors that its states are
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    classifier: ClassifierInfo | None = None  # of a model that classifies and generates nothing
    generates: bool = True
    is_bidirectional: bool = False  # its tokens see those behind them: a text is computed in one step
    replicas: int = 1  # engines that this is said of, each with a cache of its own; they share the weights
    ranks: int = 1  # processes that each hold a part of every layer; sizes are of all of them together
    notices: tuple[str, ...] = ()  # one-line remarks for the person who started the server


MAX_TIMING_SAMPLES = 1 << 16  # of each duration that wait for somebody to ask: some MB, and hours of a busy server
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class PersistStats:
    """Of cached blocks in files and, where a device computes, in the host's memory. Blocks are those of one KV group each."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    restored_tokens: int = 0  # of prompts, whose blocks came back into the cache
    damaged_blocks: int = 0  # files that were not what their checksum says
    foreign_blocks: int = 0  # files of another block than their name says
    lost_blocks: int = 0  # blocks that were evicted before they were written
    evicted_blocks: int = 0  # files removed to hold the cap
    failures: int = 0  # to read or to write: a full disk, say
    waiting_blocks: int = 0  # to be written, now
    known_blocks: int = 0  # in files, that this engine may use, as far as it knows
    disk_bytes: int = 0  # of all files in the folder, when it was last measured, and what was written since
    host_saved_blocks: int = 0  # copied to the host's memory when the device's cache evicted them
    host_saved_bytes: int = 0
    host_read_blocks: int = 0  # copied back
    host_read_bytes: int = 0
    host_lost_blocks: int = (
        0  # evicted by the device's cache when there was no place for them, or no copy could be made
    )
    host_evicted_blocks: int = 0  # given up for others
    host_blocks: int = 0  # in the host's memory now
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of gauges and monotonically growing counters. All counters start at 0 with the engine process."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by a live request (cached blocks nobody holds count as free)
    kv_cache_usage: float = 0.0  # 0..1, of the fullest KV group
    rotary_specs_live: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0  # prompt positions passed through the model or taken from the cache
    generation_tokens: int = 0
    recomputed_tokens: dict[str, int] = field(
        default_factory=dict
    )  # by reason: preemption, full_prefix_hit, rope_update, cache_reuse
    context_shifts: int = 0  # times that a sequence dropped its oldest tokens
    dropped_tokens: int = 0  # those
    reused_passages: int = 0  # passages taken up at another place
    reused_tokens: int = 0  # those of them that were not computed again
    key_moves: int = 0  # cached tokens whose keys were re-rotated to other frequencies
    spec_decode_num_drafts: int = 0  # proposals of speculative decoding
    spec_decode_num_draft_tokens: int = 0  # tokens in them
    spec_decode_num_accepted_tokens: int = 0  # those of them that were accepted
    spec_decode_model_num_drafts: int = 0  # of these proposals, those of the draft model
    spec_decode_model_num_draft_tokens: int = 0
    spec_decode_model_num_accepted_tokens: int = 0
    queue_seconds: tuple[float, ...] = ()  # per request since the last snapshot: arrival to first schedule
    prefill_seconds: tuple[float, ...] = ()  # first schedule to first token
    decode_seconds: tuple[float, ...] = ()  # first token to the end
    inference_seconds: tuple[float, ...] = ()  # first schedule to the end
    step_tokens: tuple[
        int, ...
    ] = ()  # steps by the tokens they computed: up to each of STEP_TOKENS, and more; () for none
    step_tokens_sum: int = 0  # those tokens
    adapters_loaded: int = 0
    adapter_bytes: int = 0  # of memory
    persist: PersistStats = field(default_factory=PersistStats)
    engines: tuple[EngineStats | None, ...] = ()  # of each, where this is the sum of several; None: it has none now
