"""What the operator says of contexts, where requests do not: refused at the start where every such request would be refused.

Knows settings and what a model is described as; starts and loads nothing.
"""

from __future__ import annotations

import re

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.context import DEFAULT_KEEP_TOKENS, MIN_PASSAGE_TOKENS, ContextRule, ContextSizes
from windlass.engine.model.model_spec import ContextRefusals, ModelSpec, context_refusals
from windlass.engine.rotary.rope_scaling import DISTANCE_KINDS
from windlass.server.options.server import ServerOptions
from windlass.server.options.settings import ServerSettings

_FIELD = re.compile(r"\b(?:attention_window|attention_sinks|keep_tokens|context_overflow)\b")


def most_sizes(config: EngineConfig, spec: ModelSpec) -> ContextSizes:
    """What sequences may hold at most: how much of it there is memory for is known once the model is loaded."""
    longest = config.max_model_len or spec.trained_len
    held = config.context.shift_context or longest
    return ContextSizes(
        longest, config.cache.block_size, held, config.context.max_total_tokens, **context_refusals(spec)
    )


def check_own_rule(settings: ServerSettings, sizes: ContextSizes) -> None:
    """Raises LoadError, one line with the option at fault."""
    sinks, window, keep = settings.attention_sinks, settings.attention_window, settings.keep_tokens
    if settings.cache_reuse < 0 or 0 < settings.cache_reuse < MIN_PASSAGE_TOKENS:
        raise LoadError(f"--cache-reuse must be 0 or at least {MIN_PASSAGE_TOKENS}, got {settings.cache_reuse}")
    if sinks and window is None:
        raise LoadError("--attention-sinks goes with --attention-window")
    try:
        sizes.size(ContextRule("stop", 0, window, sinks))
        if settings.context_overflow == "shift":
            sizes.size(ContextRule("shift", DEFAULT_KEEP_TOKENS if keep is None else keep))
    except RequestError as error:
        named = _FIELD.sub(lambda name: "--" + name[0].replace("_", "-"), error.message)
        hint = " (its default)" if named.startswith("--keep-tokens") and keep is None else ""
        raise LoadError(named + hint) from None


def check_goes_with_model(server: ServerOptions, spec: ModelSpec) -> None:
    """Raises LoadError for what no request could have of this model, whatever its lengths."""
    _check_moved_keys(server, {group.scaling.rope_type for group in spec.rotary_groups})
    _check_context(server, context_refusals(spec))


def _check_moved_keys(server: ServerOptions, kinds: set[str]) -> None:
    """Refuse what every request would be refused for that asks for nothing else. kinds: of the scaling they run under."""
    options = {
        "--context-overflow shift": server.context_overflow == "shift",
        "--attention-window": server.attention_window is not None,
        "--cache-reuse": server.cache_reuse > 0,
    }
    for option, given in options.items():
        if given and (kind := next(iter(kinds & {*DISTANCE_KINDS}), None)) is not None:
            raise LoadError(f"{option} and rope_type {kind!r} both say where keys stand: leave one of them out")


def _check_context(server: ServerOptions, refusals: ContextRefusals) -> None:
    """Refuse what the model itself does not allow of a context, and every request would be refused for."""
    window = server.attention_window is not None
    for option, given, refusal in (
        ("--context-overflow shift", server.context_overflow == "shift", refusals["shift_refusal"]),
        ("--cache-reuse", server.cache_reuse > 0, refusals["reuse_refusal"]),
        ("--attention-window", window, refusals["window_refusal"]),
        ("--attention-sinks", window and server.attention_sinks > 0, refusals["sinks_refusal"]),
    ):
        if given and refusal is not None:
            raise LoadError(f"{option}: {refusal}: leave it out")
