"""Request validation before scheduling, and the limits of grammars.

Whether a request fits the context and the cache is checked by the scheduler's admission.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from windlass.engine.errors import RequestError
from windlass.engine.interface.context import NonPrefixReuseParams
from windlass.engine.interface.model_info import POOLING_KINDS, ModelInfo
from windlass.engine.interface.request import MAX_REPEAT_WINDOW, EngineRequest, PoolingRule, SamplingParams
from windlass.engine.rotary.rope_scaling import DISTANCE_KINDS
from windlass.engine.rotary.rotary_policy import RotaryPlan

MAX_SAMPLES = 64
MAX_PASSAGES = 1024
_MAX_MARKERS, _MAX_MARKER_TOKENS = 128, 64  # thinking markers: spellings, tokens of each
MAX_GRAMMAR_CHARACTERS = 4 << 20  # of a serialized grammar


def validate_request(request: EngineRequest, *, vocab_size: int) -> None:
    """Check the values of a request. Raises RequestError naming the field; a valid request cannot harm the step it runs in."""
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    if request.rope_update not in (None, "frozen", "recompute", "rotate"):
        raise RequestError("rope_update must be frozen, recompute or rotate", "rope_update")
    _check_sampling(request.sampling, vocab_size)
    if request.pooling is not None:
        _check_pooling(request.pooling, request.sampling, vocab_size)
    if request.reuse is not None:
        _check_reuse(request.reuse, len(request.prompt_token_ids))


def validate_task(request: EngineRequest, info: ModelInfo) -> None:
    """Check that the model has the head that the request needs. Raises RequestError."""
    classifier, kind = info.classifier, None if request.pooling is None else request.pooling.kind
    if kind in (None, "answer") and not info.generates:
        instead = "/v1/embeddings, /v1/score or /v1/rerank"
        if classifier is not None:
            instead = "/pooling" if classifier.per_token else "/classify, /v1/score or /v1/rerank"
        raise RequestError(
            f"this model is a {info.architecture}, which does not generate text: use {instead}",
            "model",
            "no_generation",
        )
    if kind not in ("classify", "classify tokens"):
        return
    if classifier is None:
        raise RequestError("this model has no classification head", "pooling", "no_classifier")
    if classifier.per_token != (kind == "classify tokens"):
        hint = "each token, not a text: ask /pooling for token_classify"
        raise RequestError(
            f"this model classifies {hint if classifier.per_token else 'a text: use /classify'}",
            "pooling",
            "no_classifier",
        )


def validate_distance_rules(request: EngineRequest, rotation: RotaryPlan) -> None:
    """Refuse what distance-based attention excludes, since it sets the position of every key itself. Raises RequestError."""
    kinds = {kind for group in rotation.groups for kind in (group.scaling.rope_type,) if kind in DISTANCE_KINDS}
    if not kinds:
        return
    asked = {
        "context_overflow": request.context.overflow == "shift" and "context_overflow 'shift'",
        "attention_window": request.context.attention_window is not None and "attention_window",
        "cache_reuse": request.reuse is not None and request.reuse.is_enabled and "cache_reuse",
    }
    for field, what in asked.items():
        if what:
            raise RequestError(
                f"{what} and rope_type {kinds.pop()!r} both set the positions of keys: leave one of them out",
                field,
                "unsupported_value",
            )


def _check_pooling(rule: PoolingRule, sampling: SamplingParams, vocab_size: int) -> None:
    if rule.kind not in POOLING_KINDS:
        raise RequestError(f"pooling must be one of {', '.join(POOLING_KINDS)}", "pooling")
    if rule.dimensions is not None and rule.dimensions < 1:
        raise RequestError(f"dimensions must be at least 1, got {rule.dimensions}", "dimensions")
    if rule.second_from is not None and rule.second_from < 0:
        raise RequestError(f"second_from must be a token's index, got {rule.second_from}", "pooling")
    if len(rule.answers) not in ((1, 2) if rule.kind == "answer" else (0,)):
        raise RequestError(f"pooling {rule.kind!r} was given {len(rule.answers)} tokens to answer with", "pooling")
    _check_ids("pooling", rule.answers, vocab_size)
    if sampling.max_tokens or sampling.n != 1 or sampling.prompt_logprobs is not None:
        raise RequestError("a prompt that is pooled generates nothing and has no log-probabilities", "pooling")


def _check_reuse(reuse: NonPrefixReuseParams, num_prompt_tokens: int) -> None:
    if reuse.at_least < 0:
        raise RequestError(f"cache_reuse must be at least 0, got {reuse.at_least}", "cache_reuse")
    if not 0 <= reuse.recompute < float("inf"):  # also false for NaN
        raise RequestError(
            f"cache_reuse_recompute must be a number of tokens, or a share below 1, got {reuse.recompute!r}",
            "cache_reuse_recompute",
        )
    if len(reuse.passages) > MAX_PASSAGES:
        raise RequestError(
            f"passages has {len(reuse.passages)} entries, at most {MAX_PASSAGES} are allowed", "passages"
        )
    previous_end = 0
    for start, end in sorted(reuse.passages):
        if not previous_end <= start < end <= num_prompt_tokens:
            raise RequestError(
                f"passages: [{start}, {end}) must be a non-empty part of the prompt of {num_prompt_tokens} tokens and "
                "overlap no other",
                "passages",
            )
        previous_end = end


def _check_sampling(s: SamplingParams, vocab_size: int) -> None:
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", s.max_tokens, 0, float("inf")),
        ("temperature", s.temperature, 0, 1e6),
        ("top_k", s.top_k, 0, float("inf")),
        ("top_p", s.top_p, 0, 1),
        ("min_p", s.min_p, 0, 1),
        ("typical_p", s.typical_p, 0, 1),
        ("xtc_probability", s.xtc_probability, 0, 1),
        ("xtc_threshold", s.xtc_threshold, 0, 1),
        ("repetition_penalty", s.repetition_penalty, 1e-6, 1e6),
        ("presence_penalty", s.presence_penalty, -2, 2),
        ("frequency_penalty", s.frequency_penalty, -2, 2),
        ("min_tokens", s.min_tokens, 0, max(0, s.max_tokens)),
        ("n", s.n, 1, MAX_SAMPLES),
        ("logprobs", s.logprobs or 0, 0, vocab_size),
        ("prompt_logprobs", s.prompt_logprobs or 0, 0, vocab_size),
        ("prompt_logprobs_from", s.prompt_logprobs_from, 0, float("inf")),
    )
    if s.repeats is not None:
        ranges += (
            ("dry_multiplier", s.repeats.multiplier, 0, 1e6),
            ("dry_base", s.repeats.base, 1, 1e6),
            ("dry_allowed_length", s.repeats.allowed_length, 0, float("inf")),
            ("dry_penalty_last_n", s.repeats.last_n, 1, MAX_REPEAT_WINDOW),
        )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # also false for NaN
            raise RequestError(f"{name} must lie between {low:g} and {high:g}, got {value!r}", name)
    _check_ids("stop_token_ids", s.stop_token_ids, vocab_size)
    _check_ids("logit_bias", s.logit_bias or (), vocab_size)
    if s.thinking is not None:
        if s.thinking.tokens < 0:
            raise RequestError("thinking_budget must not be negative", "thinking_budget")
        for markers in (
            (s.thinking.close, *s.thinking.opens, *s.thinking.closes),
            s.thinking.call_opens,
            s.thinking.call_closes,
        ):
            _check_markers("thinking_budget", markers, vocab_size)
    for word in s.bad_words:
        _check_ids("bad_words", word, vocab_size)
    if s.grammar is not None and len(s.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"the grammar has {len(s.grammar)} characters, at most {MAX_GRAMMAR_CHARACTERS} are allowed", "grammar"
        )
    if s.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", s.allowed_token_ids, vocab_size)
        if not s.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: no token could be sampled", "allowed_token_ids")


def _check_markers(param: str, markers: Collection[Collection[int]], vocab_size: int) -> None:
    if len(markers) > _MAX_MARKERS or not all(1 <= len(marker) <= _MAX_MARKER_TOKENS for marker in markers):
        raise RequestError(
            f"{param}: there may be {_MAX_MARKERS} markers of 1 to {_MAX_MARKER_TOKENS} tokens each", param
        )
    for marker in markers:
        _check_ids(param, marker, vocab_size)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{param}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}", param)


# llguidance compiles by recursion, and a stack that overflows ends the process. Text workers compile each grammar first, in half
# the stack that the engine has for it, so that whatever can crash ends a text worker.
GRAMMAR_STACK_BYTES: Final = 32 << 20
# Arguments of llguidance's LLParserLimits: a mask usually takes 40 microseconds and at most some 20 ms, a grammar at most about
# 100 MB.
GRAMMAR_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
