"""Defaults that a model's files and the operator set: sampling, context handling and ranking."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.context import DEFAULT_KEEP_TOKENS, ContextRule, ContextSizes
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.model.loading.model_description import read_json
from windlass.engine.model.loading.sentence_transformers_files import read_reranker_config
from windlass.engine.model.model_spec import ModelSpec, context_refusals
from windlass.engine.rotary.rope_scaling import DISTANCE_KINDS
from windlass.server.config.option import read_template_file, split
from windlass.server.config.server_options import (
    GENERATION_CONFIG_FILE,
    NO_GENERATION_CONFIG,
    ServerOptions,
    generation_config_path,
    read_override,
    read_sampling,
)
from windlass.server.config.settings import RankSettings, SamplingDefaults, ServerSettings
from windlass.server.serving.request_rotation import check_profiles
from windlass.server.text.tokenizer_files import QWEN3_RERANKER_TEMPLATE

RECOMMENDED = "recommended by its authors"
OVERRIDE_OPTION = "--override-generation-config"
_ADVICE = "correct the file, or start with `generation_config=none`"
_QWEN3 = "qwen3"
_QWEN3_TOKENS = ("yes", "no")


@dataclass(frozen=True, slots=True)
class ModelSampling:
    """Default sampling of a model. sources: for display, the origin of each field that is not neutral by default."""

    sampling: SamplingDefaults
    sources: Mapping[str, str] = field(default_factory=dict)


def find_sampling(
    directory: Path, recommended: Mapping[str, float], given: str = "auto", override: str | None = None
) -> ModelSampling:
    """Default sampling from the model's file, else the recommended values, else neutral ones.

    recommended: known for the model in addition to its file. given: --generation-config. override:
    --override-generation-config. Lengths (`max_new_tokens`) are ignored: the operator sets them. Raises LoadError, one line,
    for values that no request could set either.
    """
    other = generation_config_path(given)
    path = directory / GENERATION_CONFIG_FILE if other is None else other
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if other is None and given not in NO_GENERATION_CONFIG:
        values |= recommended
        sources |= dict.fromkeys(recommended, RECOMMENDED)
    if other is not None or (given not in NO_GENERATION_CONFIG and path.is_file()):
        of_file = {name: value for name, value in read_json(path).items() if value is not None}
        values |= of_file
        sources |= dict.fromkeys(
            read_sampling(of_file, str(path), _ADVICE), GENERATION_CONFIG_FILE if other is None else str(path)
        )
    replaced = read_override(override)
    if "temperature" in replaced and "do_sample" not in replaced:
        values.pop("do_sample", None)  # a given temperature is meant to apply
    values |= replaced
    sources |= dict.fromkeys([*replaced, *read_sampling(replaced, "", "")], OVERRIDE_OPTION)
    found = read_sampling(values, str(path), _ADVICE)
    return ModelSampling(SamplingDefaults(**found), {name: sources[name] for name in found})


def max_context_sizes(config: EngineConfig, spec: ModelSpec) -> ContextSizes:
    """Upper limits of sequences before loading: the memory available for them is known only after it."""
    longest = config.max_model_len or spec.trained_len
    held = config.context.shift_context or longest
    return ContextSizes(
        longest, config.cache.block_size, held, config.context.max_total_tokens, **context_refusals(spec)
    )


def check_loaded(settings: ServerSettings, info: ModelInfo) -> None:
    """Check rotary profiles and context options against the loaded model. Raises LoadError, one line."""
    check_profiles(settings.rope_profiles, info.rotary_groups)
    check_context_defaults(settings, info)


def check_context_defaults(settings: ServerSettings, sizes: ContextSizes, kinds: Collection[str] = ()) -> None:
    """Refuse context options that every request of this model would be refused for. Raises LoadError, one line.

    kinds: `rope_type` of the scalings in use.
    """
    window, sinks, keep = settings.attention_window, settings.attention_sinks, settings.keep_tokens
    shift = settings.context_overflow == "shift"
    distance = next((kind for kind in kinds if kind in DISTANCE_KINDS), None)
    for option, given, refusal in (
        ("`context_overflow=shift`", shift, sizes.shift_refusal),
        ("`attention_window`", window is not None, sizes.window_refusal),
        ("`attention_window`", window is not None and sinks > 0, sizes.sinks_refusal),
        ("`cache_reuse`", settings.cache_reuse > 0, sizes.reuse_refusal),
    ):
        if given and distance is not None:
            raise LoadError(f"{option} and rope_type {distance!r} both define positions of keys: leave one of them out")
        if given and refusal is not None:
            raise LoadError(f"{option}: {refusal}: leave it out")
    try:
        sizes.size(ContextRule("stop", 0, window, sinks))
        if shift:
            sizes.size(ContextRule("shift", DEFAULT_KEEP_TOKENS if keep is None else keep))
    except RequestError as error:
        named = "attention_window" if error.param == "attention_sinks" else error.param
        hint = " (its default)" if named == "keep_tokens" and keep is None else ""
        raise LoadError(f"`{named}` {error.message.removeprefix(f'{named} ')}{hint}") from None


def rank_settings(path: Path, server: ServerOptions, spec: ModelSpec | None) -> RankSettings | None:
    """Ranking settings of the model in a directory; None if it scores pairs without a prompt. Raises LoadError.

    spec: if None, the model is assumed to generate.
    """
    given = _check_rank_tokens(server, spec)
    template = _read_rank_template(server)
    if spec is not None and not spec.generates:
        one = spec.head is not None and not spec.head.classes.per_token and len(spec.head.classes.labels) == 1
        return (
            RankSettings(template=template, needs_template=template is not None)
            if one and not spec.is_bidirectional
            else None
        )
    declared = read_reranker_config(path)
    instruction = None if declared is None else declared.instruction
    tokens = given or (() if declared is None else declared.tokens)
    if server.rerank_template == _QWEN3:
        tokens = tokens or _QWEN3_TOKENS
    elif template is None and declared is not None and declared.is_qwen3_reranker:
        template = QWEN3_RERANKER_TEMPLATE
    if not tokens:
        if template is None:
            return None
        raise LoadError(
            f"`rerank_template={server.rerank_template}`: the model's files do not name the tokens it answers with: set "
            "`rerank_tokens`, such as no,yes"
        )
    needs_template = bool(given) or template is not None  # a declaration in the files alone does not prevent generation
    return RankSettings(template=template, needs_template=needs_template, tokens=tokens, instruction=instruction)


def _check_rank_tokens(server: ServerOptions, spec: ModelSpec | None) -> tuple[str, ...]:
    """The operator's tokens, the accepting one first. Raises LoadError for options that this model does not support."""
    tokens = split(server.rerank_tokens)
    if server.rerank_tokens is not None and len(tokens) not in (1, 2):
        raise LoadError(f"`rerank_tokens` takes one token or two, the refusal first: no,yes; got {len(tokens)}")
    if spec is None or spec.generates:
        return tuple(reversed(tokens))
    if tokens:
        raise LoadError(f"`rerank_tokens`: a {spec.architecture} generates no tokens: leave it out")
    if server.rerank_template is not None:
        if spec.head is None or spec.head.classes.per_token or len(spec.head.classes.labels) != 1:
            raise LoadError(
                f"`rerank_template`: a {spec.architecture} without exactly one class ranks no pairs: leave it out"
            )
        if spec.is_bidirectional:
            raise LoadError("`rerank_template`: pairs are joined by the tokenizer of this model: leave it out")
    return ()


def _read_rank_template(server: ServerOptions) -> str | None:
    """The source of the operator's template, which a text worker compiles. Raises LoadError for a file that cannot be read."""
    given = server.rerank_template
    if given is None or given == _QWEN3:
        return QWEN3_RERANKER_TEMPLATE if given == _QWEN3 else None
    return read_template_file("rerank_template", Path(given))
