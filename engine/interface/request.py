"""Engine requests and sampling parameters.

Picklable and free of torch. Text, HTTP and chat templates are unknown at this level.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import PoolingKind
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate

MAX_REPEAT_WINDOW = 32_768  # tokens


@dataclass(frozen=True, slots=True)
class DryParams:
    """Penalty on tokens that would continue a repetition (DRY); see `windlass.engine.sampling.penalties`.

    last_n: tokens that are searched for repetitions, 1 to MAX_REPEAT_WINDOW. breaker_ids, breaker_sequences (two ids or more):
    no repetition extends across them, and breaker_ids are never penalized.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = MAX_REPEAT_WINDOW
    breaker_ids: frozenset[int] = frozenset()
    breaker_sequences: frozenset[tuple[int, ...]] = frozenset()


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of thinking tokens: after `tokens` of them the closing marker is forced, unless thinking has ended.

    close: token ids of the marker, one or more. opens: spellings of the opening marker, which counts at the start of the output
    or after at most two tokens; without one nothing counts as thinking. Empty: the output starts inside the thinking.
    closes: further spellings of the closing marker. call_opens, call_closes: markers of tool calls. A call that is open when the
    budget is used up is finished first.
    """

    tokens: int
    close: tuple[int, ...]
    opens: tuple[tuple[int, ...], ...] = ()
    closes: tuple[tuple[int, ...], ...] = ()
    call_opens: tuple[tuple[int, ...], ...] = ()
    call_closes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Token ids are validated against the vocabulary by `windlass.engine.interface.validation`.

    temperature: 0 means greedy (argmax).
    top_k: 0 means off. top_p, typical_p: 1.0 means off. min_p: 0.0 means off.
    xtc_probability, xtc_threshold: probability that all tokens with at least this probability are excluded except the least
    likely of them; 0.0 means off.
    seed: output token i of sample s depends only on (seed, s, i); None chooses a fresh seed.
    stop_token_ids: end generation (removed from the text by the server); the model's eos ids end it too unless `ignore_eos`.
    logprobs: None for none, else the number of most likely alternatives reported with the sampled token (0 is allowed).
    prompt_logprobs: the same for every prompt token but the first. Such a request takes no prefix hits.
    prompt_logprobs_from: the first prompt token with log-probabilities; entries before it are None and their tokens may come
    from the prefix cache. 0, 1: for all.
    grammar: a grammar serialized by llguidance that the output must match, None for none. The output ends with the grammar, even
    with `ignore_eos`, and min_tokens does not extend a complete output.
    logit_bias: added to the logits. allowed_token_ids: every other id is masked. bad_words: id sequences never completed.
    n: samples generated from one prefill; outputs carry `index` 0..n-1.
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
    repeats: DryParams | None = None
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
    """One prompt to complete.

    rope_scaling: None means the server's default, `AUTO` the smallest scaling that the length needs. rope_update: policy for
    length-dependent frequencies, None for the server's or the scaling's default. rope_exact: under `recompute`, dynamic scaling
    follows every token instead of its grid.
    reuse: non-prefix KV reuse, None for none. adapter: id of a loaded adapter.
    pooling: set for a pooled prompt; then nothing is generated, and `sampling.max_tokens` is 0.
    caller, share: fairness under load: callers get parts in proportion to their `share`.
    deadline: `time.monotonic()` seconds.
    reports_progress: every step that computes a part of the prompt has an output: see `RequestOutput.prompt_computed`.
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
    reports_progress: bool = False


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """dimensions: leading values of each row that are returned, None for all. normalize: to length 1, after that.

    second_from: first token of the second text of a pair, for models that distinguish the two; None: there is one text.
    answers: for "answer", the token whose logit after the prompt is returned, and optionally one whose logit is subtracted.
    """

    kind: PoolingKind = "last"
    dimensions: int | None = None
    normalize: bool = False
    second_from: int | None = None
    answers: tuple[int, ...] = ()

    @property
    def reads_every_token(self) -> bool:
        """Whether hidden states of other tokens than the last are needed; then none may come from the prefix cache."""
        return self.kind in ("mean", "first", "all", "classify tokens")
