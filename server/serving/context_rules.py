"""Context rules of a request: overflow, attention window and reuse of cached passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from windlass.engine.interface.context import (
    DEFAULT_KEEP_TOKENS,
    MIN_PASSAGE_TOKENS,
    ContextRule,
    NonPrefixReuseParams,
)
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.app.state import ServerState
from windlass.server.config.settings import ContextOverflow, ServerSettings
from windlass.server.errors import bad_request
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.schemas.pooling import PromptRequest

DEFAULT_RECOMPUTE = 0.15  # fraction of a passage, at its head; from the table in docs/guides/endless-generation.md


def resolve_context_rule(body: GenerationRequest, overflow: ContextOverflow, settings: ServerSettings) -> ContextRule:
    """The rule of a request under `overflow`; raises ApiError for fields that exclude each other."""
    if body.keep_tokens is not None and overflow != "shift":
        raise bad_request("keep_tokens requires context_overflow shift", "keep_tokens")
    keep = settings.keep_tokens if body.keep_tokens is None else body.keep_tokens
    return replace(
        resolve_window_rule(body, settings),
        overflow="shift" if overflow == "shift" else "stop",
        keep_tokens=DEFAULT_KEEP_TOKENS if keep is None else keep,
    )


def resolve_window_rule(body: GenerationRequest | PromptRequest, settings: ServerSettings) -> ContextRule:
    """The attention window; raises ApiError for fields that exclude each other."""
    window, sinks = body.attention_window, body.attention_sinks
    if window is None:
        window = settings.attention_window
        sinks = settings.attention_sinks if sinks is None else sinks
    if sinks and window is None:
        raise bad_request("attention_sinks requires attention_window", "attention_sinks")
    return ContextRule(attention_window=window, attention_sinks=sinks or 0)


def resolve_cache_salt(
    body: GenerationRequest | PromptRequest, caller: str, state: ServerState, *, passages: bool = False
) -> str | None:
    """The salt of a request's cached blocks, or the one of its passages: the caller's key, if keys are required, and the
    `cache_salt` of the body.

    The owner is always part of it, however many keys there are: a key that is added later finds no block of earlier ones.
    `shared_prefix_cache` removes the owner, but not from passages without a `cache_salt`, which reveal what preceded them.
    """
    salt = None if body.cache_salt is None else f"salt {body.cache_salt}"
    settings = state.settings
    if not settings.requires_key or (settings.shared_prefix_cache and not (passages and salt is None)):
        return salt
    return " ".join(filter(None, (state.callers.cache_owner(caller), salt)))


def resolve_reuse(body: GenerationRequest, scope: str, settings: ServerSettings, *, chat: bool) -> NonPrefixReuseParams:
    """Non-prefix reuse of other prompts' KV; raises ApiError for invalid fields. scope: see `NonPrefixReuseParams`.

    Without reuse the request's own passages can still be reused by others.
    """
    at_least = settings.cache_reuse if body.cache_reuse is None else body.cache_reuse
    if 0 < at_least < MIN_PASSAGE_TOKENS:
        raise bad_request(
            f"cache_reuse must be 0 or at least {MIN_PASSAGE_TOKENS}: shorter passages are not reused, got {at_least}",
            "cache_reuse",
        )
    if body.cache_reuse_recompute is not None and not at_least and body.passages is None:
        raise bad_request("cache_reuse_recompute requires cache_reuse or passages", "cache_reuse_recompute")
    if body.passages is not None and body.cache_reuse == 0:
        raise bad_request(
            "cache_reuse 0 reuses nothing, passages name what to reuse: leave one of them out", "cache_reuse"
        )
    if body.passages is not None and chat:
        raise bad_request("passages requires a prompt: chats have cache_reuse", "passages")
    spans = tuple((span.start, span.end) for span in body.passages or ())
    recompute = DEFAULT_RECOMPUTE if body.cache_reuse_recompute is None else body.cache_reuse_recompute
    return NonPrefixReuseParams(at_least, spans, recompute, scope)


def retain_system_prompt(rule: ContextRule, head: Sequence[int], prompt: Sequence[int], info: ModelInfo) -> ContextRule:
    """The rule that retains a chat's system prompt, as far as a shift can: the tokens that `prompt` shares with `head`, the
    system prompt alone. Without shared tokens, the rule unchanged.
    """
    shared = next(
        (i for i, (a, b) in enumerate(zip(head, prompt, strict=False)) if a != b), min(len(head), len(prompt))
    )
    size = info.block_size
    most = info.shift_context // size * size - 2 * size
    return replace(rule, keep_tokens=max(0, min(shared, most))) if shared else rule
