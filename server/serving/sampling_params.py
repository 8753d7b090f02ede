"""`SamplingParams` of a request: defaults, checks and the limit of the context."""

from __future__ import annotations

from collections.abc import Collection

from windlass.engine.interface.context import ContextSize
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import MAX_REPEAT_WINDOW, DryParams, SamplingParams
from windlass.server.config.settings import SamplingDefaults
from windlass.server.errors import bad_request, context_length_exceeded
from windlass.server.schemas.generation import GenerationRequest

DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
NEUTRAL = SamplingDefaults()
MIN_TEMPERATURE = 1e-6  # lower ones select the argmax anyway, and 1/temperature must stay finite


def resolve_max_tokens(body: GenerationRequest, default: int) -> int:
    """`max_tokens`, `max_completion_tokens` or the default; raises ApiError if the two differ."""
    first, second = body.max_tokens, body.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise bad_request(
            f"max_tokens is {first} and max_completion_tokens is {second}: give one of them", "max_completion_tokens"
        )
    given = first if first is not None else second
    return default if given is None else given


def samples_per_prompt(body: GenerationRequest) -> tuple[int, int]:
    """(n, best_of); raises ApiError if best_of is below n or cannot be streamed."""
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise bad_request(f"best_of ({best_of}) must not be below n ({n})", "best_of")
    if best_of > n and body.stream:
        raise bad_request("best_of above n cannot be streamed: the best answer is known only at the end", "best_of")
    return n, best_of


def build_sampling(
    body: GenerationRequest,
    info: ModelInfo,
    *,
    max_tokens: int,
    samples: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: SamplingDefaults = NEUTRAL,
) -> SamplingParams:
    """Parameters of all prompts of a request, without those that need tokenizing; raises ApiError naming the field.

    samples: outputs per prompt. max_tokens: as requested, see `fit_to_context`. defaults: for fields that are not set.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({min_tokens}) must not be above max_tokens ({max_tokens})", "min_tokens")
    logit_bias = body.logit_bias or None
    check_ids(logit_bias or (), info.vocab_size, "logit_bias")
    check_ids(body.stop_token_ids or (), info.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), info.vocab_size, "allowed_token_ids")
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=0 if top_k <= 0 or top_k >= info.vocab_size else top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        typical_p=defaults.typical_p if body.typical_p is None else body.typical_p,
        xtc_probability=body.xtc_probability or 0.0,
        xtc_threshold=0.1 if body.xtc_threshold is None else body.xtc_threshold,
        repetition_penalty=defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repeats=_repeats(body),
        logit_bias=logit_bias,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=samples,
    )


def _repeats(body: GenerationRequest) -> DryParams | None:
    """The penalty on repeats without the tokens of its breakers; None if it is off."""
    given = body.dry_penalty_last_n
    last_n = MAX_REPEAT_WINDOW if given is None or given < 0 else given
    if not body.dry_multiplier or not last_n:
        return None
    return DryParams(
        multiplier=body.dry_multiplier,
        base=1.75 if body.dry_base is None else body.dry_base,
        allowed_length=2 if body.dry_allowed_length is None else body.dry_allowed_length,
        last_n=last_n,
    )


def sequence_breakers(body: GenerationRequest) -> list[str]:
    """Texts that end a repeated sequence."""
    return list(DEFAULT_BREAKERS if body.dry_sequence_breakers is None else body.dry_sequence_breakers)


def fit_to_context(max_tokens: int, prompt_tokens: int, size: ContextSize, *, param: str) -> int:
    """`max_tokens` clamped to the rest of the context; raises ApiError if the prompt leaves nothing.

    With max_tokens 0 (scoring) the prompt may fill the whole context.
    """
    left = size.longest_prompt - prompt_tokens
    if left < 0 or (left == 0 and max_tokens > 0):
        raise context_length_exceeded(size.longest_prompt, prompt_tokens, param=param)
    return min(max_tokens, size.longest - prompt_tokens)


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for an id outside the vocabulary."""
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"{param}: token id {token_id} is outside the vocabulary, ids run from 0 to {vocab_size - 1}", param
            )
