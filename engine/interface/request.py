"""Engine requests and sampling parameters.

Everything here is picklable and free of torch. Text, HTTP and chat templates are unknown at this level.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import PoolingKind
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate

MAX_REPEAT_WINDOW = 32_768  # tokens in which repeats are looked for


@dataclass(frozen=True, slots=True)
class RepeatPenalty:
    """The penalty on tokens that would go on with a sequence said before (DRY); see `windlass.engine.sampling.penalties`.

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
    """How tokens are drawn. Token ids are validated against the vocabulary by `windlass.engine.interface.validation`.

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
class PoolingRule:
    """dimensions: leading values of each row that are kept, None for all. normalize: to length 1, after that.

    second_from: the token with which the second text of a pair begins, for models that tell the two apart; None: there is one.
    answers: of "answer", the token whose logit behind the prompt is told, and perhaps one whose logit is taken off it.
    """

    kind: PoolingKind = "last"
    dimensions: int | None = None
    normalize: bool = False
    second_from: int | None = None
    answers: tuple[int, ...] = ()

    @property
    def reads_every_token(self) -> bool:
        """Whether states of others than the last token are needed: then none may come from the prefix cache."""
        return self.kind in ("mean", "first", "all", "classify tokens")
